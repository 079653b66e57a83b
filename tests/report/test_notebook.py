"""A screen in a notebook: it resists the notebook's styles, takes its colours, and leaves other
output alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_cli.report.html import render_screen
from mismatch_cli.report.outline import Column, Excerpt, Screen, Table, TokenText, Verdict
from tests.report.browser import CONTRASTS, Browser

# Jupyter's rules for lists and tables in outputs.
NOTEBOOK = """
.jp.out:not(.md) dt { float: left; clear: both; width: 20%; font-weight: bold; }
.jp.out:not(.md) dd { margin-bottom: 1em; margin-left: 1em; }
.jp.out:not(.md) td, .jp.out:not(.md) th { text-align: right; white-space: nowrap; border: 1px solid red; }
.jp.out:not(.md) tbody tr:nth-child(odd) { background: red; }
"""
TABLE = Table(
    "",
    (Column("metric"), Column("value"), Column("why", kind="text")),
    (("k3", "0.1", "no <reason>"),) * 2,
)
PIECES = (TokenText("so "), TokenText("7", 4), TokenText(" <b>"))


def screen(status: str) -> str:
    excerpt = Excerpt(
        "Worst token", (("position", "20 of 56"),), PIECES, prompt="What is \x1b[31m 3 + 4?"
    )
    return render_screen(
        Screen(
            ("vllm against transformers", "T = 1"),
            Verdict("ABOVE SOME LIMITS", "Two of <three> hold.", status),
            notes=("327 tokens have an advantage of 0.",),
            tables=(TABLE,),
            remarks=(("Bad updates", "0.268 % of tokens with A < 0"),),
            excerpts=(excerpt,),
            next=(("mismatch-cli clipstats run", "which tokens"),),
        )
    )


@pytest.mark.parametrize(
    ("paper", "ink"), [("#fff", "#222"), ("#111", "#ddd")], ids=["light", "dark"]
)
def test_a_screen_keeps_its_form_and_takes_the_colours_of_its_notebook(
    browser: Browser, tmp_path: Path, paper: str, ink: str
) -> None:
    shown = "".join(screen(status) for status in ("good", "mixed", "bad", ""))
    page = tmp_path / "notebook.html"
    page.write_text(  # without a doctype, where tables take the colour of the body
        f'<meta charset="utf-8"><style>{NOTEBOOK}</style>'
        f'<div class="jp out" style="background: {paper}; color: {ink}">{shown}</div><dl id="mine"><dt>a</dl>',
        encoding="utf-8",
    )
    browser.open(page, 900, dark=paper == "#fff")  # the system preference is ignored
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    # Half transparent
    browser.run("document.querySelectorAll('mark').forEach(each => each.remove())")
    assert browser.run(CONTRASTS) == {}
    style = "(selector, name) => getComputedStyle(document.querySelector(selector))[name]"
    assert browser.run(f"({style})('.remarks dt', 'float')") == "none"
    assert browser.run("document.querySelector('.remarks dt').getBoundingClientRect().height") < 30
    assert browser.run(f"({style})('td.text', 'textAlign')") == "left"
    assert browser.run(f"({style})('tbody tr', 'backgroundColor')") == "rgba(0, 0, 0, 0)"
    # Other elements stay as they were
    assert browser.run(f"({style})('#mine', 'marginTop')") == "16px"
    assert browser.run("document.documentElement.scrollWidth") == 900


def test_whatever_is_shown_is_escaped() -> None:
    page = screen("bad")
    assert (
        "<three>" not in page
        and "<reason>" not in page
        and "<b>" not in page
        and "\x1b" not in page
    )
    assert page.count("&lt;reason&gt;") == 2
