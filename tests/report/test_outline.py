"""What a page says once is in each of its forms: screen, full terminal, page, notebook, Markdown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.html import render_html, render_screen
from mismatch_cli.report.markdown import as_markdown
from mismatch_cli.report.outline import (
    Brief,
    Excerpt,
    MetricGroup,
    MetricRow,
    Outline,
    Priority,
    Profile,
    Section,
    TokenText,
    Verdict,
)
from mismatch_cli.report.screen import as_text, print_screen, screen_of
from mismatch_cli.report.tables import col, table, text
from tests.report.printed import printed

LINES, WIDTH = 40, 80


def outline(rows: int = 3, notes: int = 1, **changes: object) -> Outline:
    columns = [
        text("name", lambda n: f"row-{n}"),
        col("a column that was added", lambda n: f"{n}.5", short="added"),
        col("status", lambda n: "✔ holds", priority=Priority.ALWAYS),
        text("source", lambda n: f"source-{n}", priority=Priority.FULL),
    ]
    shown = table("The table", range(rows), columns, brief=Brief.first(rows, note="A note."))
    view = Outline(
        title="Is it right?",
        subject=("what was measured", "how much of it"),
        about=(("Model", "a model"),),
        verdict=Verdict("RIGHT", "Nothing is wrong.", "good"),
        notes=tuple(f"Left out: {n} things." for n in range(notes)),
        remarks=(("Fact", "a fact that was added"),),
        next=(("mismatch-cli report", "the same again"),),
        parts=[Section("Numbers", tables=(shown,))],
    )
    return replace(view, **changes)


def forms(view: Outline) -> dict[str, str]:
    screen = screen_of(view)
    return {
        "screen": as_text(screen, WIDTH),
        "terminal": printed(view, 200),
        "page": render_html(view),
        "notebook": render_screen(screen),
        "Markdown": as_markdown(view).replace("\\", ""),
    }


def test_a_column_is_in_every_form():
    for name, words in forms(outline()).items():
        head = "added" if name in ("screen", "notebook") else "a column that was added"
        assert head in words and "2.5" in words and "✔ holds" in words, name


def test_the_numbers_of_a_metric_are_under_their_heads():
    row = MetricRow(METRICS["k3"], "1.5", "[1.2, 1.9]", "0.003", "500 ×")
    shown = forms(outline(parts=[Section("Numbers", groups=(MetricGroup("", (row,)),))]))
    terminal, page = (
        " ".join(re.sub("<[^>]*>", " ", shown[name]).split()) for name in ("terminal", "page")
    )
    assert "value 95 % interval × noise noise" in terminal
    assert "1.5 [1.2, 1.9] 500 × 0.003" in terminal
    assert "Value 95 % interval Noise × noise" in page
    assert "1.5 nats/token [1.2, 1.9] 0.003 500 ×" in page


def test_a_fact_is_in_every_form_with_an_answer():
    shown = forms(outline())
    for name in shown.keys() - {"terminal"}:
        assert "a fact that was added" in shown[name], name
        assert "right" in shown[name].lower() and "Nothing is wrong." in shown[name], name


def test_what_is_for_the_page_is_not_on_a_screen():
    shown = forms(outline())
    for name, words in shown.items():
        assert ("source-1" in words) == (name not in ("screen", "notebook")), name


def test_a_page_without_a_verdict_has_no_screen():
    assert screen_of(outline(verdict=None)) is None


@pytest.mark.parametrize("rows", [3, 20, 60, 500])
@pytest.mark.parametrize("notes", [0, 1, 12])
def test_a_screen_has_forty_lines_and_says_what_it_left_out(rows, notes):
    words = as_text(screen_of(outline(rows, notes)), WIDTH)
    assert len(words.splitlines()) <= LINES
    assert "RIGHT  Nothing is wrong." in words and "a fact that was added" in words
    assert "row-0" in words and "A note." in words
    left = rows - sum(f"row-{n} " in words for n in range(rows))
    assert (f"… {left:,} more: --full" in words) == bool(left)
    if notes > 1 and "Left out: 1 things." not in words:
        assert f"{notes - 1} more notes: --full" in words


def test_the_most_important_rows_stay_in_the_order_of_the_table():
    """The last of sixty rows is the most important one; ten never give way."""
    view = outline(60)
    (shown,) = view.parts[0].tables
    brief = Brief([59, *range(59)], fewest=10)
    few = replace(view, parts=[Section("Numbers", tables=(replace(shown, brief=brief),))])
    rows = [row[0] for row in screen_of(few).tables[0].rows]
    assert 10 <= len(rows) < 60 and rows[0] == "row-0" and rows[-1] == "row-59"
    assert rows == sorted(rows, key=lambda name: int(name.removeprefix("row-")))


def test_excerpts_give_way_before_the_rows_that_have_to_stay():
    token = Excerpt("a token", (), (TokenText("text"),), short="Worst token")
    profile = Profile("by position", (1.0, 2.0), "0", "9")
    brief = Brief.first(26, fewest=26)
    (shown,) = outline(26).parts[0].tables
    sections = [Section("Numbers", tables=(replace(shown, brief=brief),), excerpts=[token] * 6)]
    screen = screen_of(outline(26, parts=sections, profiles=(profile,)))
    assert len(screen.tables[0].rows) == 26 and len(screen.excerpts) < 6
    assert screen.verdict.words == "RIGHT" and screen.next


def test_excerpts_that_were_asked_for_stay():
    token = Excerpt("a token", (), (TokenText("text"),), short="Worst token", stays=True)
    view = outline(60, parts=[*outline(60).parts, Section("Tokens", excerpts=[token] * 30)])
    screen, usual = screen_of(view), screen_of(outline(60))
    assert len(screen.excerpts) == 30 and not screen.left_out
    assert screen.tables == usual.tables and screen.verdict == usual.verdict


def test_no_status_is_hidden_where_there_is_no_room():
    words = printed(screen_of(outline()), 17, print_screen)
    assert words.count("✔ holds") == 3 and "Hidden at 17 characters: added." in " ".join(
        words.split()
    )
