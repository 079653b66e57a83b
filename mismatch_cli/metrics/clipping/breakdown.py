"""Exact counts of blocked tokens by bin of μ and by position, and a bounded sample of judged
tokens.
"""

from __future__ import annotations

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.histograms import count_into
from mismatch_cli.metrics.profiles import POSITION_BINS, longest_response, position_cells
from mismatch_cli.metrics.retained_rows import SmallestRows
from mismatch_cli.metrics.volatility import CELLS, MU_BINS, Cells


class BlockedCells(Accumulator):
    """Counts by sign, prompt group and bin: row 0 has all judged tokens, the next rows those of
    each algorithm. `longest`: tokens of the longest response, where the last position's bin ends.
    """

    LARGEST = ("longest",)

    def __init__(self, algorithms: int) -> None:
        self.longest = 0
        self.by_mu = np.zeros((1 + algorithms, 2, GROUPS, MU_BINS), dtype=np.int64)
        self.by_position = np.zeros((1 + algorithms, 2, GROUPS, POSITION_BINS), dtype=np.int64)

    def update(self, judged: MaskedSlice) -> None:
        self.longest = max(self.longest, longest_response(judged.gaps))
        # Cells of prompt group and bin; those of negative tokens come after all positive ones
        mu_N = Cells.of(judged.gaps).cell_N
        mu_N += judged.negative_N * np.int32(CELLS)
        position_N = position_cells(judged.gaps)
        position_N += judged.negative_N * np.int32(GROUPS * POSITION_BINS)
        all_judged = slice(None) if judged.judged_N.all() else judged.judged_N
        for row, index_U in enumerate([all_judged, *judged.blocked]):
            count_into(self.by_mu[row], mu_N[index_U])
            count_into(self.by_position[row], position_N[index_U])


SAMPLE_TOKENS = 10_000
JUDGED_ROW = np.dtype(
    [
        ("key", np.float64),
        ("logp_rollout", np.float32),
        ("logp_trainer", np.float32),
        ("logp_recomputed", np.float32),
        ("advantage", np.float32),
        ("blocked_by", np.uint64),
    ]
)


class JudgedSample(SmallestRows):
    """The judged tokens with the smallest hashes of response and position: the same ones in any
    order and sharding.

    `blocked_by` has bit i set if algorithm i blocks the token. Outside the trainer's support log π
    is −inf; log π′ is NaN if nothing was recomputed.
    """

    def __init__(self) -> None:
        super().__init__(JUDGED_ROW, SAMPLE_TOKENS)

    def update(self, judged: MaskedSlice) -> None:
        index_U = np.flatnonzero(judged.judged_N)
        gaps, recomputed = judged.gaps, judged.policies.recomputed

        def rows_of(chosen: np.ndarray) -> np.ndarray:
            chosen_U = index_U[chosen]
            rows = np.zeros(len(chosen_U), dtype=JUDGED_ROW)
            rows["logp_rollout"] = gaps.logq_N[chosen_U]
            rows["logp_trainer"] = gaps.logp_N[chosen_U]
            rows["logp_recomputed"] = np.nan if recomputed is None else recomputed[chosen_U]
            rows["advantage"] = judged.advantage_N[chosen_U]
            rows["blocked_by"] = judged.blocked_by_N[chosen_U]
            return rows

        self.offer_hashed(gaps.token_hash_N[index_U], rows_of)
