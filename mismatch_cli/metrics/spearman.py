"""Rank correlation of the two policies' probabilities, on a bounded sample of the tokens."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.jackknife import CORRELATION, Jackknife, left_out
from mismatch_cli.metrics.keep import SmallestRows

SAMPLE_TOKENS = 2**15
_PARTS = 32
_ROW = np.dtype([("key", np.float64), ("group", np.int64), ("x", np.float32), ("y", np.float32)])


class SampledSpearman:
    """Spearman's ρ of two columns, μ and π for one, with mid-ranks.

    Exact up to 32,768 tokens, beyond that on those with the smallest hashes. A histogram would be bounded too, but its
    bins are ties, and where the policies nearly agree the order inside a bin is all there is to measure.
    """

    def __init__(self) -> None:
        self.sample = SmallestRows(_ROW, SAMPLE_TOKENS)

    def update(self, gaps: TokenGaps) -> None:
        self.update_values(gaps, gaps.logq_N, gaps.logp_N)

    def update_values(self, gaps: TokenGaps, x_N: np.ndarray, y_N: np.ndarray) -> None:
        """Any two float32 columns over the counted tokens of a slice; NaN: not measured."""
        group_N = gaps.per_token(gaps.group_S)

        def rows_of(index: np.ndarray) -> np.ndarray:
            rows = np.zeros(len(index), dtype=_ROW)
            rows["group"], rows["x"], rows["y"] = group_N[index], x_N[index], y_N[index]
            return rows

        known = np.flatnonzero(~(np.isnan(x_N) | np.isnan(y_N)))
        if len(known) == len(x_N):
            self.sample.offer_hashed(gaps.token_hash_N, rows_of)
        else:
            self.sample.offer_hashed(gaps.token_hash_N[known], lambda index: rows_of(known[index]))

    def merge(self, other: SampledSpearman) -> None:
        self.sample.merge(other.sample)

    def result(self, prompts: int) -> Estimate:
        return self.jackknife().estimate(prompts)

    def jackknife(self) -> Jackknife:
        """ρ, and ρ without each group of prompts, of fewer and larger ones: every one needs all ranks anew."""
        rows = self.sample.rows()
        part = rows["group"] * _PARTS // GROUPS
        without = np.array([_spearman(rows[part != p]) for p in range(_PARTS)])
        return Jackknife(_spearman(rows), left_out(without, np.bincount(part, minlength=_PARTS) > 0), CORRELATION)


def _spearman(rows: np.ndarray) -> float:
    """Pearson correlation of mid-ranks; NaN where one side has a single rank."""
    q_N, p_N = (_centred_ranks(rows[name]) for name in ("x", "y"))
    variances = (q_N @ q_N) * (p_N @ p_N)
    return float(q_N @ p_N / np.sqrt(variances)) if variances > 0 else float("nan")


def _centred_ranks(x_N: np.ndarray) -> np.ndarray:
    """The rank of each value, ties sharing their mean rank, minus the mean rank of all."""
    _, of_N, counts = np.unique(x_N, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2 - len(x_N) / 2)[of_N]
