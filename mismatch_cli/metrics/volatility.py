"""Volatility by bin of the rollout probability, and quantiles over all tokens, from counts and
moments of cells.

The paper's point in one table: at low μ the ratio of two nearly equal policies is volatile, but
their TV is not. Standard deviations come from sums, quantiles from histograms: fine ones for
values, coarser ones by prompt group for intervals. Ratio quantiles are exp of quantiles of d, with
0 for tokens out of support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import (
    CROWDED,
    EXTREME,
    FEW_BEYOND,
    FEW_TOKENS,
    FEW_TOKENS_DECIDE,
    FEWEST_BEYOND,
    FEWEST_TOKENS,
    NOT_MEASURED,
    POSITIVE,
    Estimate,
    Jackknife,
    clamped,
    jackknife_values,
    point_estimate,
    without_groups,
)
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.histograms import (
    LogBins,
    SignedLogBins,
    bin_centres,
    count_into,
    quantiles,
)
from mismatch_cli.metrics.pair_summary import ProbabilityBin

MU_EDGES = (1e-4, 1e-3, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 0.99)
MU_BINS = len(MU_EDGES) + 1
CELLS = GROUPS * MU_BINS
# 3 bits: at most 12 % wide
D_BINS, D_GROUP_BINS = (SignedLogBins(LogBins(-24, 7, bits)) for bits in (10, 3))
TV_BINS, TV_GROUP_BINS = (LogBins(-30, 0, bits) for bits in (9, 3))
_LOG_EDGES = np.log(np.array(MU_EDGES)).astype(np.float32)


@dataclass(frozen=True)
class Cells:
    """The bin of μ and the cell of each counted token."""

    mu_bin_N: np.ndarray  # int32
    cell_N: np.ndarray  # int32, prompt group × MU_BINS + mu_bin

    @classmethod
    def of(cls, gaps: TokenGaps) -> Cells:
        """Compare μ with the edges as log μ in float32."""
        bin_N = np.zeros(len(gaps.logq_N), dtype=np.uint8)
        above_N = np.empty(len(bin_N), dtype=bool)
        for edge in _LOG_EDGES:
            bin_N += np.greater_equal(gaps.logq_N, edge, out=above_N).view(np.uint8)
        mu_bin_N = bin_N.astype(np.int32)
        return cls(mu_bin_N, gaps.per_token((gaps.group_S * MU_BINS).astype(np.int32)) + mu_bin_N)

    def where(self, flags_N: np.ndarray | None) -> Cells:
        return self if flags_N is None else Cells(self.mu_bin_N[flags_N], self.cell_N[flags_N])


class ScatterCounts(Accumulator):
    """Histograms and exact maximum of one quantity: fine bins for its value, prompt groups for
    its interval.
    """

    SETTINGS = ("bins", "group_bins")
    LARGEST = ("largest",)

    def __init__(self, bins: LogBins | SignedLogBins, group_bins: LogBins | SignedLogBins) -> None:
        self.bins, self.group_bins = bins, group_bins
        self.total = np.zeros((MU_BINS, bins.count), dtype=np.int64)
        self.by_group = np.zeros((GROUPS, MU_BINS, group_bins.count), dtype=np.int64)
        self.largest = np.full(MU_BINS, -np.inf, dtype=np.float32)

    def update(self, cells: Cells, values_N: np.ndarray) -> None:
        bin_N = self.bins.index(values_N)
        group_bin_N = self.bins.coarser(bin_N, self.group_bins)  # type: ignore[arg-type]  # both are of the same kind
        count_into(self.total, np.add(bin_N, cells.mu_bin_N * np.int32(self.bins.count), out=bin_N))
        count_into(
            self.by_group,
            np.add(group_bin_N, cells.cell_N * np.int32(self.group_bins.count), out=group_bin_N),
        )
        # Few, once the first tokens are seen
        record = np.flatnonzero(values_N > self.largest.take(cells.mu_bin_N))
        np.maximum.at(self.largest, cells.mu_bin_N[record], values_N[record])

    @property
    def histograms(self) -> tuple[_Histogram, _Histogram]:
        """Histograms by bin of μ: of all tokens in fine bins, and by prompt group in coarse
        ones.
        """
        return _Histogram(self.total, bin_centres(self.bins)), _Histogram(
            self.by_group, self.group_bins.edges
        )


class CellCounts(Accumulator):
    """Counts and maxima of d, binary TV and top-K TV: exact in any order of updates."""

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
            self.topk.update(
                cells.where(flags_N), topk.tv_N if flags_N is None else topk.tv_N[flags_N]
            )


class CellMoments(Accumulator):
    """Σ and Σ² of r − 1, binary TV and top-K TV in each cell, float64: [3 quantities, 2, groups,
    bins of μ].
    """

    def __init__(self) -> None:
        self.sums = np.zeros((3, 2, GROUPS, MU_BINS))

    def update(self, gaps: TokenGaps, cells: Cells) -> None:
        cell_N = cells.cell_N.astype(np.intp)
        quantities = [gaps.ratio_less_1_N, gaps.abs_dp_N] + (
            [] if gaps.topk is None else [gaps.topk.tv_N]
        )
        # A complex number gives two sums for the price of one
        pair_N = np.empty(len(cell_N), dtype=np.complex128)
        for sums, values_N in zip(self.sums, quantities, strict=False):
            pair_N.real = values_N
            np.square(pair_N.real, out=pair_N.imag)
            pair_C = np.zeros(CELLS, dtype=np.complex128)
            np.add.at(pair_C, cell_N, pair_N)
            sums += np.stack([pair_C.real, pair_C.imag]).reshape(sums.shape)


class _Histogram(NamedTuple):
    """Counts [..., bins], and the lower and upper edges of the bins."""

    counts: np.ndarray
    ends: tuple[np.ndarray, np.ndarray]

    def ratio(self, out_of_support: np.ndarray) -> _Histogram:
        """The histogram of the ratio, from that of d; tokens out of support have ratio 0, like
        those with d < −128.
        """
        counts = self.counts.copy()
        counts[..., 0] += out_of_support
        low, high = (np.exp(end) for end in self.ends)
        low[0] = high[0] = 0.0
        return _Histogram(counts, (low, high))


def _quantiles(
    total: _Histogram, by_group: _Histogram, shares: Sequence[float]
) -> list[list[Jackknife]]:
    """[shares][rows], from counts [rows, bins] for values and coarser ones [groups, rows, bins]
    for intervals.
    """
    value_BS = quantiles(*total, shares)
    _, without_GBS = without_groups(
        lambda counts: quantiles(counts, by_group.ends, shares), by_group.counts
    )
    without_GBS = jackknife_values(without_GBS, np.any(by_group.counts, axis=-1, keepdims=True))
    beyond_BS = total.counts.sum(axis=-1)[:, None] * np.minimum(shares, 1 - np.array(shares))

    def found(b: int, s: int) -> Jackknife:
        unsure = FEW_BEYOND if beyond_BS[b, s] < FEWEST_BEYOND else None
        return Jackknife(float(value_BS[b, s]), without_GBS[:, b, s], POSITIVE, unsure)

    return [[found(b, s) for b in range(len(value_BS))] for s in range(len(shares))]


def token_quantiles(counts: CellCounts) -> dict[str, Jackknife]:
    """Quantiles of |d| and of the ratio over all tokens, at any μ."""
    total, by_group = counts.d.total.sum(axis=0)[None], counts.d.by_group.sum(axis=1)[:, None]
    abs_d = (
        _Histogram(D_BINS.fold(total), bin_centres(D_BINS.positive)),
        _Histogram(D_GROUP_BINS.fold(by_group), D_GROUP_BINS.positive.edges),
    )
    outside_G = counts.out_of_support.sum(axis=1)
    ratio = (
        _Histogram(total, bin_centres(D_BINS)).ratio(outside_G.sum()),
        _Histogram(by_group, D_GROUP_BINS.edges).ratio(outside_G[:, None]),
    )
    names = ("abs_d_p50", "abs_d_p95", "abs_d_p99", "ratio_p01", "ratio_p50", "ratio_p99")
    rows = _quantiles(*abs_d, [0.5, 0.95, 0.99]) + _quantiles(*ratio, [0.01, 0.5, 0.99])
    found = {name: row[0] for name, row in zip(names, rows, strict=True)}
    return found | {"ratio_p50": replace(found["ratio_p50"], why_no_interval=CROWDED)}


def volatility_rows(counts: CellCounts, moments: CellMoments, prompts: int) -> list[ProbabilityBin]:
    """A row for each bin of μ: its edges, its tokens, and the scatter of each quantity."""
    d, d_by_group = counts.d.histograms
    outside_GB = counts.out_of_support
    ratio = (d.ratio(outside_GB.sum(axis=0)), d_by_group.ratio(outside_GB))
    tokens_B = ratio[1].counts.sum(axis=(0, 2))
    columns: dict[str, list[Estimate]] = {}
    for sums, name, histograms, largest in (
        (
            moments.sums[0],
            "ratio",
            ratio,
            [_ratio_max(*pair) for pair in zip(counts.d.largest, tokens_B, strict=True)],
        ),
        (moments.sums[1], "tv_binary", counts.tv.histograms, _largest(counts.tv)),
        (moments.sums[2], "tv_topk", counts.topk.histograms, _largest(counts.topk)),
    ):
        columns[f"{name}_sd"] = _deviations(sums, histograms[1].counts.sum(axis=-1), prompts)
        p01, p99 = _quantiles(*histograms, [0.01, 0.99])
        columns[f"{name}_p01"] = [found.estimate(prompts) for found in p01]
        columns[f"{name}_p99"] = [
            clamped(found.estimate(prompts), None, most.value)
            for found, most in zip(p99, largest, strict=True)
        ]
        columns[f"{name}_max"] = largest
    edges = [0.0, *MU_EDGES, 1.0]
    return [
        ProbabilityBin(
            edges[b],
            edges[b + 1],
            int(tokens_B[b]),
            {name: estimates[b] for name, estimates in columns.items()},
        )
        for b in range(MU_BINS)
    ]


def _largest(scatter: ScatterCounts) -> list[Estimate]:
    return [point_estimate(float(value), EXTREME) for value in scatter.largest]


def _ratio_max(d: np.float32, tokens: np.integer) -> Estimate:
    if tokens and d == -np.inf:
        return point_estimate(0.0, EXTREME)  # every token of the bin is out of support
    with np.errstate(over="ignore"):
        return point_estimate(float(np.exp(d)) if tokens else np.nan, EXTREME)


def _deviations(sums_2GB: np.ndarray, count_GB: np.ndarray, prompts: int) -> list[Estimate]:
    """The standard deviation in each bin of μ, from Σ and Σ² by prompt group."""
    value_B, without_GB = without_groups(_deviation, *sums_2GB, count_GB)
    without_GB, tokens_B = jackknife_values(without_GB, count_GB > 0), count_GB.sum(axis=0)
    return [
        Jackknife(
            float(value_B[b]), without_GB[:, b], POSITIVE, _unsure(b, int(tokens_B[b]))
        ).estimate(prompts)
        for b in range(MU_BINS)
    ]


def _unsure(b: int, tokens: int) -> str | None:
    """Why a spread has no interval; near μ = 1 nearly all tokens agree, and a few with large
    drops dominate it.
    """
    if not tokens:
        return NOT_MEASURED
    return FEW_TOKENS if tokens < FEWEST_TOKENS else FEW_TOKENS_DECIDE if b == MU_BINS - 1 else None


def _deviation(first: np.ndarray, second: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(second / count - (first / count) ** 2, 0))
