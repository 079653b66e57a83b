"""The token explorer of two runs: both gaps of a token, or the samples of both side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.trace.reader import Trace
from tests.report.browser import Browser
from tests.report.explored import Explored, choose, click, look, number_shown, page_of
from tests.studies.compared import FLOAT32, Row, rows_of, write_rows

FACTS = """Object.fromEntries([...document.querySelectorAll("[data-x=card] dt")]
  .map(name => [name.textContent, name.nextElementSibling.textContent]))"""
TITLES = """Object.fromEntries(["colour", "y", "sort"].map(name =>
  [name, [...document.querySelector(`[data-x=${name}]`).options].map(each => each.textContent)]))"""
PAIRS = """[...document.querySelectorAll(".x-pair")].map(pair => [...pair.children].map(side => ({
  heading: side.querySelector("h3")?.textContent ?? "", gaps: side.querySelectorAll(".x-gap").length,
  tokens: [...side.querySelectorAll("[data-t]")].map(span => Number(span.dataset.t)),
  box: side.getBoundingClientRect().toJSON(),
})))"""


def page_of_two(folder: Path, *names: str) -> Explored:
    traces = [Trace.open(bundled("traces") / name) for name in names]  # or absolute paths
    exploration = analyse_comparison(traces).exploration()
    assert exploration is not None
    return page_of(exploration, traces[0], folder / "report.html")


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    """The same responses under two trainers."""
    return page_of_two(tmp_path_factory.mktemp("paired"), "moe", "moe-replayed")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    """Other samples of the same prompts."""
    return page_of_two(tmp_path_factory.mktemp("beside"), "float32", "fp8-kv")


def number_in(words: str) -> float:
    return float(words.replace("−", "-"))


def test_the_card_shows_the_gap_of_both_runs(browser: Browser, paired: Explored) -> None:
    look(browser, paired)
    t = int(paired.payload.columns["list_change"][0])
    choose(browser, "list", "change")
    browser.run(f"document.querySelector('[data-t=\"{t}\"]').click()")
    facts = browser.run(FACTS)
    gap, gap_b = (float(paired.payload.columns[name][t]) for name in ("d", "d_b"))
    shown = [number_in(words) for words in facts["log π − log μ"].split(" → ")]
    assert shown == pytest.approx([gap, gap_b], rel=0.01)
    assert number_in(facts["change"]) == pytest.approx(gap_b - gap, rel=0.01)
    logq = float(paired.payload.columns["logq"][t])
    mu, pi = (number_in(words) for words in facts["moe: μ → π"].split(" → "))
    assert (mu, pi) == pytest.approx((np.exp(logq), np.exp(logq + gap)), rel=0.06)
    assert "moe-replayed: μ → π" in facts and "trace" not in facts


def test_numbers_of_the_first_run_are_named(browser: Browser, paired: Explored) -> None:
    look(browser, paired)
    assert "its mean |d| in moe. Lighter" in browser.run(
        "document.querySelector('.x-run p').textContent"
    )
    heading = browser.run("document.querySelector('[data-x=texts] h3').textContent")
    absolute = float(paired.payload.columns["response_absolute"][0])
    assert number_in(heading.rpartition("Σ|d| in moe ")[2]) == pytest.approx(absolute, rel=0.01)
    titles = browser.run(TITLES)
    assert titles["y"] == ["ratio π/μ in moe", "π − μ in moe", "change of log π − log μ"]
    assert {"log π − log μ in moe-replayed", "π − μ in moe"} <= set(titles["colour"])
    assert titles["sort"][1:3] == ["Σ|d| in moe, largest first", "Σd in moe, lowest first"]


def test_the_list_of_changes_comes_first_and_orders_the_responses(
    browser: Browser, paired: Explored
) -> None:
    look(browser, paired)
    lists = browser.run("[...document.querySelector('[data-x=list]').options].map(o => o.value)")
    assert lists == ["", "change", "gap", "gap_b"]
    assert browser.run("document.querySelector('[data-x=colour]').value") == "change"
    choose(browser, "list", "change")
    token_U = paired.payload.columns["list_change"]
    assert number_shown(browser) == len(token_U)
    change_T = np.abs(paired.payload.columns["d_b"] - paired.payload.columns["d"])
    assert (np.diff(change_T[token_U].astype(np.float64)) < 0.02).all()  # half precision
    expected = list(dict.fromkeys(paired.payload.owner_T[token_U].tolist()))
    articles = browser.run("""[...document.querySelectorAll(".x-texts article")]
      .map(article => Number(article.querySelector("[data-t]").dataset.t))""")
    order = [int(paired.payload.owner_T[t]) for t in articles]
    assert len(order) > 3 and order == expected[: len(order)]
    assert browser.run("document.querySelectorAll('.x-pair').length") == 0


def test_samples_are_side_by_side_under_their_prompt(browser: Browser, beside: Explored) -> None:
    look(browser, beside)
    pairs, payload = browser.run(PAIRS), beside.payload
    assert len(pairs) > 5
    trace_T, prompt_T = payload.of_response("trace"), payload.of_response("prompt")
    for left, right in pairs:
        assert right["box"]["left"] >= left["box"]["right"]
        assert right["box"]["top"] == pytest.approx(left["box"]["top"], abs=1)
        assert {int(trace_T[t]) for t in left["tokens"]} <= {0}
        assert {int(trace_T[t]) for t in right["tokens"]} == {1}
        assert len({int(prompt_T[t]) for side in (left, right) for t in side["tokens"]}) == 1
        assert right["heading"].startswith("fp8-kv")
        assert left["heading"].startswith("float32") or not left["tokens"]
        assert left["gaps"] == right["gaps"] == 0
    look(browser, beside, 420)
    for left, right in browser.run(PAIRS):
        assert right["box"]["top"] >= left["box"]["bottom"] - 1
        assert right["box"]["left"] == pytest.approx(left["box"]["left"], abs=1)
    assert browser.run("document.documentElement.scrollWidth") <= 420


def longer(row: Row, times: int) -> Row:
    """The same response several times in a row."""
    columns = [name for name, value in row.items() if isinstance(value, list)]
    return row | {name: row[name] * times for name in columns if name != "prompt_ids"}


def test_a_long_sample_has_one_heading(browser: Browser, tmp_path: Path) -> None:
    """Pieces of a response in one part of the text are under the same heading."""
    rows = rows_of(FLOAT32)[:2]
    folders = [
        write_rows(tmp_path / str(times), [longer(row, times) for row in rows], FLOAT32)
        for times in (14, 15)
    ]
    explored = page_of_two(tmp_path, *map(str, folders))
    assert explored.payload.head["responses"]["length"][0] > 512
    look(browser, explored)
    pairs = browser.run(PAIRS)
    assert [[bool(side["tokens"]) for side in pair] for pair in pairs] == [[True, True]]
    assert [side["gaps"] for side in pairs[0]] == [0, 0]
    assert [len(side["tokens"]) for side in pairs[0]] == [
        explored.payload.head["responses"]["length"][n] for n in (0, 2)
    ]


def test_a_token_of_either_run_is_reached_by_its_link(browser: Browser, beside: Explored) -> None:
    look(browser, beside)
    browser.run("document.querySelectorAll('.x-pair')[0].children[1].querySelector('span').click()")
    assert "fp8-kv" in browser.run(FACTS)["trace"]
    click(browser, "link")  # else the address follows after a pause
    address = browser.run("location.hash")
    look(browser, beside, fragment=address.removeprefix("#"))
    assert browser.run(FACTS)["trace"] == "fp8-kv"
