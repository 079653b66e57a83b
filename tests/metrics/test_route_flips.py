"""Flips of routers by hand, with more layers than the bundled models have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.metrics.route_flips import FLIP_EDGES, RouteFlips
from mismatch_cli.metrics.sums import GroupSums
from mismatch_cli.trace.routes import LAYER_COUNTS
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
