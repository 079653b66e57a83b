"""What the pages of gate, comparison and curation show in a cell is what its head says, compared with
numbers that are known otherwise.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.base.json_form import from_json
from mismatch_cli.base.places import bundled
from mismatch_cli.limits.assess import LimitRow
from mismatch_cli.limits.limit_sets import Limit, LimitSet
from mismatch_cli.metrics.pair_summary import MetricEstimate
from mismatch_cli.metrics.population import Curation
from mismatch_cli.report.outline import Outline, Table
from mismatch_cli.report.pages import comparison, curation, gate, mismatch
from mismatch_cli.report.screen import screen_of
from mismatch_cli.studies.comparison_result import ComparisonResult
from mismatch_cli.studies.curation import CurationAnalysis
from mismatch_cli.studies.gate import GateAnalysis
from mismatch_cli.studies.mismatch import MismatchAnalysis, analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.report.printed import printed
from tests.report.test_every_cell import equals, is_interval
from tests.studies.compared import Row, first_two

TRACE = bundled("traces") / "fp8-kv"


def rows(table: Table) -> list[dict[str, str]]:
    heads = [column.title for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in table.rows]


def in_text(value: str) -> float:
    return float(value.replace("−", "-").replace(",", ""))


@pytest.fixture(scope="module")
def study() -> MismatchAnalysis:
    return analyse_mismatch([Trace.open(TRACE)], 0)


def shown(study: MismatchAnalysis, **changes: Any) -> Outline:
    """The page of a study with another result."""
    other = copy(study)
    other.result = replace(study.result, **changes)
    return mismatch.page(other, worst=0)


def test_a_gate_shows_the_measured_value_its_interval_and_the_limit(study):
    limits = (Limit("abs_d_mean", "max", 0.5), Limit("pearson", "min", 0.25, pair="total"))
    result = GateAnalysis.of([LimitSet("own", limits)], [Trace.open(TRACE)], [])
    (table, *_) = gate.page(result).parts[0].tables
    for row, (pair, metric, bound) in zip(
        rows(table), [("mismatch", "abs_d_mean", "0.5"), ("total", "pearson", "0.25")], strict=True
    ):
        estimate = study.result.pairs[pair].metrics[metric]
        assert row["metric"] == f"{metric} ({pair})"
        assert equals(row["measured"], estimate.value)
        assert estimate.low is not None and is_interval(row["95 % interval"], vars(estimate))
        assert bound in row["limit"] and row["status"] == "✔ holds"


def test_the_strictest_of_the_published_limits_is_shown(study):
    """An exceeded one before others; those on another pair are not about this number."""
    (bar, *_) = [bar for bar in study.result.verdict.bars if bar.metric == "k3"]
    bar = replace(bar, pair="mismatch", direction="max", standing="holds", level="")

    def limit(healthy: float, **changes: Any) -> LimitRow:
        return replace(bar, healthy=healthy, broken=healthy, text=f"≤ {healthy}", **changes)

    def beside_k3(*bars: LimitRow) -> str:
        view = shown(study, verdict=replace(study.result.verdict, bars=bars))
        (row,) = (row for row in view.leading if row.metric.key == "k3")
        return row.limit

    of_total = limit(1e-9, pair="total")
    assert beside_k3(limit(0.3), limit(0.001), limit(0.02), of_total).startswith("limit 0.001,")
    exceeded = limit(0.3, standing="exceeded", level="broken")
    assert beside_k3(exceeded, limit(0.001), of_total).startswith("limit 0.3,")
    assert beside_k3(of_total) == ""


def test_the_remark_on_staleness_is_of_the_pair_with_staleness(study):
    pairs = {}
    for number, (name, pair) in enumerate(study.result.pairs.items(), start=1):
        planted = MetricEstimate(number / 10)
        keys = ("tv_binary_mean", "ratio_outside_0.8_1.28")
        pairs[name] = replace(pair, metrics=pair.metrics | dict.fromkeys(keys, planted))
    assert list(pairs)[2] == "total"
    remarks = dict(shown(study, pairs=pairs).remarks)
    words = r"mean \|π − μ\| 0\.30*, 30(\.0*)? % outside \[0\.8, 1\.28\]"
    assert re.fullmatch(words, remarks["With staleness"])


def tables_of(view: Outline) -> list[Table]:
    return [table for section in view.parts for table in section.tables]


def settings_of(view: Outline) -> list[Table]:
    return [
        table
        for table in tables_of(view)
        if any(column.title == "setting" for column in table.columns)
    ]


def of_two(result: Row) -> tuple[Outline, str, str]:
    made = from_json(ComparisonResult, first_two(result))
    view = comparison.page(SimpleNamespace(result=made, typed=("one", "other")))
    against, trace = (each.run for each in made.traces)
    return view, against, trace


def test_a_comparison_shows_each_setting_under_its_own_trace(result):
    """The second trace was made with another torch: tests/studies/compared.py."""
    view, float32, perturbed = of_two(result)
    named = [row for table in settings_of(view) for row in rows(table)]
    (torch,) = [row for row in named if row["setting"] == "libraries.torch"]
    assert torch[perturbed] == "2.14.0+cpu" and torch[float32] != torch[perturbed]
    on_screen = [row for table in screen_of(view).tables for row in rows(table) if perturbed in row]
    assert any(row[perturbed] == "2.14.0+cpu" for row in on_screen)
    assert f"({torch[float32]} in {float32}, 2.14.0+cpu in {perturbed})" in view.verdict.text


def test_a_comparison_names_the_larger_gap_first(result):
    """The gap was added to the second trace."""
    view, float32, perturbed = of_two(result)
    assert f"larger in {perturbed} than in {float32}" in view.verdict.text
    names = [row.name for row in view.leading]
    assert names and all(name.endswith(f"{perturbed} / {float32}") for name in names)
    text = printed(view, 200)
    assert f"{perturbed} / {float32}" in text and f"{float32} / {perturbed}" not in text


def test_a_curation_shows_the_accuracy_that_did_not_choose():
    """Problems chosen for an accuracy of 3/4, which held-out samples do not confirm."""
    chosen, held_out = {0: 0.75, 1: 0.75, 2: 0.25}, {0: 0.0, 1: 0.25, 2: 1.0}
    config = {"model": "m", "prompts": {"location": "p"}, "reward": ""}
    analysis = CurationAnalysis(Curation((0.2, 0.8), 4, 4, chosen, held_out), config=config)
    view = curation.page(analysis)
    (table,) = tables_of(view)
    low, high, every = rows(table)
    assert (in_text(low["mean"]), in_text(low["held out"])) == (0.25, 1.0)
    assert (in_text(high["mean"]), in_text(high["held out"])) == (0.75, 0.125)
    assert in_text(high["kept problems"]) == 2
    assert in_text(high["stay in the range, %"]) == 50
    assert in_text(every["kept problems"]) == 3
    assert in_text(every["held out"]) == pytest.approx(1.25 / 3, abs=1e-3)
    named = {row.metric.key: in_text(row.value) for row in view.leading}
    assert named["held_out_accuracy"] == pytest.approx(1.25 / 3, abs=1e-3)
    assert named["accuracy_of_kept"] == pytest.approx(1.75 / 3, abs=1e-3)
