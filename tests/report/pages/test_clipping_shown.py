"""The report on a terminal and as a page: legible at every width, and safe from hostile names
and tokens.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from mismatch_cli.report.html import render_html
from mismatch_cli.report.outline import Excerpt, TokenText
from tests.report.pages.clipping_result import (
    HOSTILE,
    equal_weights_result,
    nothing_judged,
    page_of,
    sample_result,
)
from tests.report.printed import printed

LONG_NAME = "my_very_long_mask_name:max_tv=0.125,anchor=recomputed"
HOSTILE_NAME = "<b>[red]$x$\x1b[2J"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
CASES = {
    "full": lambda: sample_result(),
    "one": lambda: sample_result(("dppo-binary-tv",)),
    "two": lambda: sample_result(("grpo-clip-higher", "dppo-binary-tv"), steps=1, theory=False),
    "no advantages": lambda: sample_result(advantages=False, steps=1),
    "nothing blocked": lambda: sample_result(gap=False),
    "equal weights": equal_weights_result,
    "no algorithm": nothing_judged,
}


def renamed(result: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    for row in result["algorithms"]:
        row["name"] = new if row["name"] == old else row["name"]
    for names in (result["overlap"], result):
        key = "names" if "names" in names else "compared"
        names[key] = [new if name == old else name for name in names[key]]
    return result


def narrowed(result: dict[str, Any]) -> dict[str, Any]:
    """The same with narrow intervals of the shares."""
    for row in result["algorithms"]:
        estimates = (*row["blocked"].values(), *row["lost"].values(), row["responses_touched"])
        for estimate in estimates:
            value = estimate["value"] or 0.0
            estimate |= {"low": 0.9 * value, "high": 1.1 * value}
    return result


def example() -> Excerpt:
    pieces = (TokenText("so "), TokenText(HOSTILE, 4, HOSTILE))
    return Excerpt(
        f"grpo-clip-higher blocks, dppo-binary-tv keeps: “{HOSTILE}”", (("μ", "0.012"),), pieces
    )


def on_terminal(result: dict[str, Any], width: int, **terminal: Any) -> str:
    return printed(page_of(result, (example(),)), width, **terminal)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("case", CASES)
def test_no_line_is_wider_than_the_terminal(case, width):
    from rich.cells import cell_len

    text = on_terminal(renamed(CASES[case](), "dppo-binary-tv", LONG_NAME), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "Bad updates" in text


@pytest.mark.parametrize("width", [62, 80])
def test_a_narrow_terminal_keeps_every_number_on_one_line(width):
    result = narrowed(sample_result())
    lines = on_terminal(result, width).splitlines()
    start = lines.index(
        next(line for line in lines if line.startswith("Blocked tokens and lost update"))
    )
    (row,) = [line for line in lines[start : start + 24] if line.startswith("  dppo-topk-tv ")]
    assert row.count("±") == (
        2 if width == 62 else 3
    )  # the optional columns go before the half intervals
    assert ("rollout" in row) == (width == 80)
    assert f"Hidden at {width} characters: " in " ".join(on_terminal(result, width).split())


def test_a_wide_terminal_shows_intervals_and_every_column():
    text = on_terminal(narrowed(sample_result(("grpo-clip-higher", "dppo-binary-tv"))), 140)
    (row,) = re.findall(r"^▸ dppo-binary-tv +rollout.*$", text, re.M)
    assert row.count("±") == 5
    assert "responses hit, %" in text


def test_the_terminal_shows_the_first_rows_and_counts_the_rest():
    text = on_terminal(sample_result(), 100)
    start = text.index("Pairs of algorithms")
    pairs = text[start : text.index("blocks, dppo-binary-tv keeps", start)]
    assert len(re.findall(r"^[a-z0-9.-]+ +[a-z0-9.-]+ +[\d,]+ +[\d,]+ +[\d,]+ ", pairs, re.M)) == 10
    assert "10 more rows in report.html." in pairs
    assert "grpo-clip-higher, by μ" in text and "ipo, by μ" not in text
    assert "When a token is blocked" not in text and "mismatch-cli algorithms" in text


@pytest.mark.parametrize("terminal", [{}, {"force_terminal": True, "color_system": "standard"}])
def test_the_terminal_escapes_tokens_and_names(terminal):
    result = renamed(sample_result(), "grpo-clip-higher", HOSTILE_NAME)
    text = on_terminal(result, 120, **terminal)
    without_colours = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert not CONTROL.search(without_colours)
    assert "[red]x[/red]" in without_colours and "<script>alert(1)</script>" in without_colours
    assert "<b>[red]$x$\\x1b[2J loses" in without_colours


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_complete_and_its_links_have_targets(case):
    html = render_html(page_of(CASES[case](), (example(),)))
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(ids)
    for tag in ("details", "table", "div", "section", "bdi"):
        assert len(re.findall(f"<{tag}[ >]", html)) == html.count(f"</{tag}>"), tag


def test_the_page_escapes_tokens_and_names():
    html = render_html(
        page_of(renamed(sample_result(), "grpo-clip-higher", HOSTILE_NAME), (example(),))
    )
    assert "<script>alert" not in html and "<b>" not in html
    assert (
        "&lt;script&gt;alert(1)&lt;/script&gt; [red]x[/red] $\\frac{1}{2}$ \\x1b[2J \\u202eevil "
        "\\x00" in html
    )
    assert "&lt;b&gt;[red]$x$\\x1b[2J" in html
    assert not CONTROL.search(html)


def test_long_tables_are_folded_together_by_algorithm():
    html = render_html(page_of({**sample_result(), "arguments": ["--algorithm", "ipo"]}, ()))
    folds = re.findall(r"<summary><bdi>([^<]*)</bdi></summary>", html)
    assert folds.count("ipo, by μ, position and step") == 1
    assert folds.count("ipo: most frequently blocked tokens") == 1
    fold = html[html.index("ipo, by μ, position and step</bdi>") :]
    assert fold[: fold.index("</details>")].count("<table") == 3


def test_the_symbols_are_explained_for_this_report():
    html = render_html(page_of(sample_result(), ()))
    definitions = html[html.index('<section id="definitions">') :]
    assert "r′ = π/π′" in definitions and "noise" not in definitions
    assert "1 − Σ keep·weight·|A| / Σ r·|A|" in re.sub(r"</?span[^>]*>", "", definitions)
