"""A page with the token explorer, what it holds, and hands on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch_cli.report.explorer import explorer_view
from mismatch_cli.report.html import render_html
from mismatch_cli.report.outline import Outline, Section
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.exploration.explored import Exploration
from mismatch_cli.trace.reader import Trace
from tests.metrics.clipping.world import VOCABULARY, world
from tests.report.browser import Browser
from tests.report.payload import Payload
from tests.studies.written import write_trace

ALGORITHMS = tuple(
    map(
        parse_algorithm,
        ("grpo-clip-higher", "dppo-binary-tv", "dppo-topk-kl", "minirl", "gspo", "pg-is"),
    )
)
GSPO = 4
HOSTILE = (
    b"<script>pwned = 1</script>",
    b"</script><img src=x onerror='pwned = 2'>",
    b"<!--",
    b"]]>&lt;&amp;",
    b"\x1b[2J\x1b]8;;http://localhost\x07",
    "\u202eevil\u202c".encode(),
    b"{{ 7 * 7 }}",
    b"\xff\xfe",
    b"\x00",
    b"\n\n",
    b"x" * 1_000_000,
    b"javascript:pwned=3",
)
TEXTS = HOSTILE + tuple(f" word{n}".encode() for n in range(VOCABULARY - len(HOSTILE)))
READY = """new Promise((done, failed) => {
  const wait = () => document.querySelector("#explorer").dataset.ready ? done() : setTimeout(wait, 10);
  wait();
  setTimeout(() => failed(new Error("the explorer did not start")), 60_000);
})"""
SHOWN = """[...document.querySelectorAll("#explorer [data-t]")]
  .filter(each => !each.classList.contains("dim")).map(each => Number(each.dataset.t))"""


@dataclass(frozen=True)
class Explored:
    page: Path
    trace: Trace
    payload: Payload


def hostile_page(folder: Path) -> Explored:
    """Forty short responses whose token texts are hostile."""
    trace = write_trace(folder / "trace", world(0, 40), texts=TEXTS)
    return page_of_trace(trace, ALGORITHMS, folder / "report.html")


def page_of_trace(trace: Trace, algorithms: Sequence[Algorithm], page: Path) -> Explored:
    """A page that has only the explorer of a trace."""
    exploration = analyse_clipping([trace], algorithms).exploration()
    assert exploration is not None
    return page_of(exploration, trace, page)


def page_of(exploration: Exploration, trace: Trace, page: Path) -> Explored:
    explorer = explorer_view(exploration)
    view = Outline("Tokens", (), (Section("More", text="Words.", stays=True),), "What is blocked.")
    page.write_text(render_html(replace(view, explorer=explorer)), encoding="utf-8")
    return Explored(page, trace, Payload(explorer.data))


def look(
    browser: Browser,
    explored: Explored,
    width: int = 1280,
    *,
    dark: bool = False,
    fragment: str = "",
) -> None:
    """Open the page and wait for its tokens."""
    browser.open(explored.page, width, 1000, dark=dark, fragment=fragment)
    browser.run(READY)
    browser.run("document.querySelector('#explorer').scrollIntoView({ behavior: 'instant' })")


def text_of(browser: Browser, name: str) -> str:
    """What a part of the explorer says, by its `data-x`."""
    return str(browser.run(f"document.querySelector('[data-x={name}]').textContent"))


def click(browser: Browser, name: str) -> None:
    browser.run(f"document.querySelector('[data-x={name}]').click()")


def every_part(browser: Browser, script: str) -> list[Any]:
    """The values of an expression on each part of the text, from the first to the last."""
    values = [browser.run(script)]
    while not browser.run("document.querySelector('[data-x=later]').disabled"):
        click(browser, "later")
        values.append(browser.run(script))
    return values


def shown_tokens(browser: Browser) -> list[int]:
    """The tokens that pass the filters, as the text has them."""
    return [t for part in every_part(browser, SHOWN) for t in part]


def choose(browser: Browser, name: str, value: str) -> None:
    browser.run(f"""(() => {{
      const select = document.querySelector("[data-x={name}]");
      select.value = {value!r};
      select.dispatchEvent(new Event("change"));
    }})()""")


def counts(browser: Browser, side: str) -> tuple[int, int]:
    shares = browser.run(f"({{...document.querySelector('[data-x=share-{side}]').dataset}})")
    return int(shares["blocked"]), int(shares["judged"])


def number_shown(browser: Browser) -> int:
    said = browser.run("document.querySelector('[data-x=said]').textContent")
    return int(said.split(" of ")[0].replace(",", ""))
