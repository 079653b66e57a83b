"""Tables of a report on a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from mismatch_cli.report.terminal import excerpt_line, print_table
from mismatch_cli.report.view import Column, Excerpt, Piece, Table


def printed(width: int, *tables: Table) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables:
        print_table(table, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


COLUMNS = (
    Column("metric", kind="text"),
    Column("value"),
    Column("95 % interval"),
    Column("seen by", optional=True),
)
ROW = ("outside [0.8, 1.25]", "0.43 ± 0.02", "[0.1, 0.9]", "12")


def test_a_narrow_table_hides_optional_columns_then_intervals_but_no_part_of_a_name():
    table = Table("", COLUMNS, (ROW,))
    wide = printed(80, table)
    assert all(cell in wide for cell in ROW) and "Hidden" not in wide
    assert "Hidden at 48 characters: seen by." in " ".join(printed(48, table).split())
    narrow = " ".join(printed(30, table).split())
    assert "outside [0.8, 1.25] 0.43 Hidden at 30 characters: seen by, intervals." in narrow


def test_names_stay_even_if_nothing_else_fits():
    narrow = " ".join(printed(16, Table("", COLUMNS, (ROW,))).split())
    assert "outside 0.43 [0.8, 1.25]" in narrow


def test_a_line_of_context_has_no_half_of_an_id():
    """Tokens of a trace without a vocabulary show as ⟨id⟩."""
    around = "".join(f"⟨{token}⟩" for token in range(19_330, 19_370))
    excerpt = Excerpt("“⟨7⟩”", (), (Piece(around), Piece("⟨7⟩", 4), Piece(around)))
    for width in range(40, 60):
        _, line = map(str, excerpt_line(excerpt, width))
        assert re.fullmatch(r" {2}(⟨\d+⟩)+»⟨7⟩«(⟨\d+⟩)+", line) and len(line) <= width - 2
