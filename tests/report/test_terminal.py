"""Tables of a report on a terminal."""

from __future__ import annotations

import re

from mismatch_cli.report.outline import Column, Excerpt, Priority, Table, TokenText
from mismatch_cli.report.terminal import excerpt_line, print_table
from tests.report.printed import printed


def shown(width: int, table: Table, **terminal: object) -> str:
    return printed(table, width, print_table, **terminal)


COLUMNS = (
    Column("metric", kind="text"),
    Column("value"),
    Column("95 % interval"),
    Column("seen by", priority=Priority.SPARE),
)
ROW = ("outside [0.8, 1.25]", "0.43 ± 0.02", "[0.1, 0.9]", "12")


def test_a_narrow_table_hides_optional_columns_then_intervals_but_no_part_of_a_name():
    table = Table("", COLUMNS, (ROW,))
    wide = shown(80, table)
    assert all(cell in wide for cell in ROW) and "Hidden" not in wide
    assert "Hidden at 48 characters: seen by." in " ".join(shown(48, table).split())
    narrow = " ".join(shown(30, table).split())
    assert "outside [0.8, 1.25] 0.43 Hidden at 30 characters: seen by, intervals." in narrow


def test_a_note_counts_the_rows_that_are_left_out():
    rows = tuple((name, "1", "", "") for name in "abc")
    for shown_rows, note in ((2, "1 more row in report.html."), (1, "2 more rows in report.html.")):
        assert note in shown(80, Table("", COLUMNS, rows, terminal_rows=shown_rows))


def test_signs_have_their_colours_and_a_limit_that_does_not_hold_its_row():
    columns = (Column("metric", kind="text"), Column("measured"), Column("status", kind="text"))
    rows = (
        ("k1", "0.1", "✔ holds"),
        ("k3", "0.2", "✘ EXCEEDED"),
        ("kl", "0.3", "? not judged"),
        ("tv", "0.4", "! between"),
        ("d", "0.5", "not a sign"),
    )
    text = shown(80, Table("", columns, rows), color_system="standard", force_terminal=True)
    _, holds, exceeded, *undecided, plain = text.splitlines()
    assert "\x1b[32m✔ holds" in holds and holds.startswith("k1")
    assert exceeded.startswith("\x1b[31mk3") and "\x1b[1;31m✘ EXCEEDED" in exceeded
    assert all("\x1b[33m" + row[2] in line for row, line in zip(rows[2:], undecided, strict=False))
    assert "\x1b" not in plain


def test_values_line_up_where_intervals_have_two_forms():
    """`± x` and `[a, b]` in a column; `0` has neither, and a pair of values stays as it is."""
    columns = (Column("", kind="text"), Column("blocked, %"), Column("ε"))
    rows = (
        ("a", "84.7 ± 6.4 †", "0.2 / 0.28"),
        ("b", "3.1 [1.8, 5.7]°", "0.39 [0.35, 0.48]"),
        ("c", "0", "0.1 ± 0.2"),
    )
    lines = shown(80, Table("", columns, rows)).splitlines()
    assert lines == [
        "        blocked, %                 ε",
        "a 84.7 ± 6.4 †            0.2 / 0.28",
        "b  3.1 [1.8, 5.7]° 0.39 [0.35, 0.48]",
        "c    0                     0.1 ± 0.2",
    ]


def test_names_stay_even_if_nothing_else_fits():
    narrow = " ".join(shown(16, Table("", COLUMNS, (ROW,))).split())
    assert "outside 0.43 [0.8, 1.25]" in narrow


def test_columns_that_all_must_stay_do_not_end_in_an_error_on_a_tiny_terminal():
    always = [Column(word, priority=Priority.ALWAYS) for word in ("statuses", "remedies")]
    table = Table("", (Column("metric", kind="text"), *always), (("outside", "exceeded", "none"),))
    assert "outside" in "".join(shown(6, table).split())


def test_a_line_of_context_has_no_half_of_an_id():
    """Tokens of a trace without a vocabulary show as ⟨id⟩."""
    around = "".join(f"⟨{token}⟩" for token in range(19_330, 19_370))
    excerpt = Excerpt("“⟨7⟩”", (), (TokenText(around), TokenText("⟨7⟩", 4), TokenText(around)))
    for width in range(40, 60):
        _, line = map(str, excerpt_line(excerpt, width))
        assert re.fullmatch(r" {2}(⟨\d+⟩)+»⟨7⟩«(⟨\d+⟩)+", line) and len(line) <= width - 2
