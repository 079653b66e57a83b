"""The page of the gate: why one set of limits holds and another does not."""

from __future__ import annotations

import pytest

from mismatch_cli.limits.limit_sets import Limit, LimitSet
from mismatch_cli.report.pages.gate import page
from mismatch_cli.studies.gate import GateAnalysis, PooledMetrics, check_limits
from mismatch_cli.trace.reader import Trace
from tests.studies.compared import FLOAT32

SETS = {
    "strict": Limit("abs_d_mean", "max", 1e-9),
    "loose": Limit("abs_d_mean", "max", 1),
    "stale": Limit("k3", "max", 1, pair="staleness"),  # a pair that the trace lacks
}


@pytest.fixture(scope="module")
def measured() -> PooledMetrics:
    return PooledMetrics([Trace.open(FLOAT32)], [])


def remark(measured: PooledMetrics, *names: str) -> str:
    """Why one set holds although another fails; empty where the page does not say so."""
    sets = [LimitSet(name, (SETS[name],)) for name in names]
    analysis = GateAnalysis(sets, check_limits(sets, measured, None), measured)
    return dict(page(analysis).remarks).get("Why both", "")


def test_a_set_that_could_not_be_judged_is_not_said_to_hold(measured):
    assert remark(measured, "strict", "stale") == remark(measured, "loose", "stale") == ""
    assert remark(measured, "strict") == remark(measured, "loose") == ""
    for names in (("strict", "loose"), ("stale", "loose", "strict")):
        assert remark(measured, *names).startswith(
            "The limits of loose hold although others fail: publishers limit different metrics"
        )
