"""The explorer of long runs in a real browser: windows, parts, and what a step costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.rules.algorithms.parse import parse_algorithm
from tests.report.browser import Browser
from tests.report.explored import (
    Explored,
    choose,
    click,
    counts,
    every_part,
    look,
    page_of_trace,
    shown_tokens,
    text_of,
)
from tests.studies.written import long_batch, write_trace

ALGORITHMS = tuple(map(parse_algorithm, ("grpo-clip-higher", "dppo-binary-tv")))
MOST_NODES = 8_000
# An idle core takes a tenth of these; the suite's machines are busy
READY_MILLISECONDS, STEP_MILLISECONDS = 6_000, 500


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    """48 responses of 8,000 tokens each: 384,000 tokens, of which about half fit."""
    folder = tmp_path_factory.mktemp("long")
    batch = replace(long_batch([8_000] * 48), step_S=np.arange(48) // 12)
    trace = write_trace(folder / "trace", batch)
    return page_of_trace(trace, ALGORITHMS, folder / "report.html")


def test_windows_say_what_they_leave_out(browser: Browser, long_run: Explored) -> None:
    payload = long_run.payload
    assert 190_000 < payload.total <= 200_000
    look(browser, long_run)
    choose(browser, "list", "gap")
    shown = shown_tokens(browser)
    assert sorted(shown) == sorted(payload.columns["list_gap"].tolist())
    choose(browser, "list", "gap")
    gaps = [
        gap
        for part in every_part(
            browser, "[...document.querySelectorAll('.x-gap')].map(each => each.textContent)"
        )
        for gap in part
    ]
    assert gaps and all(gap.startswith("… ") and "token" in gap for gap in gaps)
    assert browser.run("document.querySelectorAll('#explorer .x-strip').length") > 0


def test_every_part_has_few_elements(browser: Browser, long_run: Explored) -> None:
    look(browser, long_run)
    for name in ("", "blocked"):
        choose(browser, "list", name)
        nodes = [browser.run("document.querySelectorAll('*').length")]
        for _ in range(5):
            click(browser, "later")
            nodes.append(browser.run("document.querySelectorAll('*').length"))
        assert max(nodes) < MOST_NODES


def test_the_share_is_that_of_the_whole_trace(browser: Browser, long_run: Explored) -> None:
    look(browser, long_run)
    judged = counts(browser, "a")[1]
    lengths = long_run.payload.head["responses"]["length"]
    assert long_run.payload.total < judged <= sum(lengths)
    assert "of " in text_of(browser, "share-a") and "here" not in text_of(browser, "share-a")


def test_it_is_ready_soon_and_a_slider_answers_at_once(
    browser: Browser, long_run: Explored
) -> None:
    look(browser, long_run)
    ready = browser.run("""(async () => {
      const from = performance.now();
      await unpack(document.getElementById("explorer-data").textContent);
      return performance.now() - from;
    })()""")
    assert ready < READY_MILLISECONDS
    step = browser.run("""(() => {
      const slide = document.querySelector("[data-x=slide-a]"), times = [];
      for (let n = 0; n < 6; n++) {
        const from = performance.now();
        slide.value = Number(slide.value) + 1;
        slide.dispatchEvent(new Event("input"));
        times.push(performance.now() - from);
      }
      return times.sort((a, b) => a - b)[3];
    })()""")
    assert step < STEP_MILLISECONDS


def test_a_link_leads_into_a_window(browser: Browser, long_run: Explored, tmp_path: Path) -> None:
    payload = long_run.payload
    token = int(payload.columns["list_gap"][0])
    passage = int(np.searchsorted(np.cumsum(payload.columns["passage_tokens"]), token, "right"))
    first = int(payload.columns["passage_tokens"][:passage].sum())
    owner = int(payload.columns["passage_response"][passage])
    position = int(payload.columns["passage_start"][passage]) + token - first
    responses = payload.head["responses"]
    where = [responses[name][owner] for name in ("step", "prompt", "sample")]
    look(browser, long_run, fragment=f"view?token={'.'.join(map(str, [*where, position, 0]))}")
    assert int(browser.run("document.querySelector('.here').dataset.t")) == token
    assert f"{position:,} of 8,000" in text_of(browser, "card")
