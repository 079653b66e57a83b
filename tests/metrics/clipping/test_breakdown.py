"""Blocked tokens by bin: every token is in one bin of μ and one of the position, under its prompt,
over which intervals are taken.
"""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.clipping.breakdown import BlockedCells
from mismatch_cli.metrics.clipping.masked_slice import apply_masks
from tests.metrics.clipping.world import PLAIN, plain_algorithms, world


def test_both_breakdowns_have_every_token_under_its_prompt():
    algorithms = plain_algorithms()
    cells = BlockedCells(len(algorithms))
    tokens_G = np.zeros(cells.by_mu.shape[2], dtype=np.int64)
    for cases in apply_masks(world(), PLAIN, algorithms, {}):
        for judged in cases:
            cells.update(judged)
            group_N = np.repeat(judged.gaps.group_S, judged.gaps.responses.length_S)
            np.add.at(tokens_G, group_N[judged.judged_N], 1)
    assert (cells.by_mu.sum(axis=-1) == cells.by_position.sum(axis=-1)).all()
    assert (cells.by_mu[0].sum(axis=(0, 2)) == tokens_G).all()
    assert np.count_nonzero(tokens_G) > 5
