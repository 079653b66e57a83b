"""The section on routing: the margins at which routers flip."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.route_flips import (
    ROUTING,
    LayerRow,
    MarginCounts,
    Margins,
    RoutingSummary,
)
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
    assert said in routing_section(with_margins(flipped, agreeing)).text


@pytest.mark.parametrize(
    ("flipped", "agreeing", "share", "said"),
    [
        (None, None, 0.1, "the margins of flips are unknown"),
        (None, 0.4, 0.1, "the margins of flips are unknown"),
        (0.3, None, 0.1, "the margins of flips are unknown"),
        (None, None, 0.0, "No router flips."),
        (0.3, None, 1.0, "Every router flips at every token"),
        (0.01, 0.4, 0.1, "rounding decides near ties"),
    ],
)
def test_routers_without_margins_may_flip(flipped, agreeing, share, said):
    """Those that choose by biased scores; layer 2 has no tokens, and layer 1 no flips beside
    others.
    """
    layer_shares = [(8, 1.0 if share == 1 else 0.0), (8, share), (0, None)]
    layers = [
        LayerRow(number, tokens, *[Estimate(flips)] * 3)
        for number, (tokens, flips) in enumerate(layer_shares)
    ]
    summary = replace(with_margins(flipped, agreeing), layers=layers)
    text = routing_section(summary).text
    assert said in text
    assert ("No router flips" in text) == (share == 0)


def with_margins(flipped: float | None, agreeing: float | None) -> RoutingSummary:
    sides = [MarginCounts(1, None, median, None, []) for median in (agreeing, flipped)]
    return RoutingSummary(
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
