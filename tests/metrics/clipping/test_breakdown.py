"""Blocked tokens by bin: every token is in one bin of μ and one of the position, under its prompt,
over which intervals are taken.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.metrics.clipping.breakdown import BlockedCells, JudgedSample
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


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_sample_of_judged_tokens_has_their_columns(recomputed):
    """In the order of their hashes; only tokens with an advantage are judged."""
    needs = replace(PLAIN, recomputed=recomputed)
    ((judged,),) = apply_masks(world(0, 20), needs, plain_algorithms(), {})
    sample = JudgedSample()
    sample.update(judged)
    rows, gaps = sample.rows(), judged.gaps
    order = np.argsort(gaps.token_hash_N)
    order = order[judged.judged_N[order]]
    recomputed_N = (
        gaps.column("logp_recomputed_T") if recomputed else np.full(len(gaps.logq_N), np.nan)
    )
    columns = {
        "logp_rollout": gaps.logq_N,
        "logp_trainer": gaps.logp_N,
        "logp_recomputed": recomputed_N,
        "advantage": judged.advantage_N,
        "blocked_by": judged.blocked_by_N,
    }
    assert 0 < len(rows) == len(order) < len(gaps.logq_N)
    for name, column_N in columns.items():
        np.testing.assert_array_equal(rows[name], column_N[order], err_msg=name)
