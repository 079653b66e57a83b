"""The section on routing: the margins at which routers flip."""

from __future__ import annotations

import pytest

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.route_flips import ROUTING, MarginCounts, Margins, RoutingSummary
from mismatch_cli.report.pages.mismatch_routing import routing_section


@pytest.mark.parametrize(
    ("flipped", "agreeing", "said"),
    [
        (None, 0.4, "No router flips."),
        (0.01, 0.4, "rounding decides near ties"),
        (0.3, 0.4, "these are not near ties"),
        (0.3, None, "Every router flips at every token"),
    ],
)
def test_whether_flips_are_near_ties(flipped, agreeing, said):
    sides = [MarginCounts(1, None, median, None, []) for median in (agreeing, flipped)]
    summary = RoutingSummary(
        replayed=False,
        tokens=1,
        experts=8,
        experts_per_token=2,
        metrics=dict.fromkeys(ROUTING, Estimate(0.5)),
        layers=[],
        by_flips=[],
        by_mu=[],
        first=[],
        margins=Margins([], *sides),
    )
    assert said in routing_section(summary).text
