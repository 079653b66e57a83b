"""Token text for a terminal, a page and a figure: nothing in it is interpreted, and everything
is visible.
"""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from mismatch_cli.base.text import (
    for_html,
    for_mathtext,
    for_terminal,
    parse_json,
    parse_toml,
    visible,
)

NASTY = [
    ("[bold]x[/bold]", "[bold]x[/bold]"),
    ("[/]", "[/]"),
    (":smile:", ":smile:"),
    ("\\[red]", "\\[red]"),
    ("ends with \\", "ends with \\"),
    ("\x1b[2J", "\\x1b[2J"),
    ("\x1b]8;;http://x\x07", "\\x1b]8;;http://x\\x07"),
    ("a\nb\r\n\tc", "a⏎b\\x0d⏎⇥c"),
    ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
    ("\u202eevil\u202c", "\\u202eevil\\u202c"),
    ("\u2066a\u2069\u200f", "\\u2066a\\u2069\\u200f"),
    ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
    ("line\u2028para\u2029", "line\\u2028para\\u2029"),
    ("\ud800", "\\ud800"),
    ("\U000e0041\U0010ffff", "\\U000e0041\\U0010ffff"),
    ("<script>alert(1)</script>", "<script>alert(1)</script>"),
    ("$\\frac{1}{2}$", "$\\frac{1}{2}$"),
    (" Ünïcödé 漢字 שלום 🙂 é", " Ünïcödé 漢字 שלום 🙂 é"),
]


@pytest.mark.parametrize(("text", "expected"), NASTY)
def test_visible_spells_out_what_cannot_be_seen(text: str, expected: str) -> None:
    assert visible(text) == expected


@pytest.mark.parametrize(("text", "expected"), NASTY)
def test_a_terminal_shows_the_text_and_interprets_nothing(text: str, expected: str) -> None:
    assert _printed(for_terminal(text)) == expected
    table = Table.grid()
    table.add_row(for_terminal(text))
    assert _printed(table).rstrip() == expected.rstrip()


@given(st.text())
def test_nothing_invisible_is_left(text: str) -> None:
    shown = visible(text)
    shown.encode("utf-8")
    assert visible(shown) == shown
    assert all(character.isprintable() or character.isspace() for character in shown)
    assert "\n" not in shown


def test_a_page_keeps_the_lines() -> None:
    assert for_html("a\n\nb\x1b") == "a⏎\n⏎\nb\\x1b"


def test_a_dollar_in_a_figure_is_a_dollar() -> None:
    from matplotlib.text import Text

    for text in ("$\\frac{1}{2}$", "$", "a $b$ $c", "\\$x$", "100 $"):
        drawn = Text(text=for_mathtext(text))
        shown, is_math = drawn._preprocess_math(drawn.get_text())  # what matplotlib finally draws
        assert (shown, is_math) == (text, False)


def test_a_figure_has_a_glyph_for_every_character(recwarn: pytest.WarningsRecorder) -> None:
    from matplotlib.figure import Figure

    assert for_mathtext("漢 ok") == "\\u6f22 ok"
    figure = Figure()
    figure.text(0, 0, for_mathtext("".join(text for text, _ in NASTY)))
    figure.savefig(io.BytesIO(), format="png")
    assert not recwarn.list


def _printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=400, force_terminal=False)
    console.print(renderable, end="")
    return console.file.getvalue().removesuffix("\n")  # type: ignore[attr-defined]


@pytest.mark.parametrize("levels", [101, 900, 5000, 100_000])
def test_json_and_toml_that_are_nested_too_deeply(levels):
    for parse, text in (
        (parse_json, "[" * levels),
        (parse_json, "[" * levels + "]" * levels),
        (parse_json, '{"a":' * levels + "1" + "}" * levels),
        (parse_toml, "a = " + "[" * levels + "]" * levels),
    ):
        with pytest.raises(ValueError, match=r"over 100 levels deep|line \d"):
            parse(text)


def test_json_and_toml_that_are_not():
    assert parse_json('{"a": [NaN, {}]}')["a"][1] == {} and parse_toml("a.b = [1]") == {
        "a": {"b": [1]}
    }
    assert parse_json("[" * 99 + "]" * 99)
    for parse, text in (
        (parse_json, b"\xff\x00"),
        (parse_json, "1" * 5000),
        (parse_toml, "a"),
        (parse_json, ""),
    ):
        with pytest.raises(ValueError):
            parse(text)
