"""The verdict on terminal, page and in summary.json, for the bundled traces."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest

from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.base.places import bundled
from mismatch_cli.limits.assess import Assessment
from mismatch_cli.report.html import render_html
from mismatch_cli.report.pages.mismatch import page as page_of
from mismatch_cli.studies.mismatch import MismatchAnalysis, analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.report.printed import printed


@pytest.fixture(scope="module")
def studies() -> dict:
    paths = (bundled("traces/fp8-kv"), bundled("traces") / "float32")
    return {path.name: analyse_mismatch([Trace.open(path)], 1) for path in paths}


def on_terminal(study: MismatchAnalysis, width: int) -> str:
    text = printed(page_of(study), width)
    return text[text.index("Is this normal?") : text.index("Ratio and TV by probability")]


@pytest.mark.slow
@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_terminal_shows_every_limit_with_its_source(studies, width):
    study = studies["fp8-kv"]
    text = on_terminal(study, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert text.index("the trainer's own noise") < text.index("published limits")
    assert "mismatch-cli diagnose" in " ".join(text.split())
    if width == 120:
        for row in study.result.verdict.bars:
            assert all(word in text for word in row.who.split())
        assert "with staleness" in text


def test_the_page_shows_them_too(studies):
    for study in studies.values():
        page = render_html(page_of(study))
        section = page[page.index('id="is-this-normal"') :]
        for row in [*study.result.verdict.bars, *study.result.verdict.measured]:
            assert row.source.split(",")[0] in section


def test_the_bundled_traces_have_the_expected_status(studies):
    """The fp8 KV cache is far above the trainer's noise and below verl's limit; float32 is below
    every limit.
    """
    coarse, fine = (studies[name].result.verdict for name in ("fp8-kv", "float32"))
    assert coarse.floor.low > 10
    status = {row.who: row.standing for row in coarse.bars}
    assert (status["verl FAQ"], status["Tinker, v2"]) == ("holds", "exceeded")
    assert {row.pair for row in coarse.bars} == {"mismatch", "total"}
    assert (coarse.family, coarse.precision) == ("dense", "fp8")
    assert (fine.family, fine.precision) == ("dense", "fp32")
    assert {row.standing for row in fine.bars} == {"holds"}
    assert {row.pair for row in fine.bars} == {"mismatch"}
    assert any(re.match(r"18 of 18 published limits hold", sentence) for sentence in fine.sentences)


@pytest.mark.parametrize(("standing", "first"), [("above", "diagnose"), ("within", "probe")])
def test_a_mistake_is_looked_for_first_where_no_setting_makes_such_a_gap(studies, standing, first):
    study = copy.copy(studies["fp8-kv"])
    result = study.result
    assert result.verdict.expected is not None
    expected = replace(result.verdict.expected, standing=standing)
    vars(study)["result"] = replace(result, verdict=replace(result.verdict, expected=expected))
    typed = [line.split()[1] for line, _ in page_of(study).next]
    assert typed[0] == first
    assert sorted(typed) == ["clipstats", "compare", "diagnose", "probe", "report", "report"]


def test_it_is_json(studies):
    for study in studies.values():
        content = json.loads(json.dumps(to_json(study.result.verdict), allow_nan=False))
        assert to_json(from_json(Assessment, content)) == content
