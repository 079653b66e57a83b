"""Tokens by prompt group × bin of the rollout probability: counts, histograms, maxima and moments of ratio and TV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.histograms import LogBins, SignedLogBins, count_into

MU_EDGES = (1e-4, 1e-3, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 0.99)
MU_BINS = len(MU_EDGES) + 1
CELLS = GROUPS * MU_BINS
D_BINS, D_GROUP_BINS = (SignedLogBins(LogBins(-24, 7, bits)) for bits in (10, 3))  # 3 bits: 12 % wide at most
TV_BINS, TV_GROUP_BINS = (LogBins(-30, 0, bits) for bits in (9, 3))
_COPIES = 4
_LOG_EDGES = np.log(np.array(MU_EDGES)).astype(np.float32)


@dataclass(frozen=True)
class Cells:
    """Where each counted token belongs."""

    mu_bin_N: np.ndarray  # int64
    cell_N: np.ndarray  # int64, prompt group × MU_BINS + mu_bin

    @classmethod
    def of(cls, gaps: TokenGaps) -> Cells:
        """μ is compared with its edges as log μ in float32."""
        bin_N = np.zeros(len(gaps.logq_N), dtype=np.uint8)
        for edge in _LOG_EDGES:
            bin_N += (gaps.logq_N >= edge).view(np.uint8)
        mu_bin_N = bin_N.astype(np.int64)
        return cls(mu_bin_N, gaps.per_token(gaps.group_S * MU_BINS) + mu_bin_N)

    def where(self, flags_N: np.ndarray | None) -> Cells:
        return self if flags_N is None else Cells(self.mu_bin_N[flags_N], self.cell_N[flags_N])


class ScatterCounts:
    """Histograms and exact maximum of one quantity: in fine bins for its value, by prompt group for its interval."""

    def __init__(self, bins: LogBins | SignedLogBins, group_bins: LogBins | SignedLogBins) -> None:
        self.bins, self.group_bins = bins, group_bins
        self.total = np.zeros((MU_BINS, bins.count), dtype=np.int64)
        self.by_group = np.zeros((GROUPS, MU_BINS, group_bins.count), dtype=np.int64)
        self.largest = np.full(MU_BINS, -np.inf, dtype=np.float32)

    def update(self, cells: Cells, values_N: np.ndarray) -> None:
        count_into(self.total, cells.mu_bin_N * self.bins.count + self.bins.index(values_N))
        count_into(self.by_group, cells.cell_N * self.group_bins.count + self.group_bins.index(values_N))
        record = np.flatnonzero(values_N > self.largest.take(cells.mu_bin_N))  # few, once the first tokens are seen
        np.maximum.at(self.largest, cells.mu_bin_N[record], values_N[record])

    def merge(self, other: ScatterCounts) -> None:
        self.total += other.total
        self.by_group += other.by_group
        np.maximum(self.largest, other.largest, out=self.largest)


class CellCounts:
    """Counts and maxima of d, binary TV and top-K TV: exact, whatever the order of updates."""

    def __init__(self) -> None:
        self.d = ScatterCounts(D_BINS, D_GROUP_BINS)
        self.tv, self.topk = (ScatterCounts(TV_BINS, TV_GROUP_BINS) for _ in range(2))
        self.out_of_support = np.zeros((GROUPS, MU_BINS), dtype=np.int64)

    def update(self, gaps: TokenGaps, cells: Cells) -> None:
        self.tv.update(cells, gaps.abs_dp_N)
        if (outside_N := gaps.out_of_support_N) is None:
            self.d.update(cells, gaps.d_N)
        else:
            self.d.update(cells.where(~outside_N), gaps.d_N[~outside_N])
            count_into(self.out_of_support, cells.cell_N[outside_N])
        if (topk := gaps.topk) is not None:
            flags_N = topk.tv_counts_N
            self.topk.update(cells.where(flags_N), topk.tv_N if flags_N is None else topk.tv_N[flags_N])

    def merge(self, other: CellCounts) -> None:
        for mine, theirs in ((self.d, other.d), (self.tv, other.tv), (self.topk, other.topk)):
            mine.merge(theirs)
        self.out_of_support += other.out_of_support


class CellMoments:
    """Σ and Σ² of r − 1, binary TV and top-K TV in each cell, float64: [3 quantities, 2, groups, bins of μ]."""

    def __init__(self) -> None:
        self.sums = np.zeros((3, 2, GROUPS, MU_BINS))

    def update(self, gaps: TokenGaps, cells: Cells) -> None:
        # consecutive tokens often share a cell; four copies of each, taken in turn, spare them waiting for each other
        spread_N = cells.cell_N * _COPIES
        for copy in range(1, _COPIES):
            spread_N[copy::_COPIES] += copy
        quantities = [gaps.ratio_less_1_N, gaps.abs_dp_N] + ([] if gaps.topk is None else [gaps.topk.tv_N])
        for sums, values_N in zip(self.sums, quantities, strict=False):
            for power, weights_N in enumerate((values_N, np.square(values_N, dtype=np.float64))):
                sums_C = np.bincount(spread_N, weights=weights_N, minlength=CELLS * _COPIES)
                sums[power] += sums_C.reshape(GROUPS, MU_BINS, _COPIES).sum(axis=-1)

    def merge(self, other: CellMoments) -> None:
        self.sums += other.sums
