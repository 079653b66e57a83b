"""Flips of routers by hand, with more layers than the bundled models have."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.metrics.route_flips import FLIP_EDGES, MarginCounts, RouteFlips
from mismatch_cli.metrics.sums import GroupSums
from mismatch_cli.trace.routes import LAYER_COUNTS, MARGIN_BINS, MARGIN_EDGES
from tests.metrics.summaries import filled

_LAYERS = 24


def test_tokens_are_counted_by_how_many_layers_flip_them(make_batch):
    """A token for each number of flips from 0 to 24, which every bin holds."""
    flips_T = np.arange(_LAYERS + 1)
    logp_T = -1 - 0.01 * flips_T
    batch = make_batch([[-1.0] * len(flips_T)], logp_recomputed=[logp_T.tolist()])
    batch = replace(batch, route_flips_T=flips_T.astype(np.uint8))
    routing = filled(RouteFlips(), batch)
    # Counts of a layer, which are recorded per response and apart from those of tokens
    unflipped = GroupSums(len(LAYER_COUNTS))
    unflipped.sums_GM[0] = (len(flips_T), 0, len(flips_T), len(flips_T))
    routing.layers |= dict.fromkeys(range(_LAYERS), unflipped)
    result = routing.result(1, {"experts_per_token": 1})
    assert result is not None

    low, rows = (0, *FLIP_EDGES), result.by_flips
    assert [row.low for row in rows] == list(low)
    bin_T = np.searchsorted(low, flips_T, side="right") - 1
    gap_T = 0.01 * flips_T
    for number, row in enumerate(rows):
        inside_T = bin_T == number
        assert row.tokens == inside_T.sum()
        share = gap_T[inside_T].sum() / gap_T.sum()
        assert row.share_of_gap == pytest.approx(share, abs=1e-6)
        assert row.abs_d_mean.value == pytest.approx(gap_T[inside_T].mean(), abs=1e-6)
    assert result.metrics["flipped_tokens"].value == pytest.approx(_LAYERS / (_LAYERS + 1))


AGREEING, NONE = np.zeros(MARGIN_BINS, dtype=np.int32), np.zeros(MARGIN_BINS, dtype=np.int32)
AGREEING[[0, 10, 20, -1]] = (1, 9, 8, 2)
FLIPPED = np.where(np.arange(MARGIN_BINS) == 5, 3, 0).astype(np.int32)
TRAINER = {"experts_per_token": 2, "num_experts": 8, "router_layers": [3, 7], "routes": "replayed"}


def counted() -> RouteFlips:
    """Two layers in two responses; a third has no routes."""
    routing = RouteFlips()
    layers = [[10, 2, 15, 9, 10, 4, 12, 8], None, [5, 0, 10, 5, 5, 5, 2, 1]]
    margins = [np.concatenate([AGREEING, NONE]), None, np.concatenate([NONE, FLIPPED])]
    table = pa.table({"route_layers": layers, "route_margins": margins})
    routing.update_responses(table, np.arange(3))
    routing.update_responses(pa.table({"step": [0]}), np.arange(1))
    return routing


def test_layers_by_hand():
    result = counted().result(3, TRAINER)
    assert result is not None
    assert (result.replayed, result.experts, result.experts_per_token) == (True, 8, 2)
    rows = [
        (row.layer, row.tokens, row.flipped.value, row.agreement.value) for row in result.layers
    ]
    assert rows == [
        (3, 15, pytest.approx(2 / 15), pytest.approx(25 / 30)),
        (7, 15, pytest.approx(9 / 15), pytest.approx(14 / 30)),
    ]
    assert [row.same_first.value for row in result.layers] == pytest.approx([14 / 15, 9 / 15])
    assert result.metrics["flipped_routers"].value == pytest.approx(11 / 30)
    assert result.metrics["agreement"].value == pytest.approx(39 / 60)


def test_margins_by_hand():
    """Of 20 margins the 1st, 10th and 19th: the outer bins have a single edge."""
    result = counted().result(3, TRAINER)
    assert result is not None
    agreeing, flipped = result.margins.agreeing, result.margins.flipped
    assert (agreeing.count, agreeing.p5, agreeing.p95) == (20, 2.0**-16, 2.0**6)
    assert agreeing.p50 == pytest.approx(2**-11.25)  # between 2^-11.5 and 2^-11
    assert list(agreeing.counts) == AGREEING.tolist()
    assert (flipped.count, flipped.p5, flipped.p50, flipped.p95) == (3, *[2**-13.75] * 3)
    assert list(result.margins.edges) == MARGIN_EDGES.tolist()
    table = pa.table({"route_layers": [[1] * 8], "route_margins": [[0] * 2 * MARGIN_BINS]})
    routing = RouteFlips()
    routing.update_responses(table, np.arange(1))
    nothing = routing.result(1, TRAINER)
    assert nothing is not None
    assert nothing.margins.flipped == MarginCounts(0, None, None, None, [0] * MARGIN_BINS)


def test_layers_are_numbered_from_0_where_the_manifest_names_none():
    result = counted().result(3, {})
    assert result is not None and [row.layer for row in result.layers] == [0, 1]
    assert (result.replayed, result.experts, result.experts_per_token) == (False, None, 1)
    with pytest.raises(MismatchError, match=r"names 1 layers with a router, but .* of 2"):
        counted().result(3, {"router_layers": [3]})
    assert RouteFlips().result(2, TRAINER) is None


def test_tokens_by_the_first_layer_and_by_mu(make_batch):
    """Four tokens with routes, of which three flip, and one without."""
    logq = [math.log(0.02), math.log(0.04), math.log(0.95), -1e-3, math.log(0.6)]
    d_T = [0.1, -0.3, 0.0, -0.4, 0.5]
    batch = make_batch([logq], logp_recomputed=[(np.array(logq) + d_T).tolist()])
    flips_T = np.array([2, 0, 1, 1, 255], dtype=np.uint8)
    first_T = np.array([0, 255, 1, 1, 255], dtype=np.uint8)
    batch = replace(batch, route_flips_T=flips_T, route_first_T=first_T)
    routing = counted()
    result = filled(routing, batch).result(3, TRAINER)
    assert result.tokens == 4 and list(result.first) == [1, 2]
    by_mu = {row.mu_low: (row.mu_high, row.tokens, row.flipped.value) for row in result.by_mu}
    assert {low: row for low, row in by_mu.items() if row[1]} == {
        0.01: (0.05, 2, 0.5),
        0.9: (0.99, 1, 1.0),
        0.99: (1.0, 1, 1.0),
    }
    assert list(result.metrics)[:2] == ["flipped_tokens", "flipped_routers"]
    values = {name: result.metrics[name].value for name in result.metrics}
    assert values["flipped_tokens"] == 0.75
    assert values["share_of_gap"] == pytest.approx(0.5 / 0.8, rel=1e-4)
    assert values["abs_d_flipped"] == pytest.approx(0.5 / 3, rel=1e-4)
    assert values["abs_d_other"] == pytest.approx(0.3, rel=1e-4)
    ranges = [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None)]
    assert [(row.low, row.high) for row in result.by_flips] == ranges
    shares = [row.share_of_gap for row in result.by_flips]
    assert shares == pytest.approx([0.3 / 0.8, 0.4 / 0.8, 0.1 / 0.8, 0, 0, 0], rel=1e-4)
    assert result.by_flips[-1].abs_d_mean.value is None
    assert {row.share_of_gap for row in counted().result(3, TRAINER).by_flips} == {None}


def test_more_tokens_are_counted_than_32_bits_hold(make_batch):
    routing = counted()
    routing.first[1] = routing.margins[0, 10] = 2**31 - 1
    batch = make_batch([[-1.0]], logp_recomputed=[[-1.5]])
    one = np.ones(1, dtype=np.uint8)
    filled(routing, replace(batch, route_flips_T=one, route_first_T=one))
    margins = [np.concatenate([AGREEING, NONE])]
    routing.update_responses(
        pa.table({"route_layers": [[1] * 8], "route_margins": margins}), np.arange(1)
    )
    assert routing.first[1] == 2**31 and routing.margins[0, 10] == 2**31 + 8


def test_the_mean_gap_of_two_tokens_that_no_layer_flips(make_batch):
    batch = make_batch([[-1.0, -2.0]], logp_recomputed=[[-1.1, -2.3]])
    zeros = np.zeros(2, dtype=np.uint8)
    routing = filled(counted(), replace(batch, route_flips_T=zeros, route_first_T=zeros + 255))
    metrics = routing.result(3, TRAINER).metrics
    assert metrics["abs_d_other"].value == pytest.approx(0.2, rel=1e-5)
    assert metrics["abs_d_flipped"].value is None and metrics["share_of_gap"].value == 0
