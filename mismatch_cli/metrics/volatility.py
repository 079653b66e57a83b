"""How widely ratio and TV scatter in each bin of the rollout probability, and quantiles over all tokens.

The paper's point in one table: at low μ the ratio of two policies that hardly differ is volatile, their TV is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.estimate import EXTREME, Estimate, jackknife_interval, point
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.histograms import LogBins, SignedLogBins, count_into, quantiles, without_each_group

MU_EDGES = (1e-4, 1e-3, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 0.99)
_LOG_EDGES = np.log(np.array(MU_EDGES)).astype(np.float32)
_BINS = len(MU_EDGES) + 1
_CELLS = GROUPS * _BINS
D_BINS = SignedLogBins(LogBins(-24, 7))
TV_BINS = LogBins(-30, 0)


def mu_bin(logq_N: np.ndarray) -> np.ndarray:
    """The bin of `MU_EDGES` that μ falls into, uint8; decided on log μ in float32."""
    bin_N = np.zeros(len(logq_N), dtype=np.uint8)
    for edge in _LOG_EDGES:
        bin_N += (logq_N >= edge).view(np.uint8)
    return bin_N


class _Scatter:
    """Histogram, exact maximum, Σ and Σ² of one quantity in each cell (prompt group × bin of μ)."""

    def __init__(self, bins: LogBins | SignedLogBins) -> None:
        self.bins = bins
        self.counts = np.zeros((GROUPS, _BINS, bins.count), dtype=np.int64)
        self.largest_B = np.full(_BINS, -np.inf, dtype=np.float32)
        self.sum_2C = np.zeros((2, _CELLS))

    def count(self, cell_N: np.ndarray, bin_N: np.ndarray, values_N: np.ndarray) -> None:
        count_into(self.counts, cell_N * self.bins.count + self.bins.index(values_N))
        np.maximum.at(self.largest_B, bin_N, values_N)

    def add(self, other: _Scatter) -> None:
        self.counts += other.counts
        np.maximum(self.largest_B, other.largest_B, out=self.largest_B)


class Volatility:
    """Per bin of μ: count; standard deviation, p1, p99 and maximum of the ratio beside those of binary and top-K TV.

    Standard deviations come from sums; quantiles from histograms with 3 % bins; intervals from deleting one of 32 groups
    of prompts at a time. Ratio quantiles are exp of quantiles of d, with 0 for tokens out of support.
    """

    def __init__(self) -> None:
        self.d, self.tv, self.topk = _Scatter(D_BINS), _Scatter(TV_BINS), _Scatter(TV_BINS)
        self.out_of_support_C = np.zeros(_CELLS, dtype=np.int64)

    def update(self, gaps: TokenGaps, group_S: np.ndarray) -> None:
        """`group_S` are the prompt groups of the responses in `gaps`."""
        bin_N = mu_bin(gaps.logq_N).astype(np.int64)
        cell_N = gaps.per_token(group_S * _BINS) + bin_N
        self._update_ratio(gaps, cell_N, bin_N)
        self.tv.count(cell_N, bin_N, gaps.abs_dp_N)
        if (topk := gaps.topk) is not None:
            known_N = slice(None) if topk.tv_counts_N is None else topk.tv_counts_N
            self.topk.count(cell_N[known_N], bin_N[known_N], topk.tv_N[known_N])

    def _update_ratio(self, gaps: TokenGaps, cell_N: np.ndarray, bin_N: np.ndarray) -> None:
        if gaps.out_of_support_N is None:
            self.d.count(cell_N, bin_N, gaps.d_N)
            return
        inside_N = ~gaps.out_of_support_N
        self.d.count(cell_N[inside_N], bin_N[inside_N], gaps.d_N[inside_N])
        count_into(self.out_of_support_C, cell_N[gaps.out_of_support_N])

    def merge(self, other: Volatility) -> None:
        for mine, theirs in ((self.d, other.d), (self.tv, other.tv), (self.topk, other.topk)):
            mine.add(theirs)
        self.out_of_support_C += other.out_of_support_C
