"""Rank correlation of the two policies' probabilities, from a two-dimensional histogram."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.estimate import Estimate, jackknife_interval
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.histograms import LogBins, count_into, without_each_group

BINS = LogBins(-24, 7, mantissa_bits=2)  # −log p from 6e-8 to 128 in bins 14 to 25 % wide


class BinnedSpearman:
    """Spearman's ρ of μ and π, binned: counts of (−log μ, −log π) by prompt group.

    Tokens of one bin are ties and get their mid-rank, so ρ is the tie-corrected one of the binned values.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((GROUPS, BINS.count, BINS.count), dtype=np.int64)

    def update(self, gaps: TokenGaps) -> None:
        row_N = gaps.per_token(gaps.group_S * BINS.count)
        cell_N = (row_N + BINS.index(gaps.logq_N)) * BINS.count + BINS.index(gaps.logp_N)
        count_into(self.counts, cell_N)

    def merge(self, other: BinnedSpearman) -> None:
        self.counts += other.counts

    def result(self, prompts: int) -> Estimate:
        value = _spearman(self.counts.sum(axis=0))
        without_G = np.array([_spearman(counts) for counts in without_each_group(self.counts)])
        return jackknife_interval(value, without_G, prompts)


def _spearman(counts: np.ndarray) -> float:
    """Pearson correlation of mid-ranks; NaN where one side has a single rank."""
    q_ranks, p_ranks = (_mid_ranks(counts.sum(axis=axis)) for axis in (1, 0))
    covariance = q_ranks @ counts @ p_ranks
    variances = (counts.sum(axis=1) @ q_ranks**2) * (counts.sum(axis=0) @ p_ranks**2)
    return float(covariance / np.sqrt(variances)) if variances > 0 else float("nan")


def _mid_ranks(marginal: np.ndarray) -> np.ndarray:
    """The mean rank of each bin's tokens, centred on the mean rank of all, as a fraction of their number."""
    total = marginal.sum()
    return (np.cumsum(marginal) - marginal / 2 - total / 2) / max(total, 1)
