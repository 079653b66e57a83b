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
    standard_deviation,
    without_groups,
)
from mismatch_cli.metrics.gaps import TokenGaps, flagged
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
# An interval needs a histogram for every group of prompts.
# So these have few bins, up to 12 % wide; one histogram for the value has fine ones.
D_BINS = SignedLogBins(LogBins(-24, 7, mantissa_bits=10))
D_GROUP_BINS = SignedLogBins(LogBins(-24, 7, mantissa_bits=3))
TV_BINS = LogBins(-30, 0, mantissa_bits=9)
TV_GROUP_BINS = LogBins(-30, 0, mantissa_bits=3)
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
        first_cell_S = (gaps.group_S * MU_BINS).astype(np.int32)
        return cls(mu_bin_N, gaps.per_token(first_cell_S) + mu_bin_N)

    def where(self, flags_N: np.ndarray | None) -> Cells:
        """The cells of the tokens with a flag; None flags all of them."""
        return Cells(flagged(self.mu_bin_N, flags_N), flagged(self.cell_N, flags_N))


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
        """Add a float32 value for each of these cells."""
        bin_N = self.bins.index(values_N)
        # Either both kinds of bins are signed or both are not, which their types do not say.
        group_bin_N = self.bins.coarser(bin_N, self.group_bins)  # type: ignore[arg-type]
        bin_N += cells.mu_bin_N * np.int32(self.bins.count)
        count_into(self.total, bin_N)
        group_bin_N += cells.cell_N * np.int32(self.group_bins.count)
        count_into(self.by_group, group_bin_N)
        # `np.maximum.at` is slow, but after the first tokens few exceed the largest so far.
        record = np.flatnonzero(values_N > self.largest.take(cells.mu_bin_N))
        np.maximum.at(self.largest, cells.mu_bin_N[record], values_N[record])

    @property
    def histograms(self) -> tuple[_Histogram, _Histogram]:
        """Histograms by bin of μ: of all tokens in fine bins, and by prompt group in coarse
        ones.
        """
        return (
            _Histogram(self.total, bin_centres(self.bins)),
            _Histogram(self.by_group, self.group_bins.edges),
        )


class CellCounts(Accumulator):
    """Counts and maxima of d, binary TV and top-K TV: exact in any order of updates."""

    def __init__(self) -> None:
        self.d = ScatterCounts(D_BINS, D_GROUP_BINS)
        self.tv = ScatterCounts(TV_BINS, TV_GROUP_BINS)
        self.topk = ScatterCounts(TV_BINS, TV_GROUP_BINS)
        self.out_of_support = np.zeros((GROUPS, MU_BINS), dtype=np.int64)

    def update(self, gaps: TokenGaps, cells: Cells) -> None:
        self.tv.update(cells, gaps.abs_dp_N)
        outside_N = gaps.out_of_support_N
        if outside_N is None:
            self.d.update(cells, gaps.d_N)
        else:
            self.d.update(cells.where(~outside_N), gaps.d_N[~outside_N])
            count_into(self.out_of_support, cells.cell_N[outside_N])
        if gaps.topk is not None:
            counts_N = gaps.topk.tv_counts_N
            self.topk.update(cells.where(counts_N), flagged(gaps.topk.tv_N, counts_N))


class CellMoments(Accumulator):
    """Σ and Σ² of r − 1, binary TV and top-K TV in each cell, float64: [3 quantities, 2, groups,
    bins of μ].
    """

    def __init__(self) -> None:
        self.sums = np.zeros((3, 2, GROUPS, MU_BINS))

    def update(self, gaps: TokenGaps, cells: Cells) -> None:
        cell_N = cells.cell_N.astype(np.intp)
        quantities = [gaps.ratio_less_1_N, gaps.abs_dp_N]
        if gaps.topk is not None:
            quantities.append(gaps.topk.tv_N)
        # A complex number holds a value and its square: two sums for the price of one.
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
        low, high = map(np.exp, self.ends)
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
    tokens_B = total.counts.sum(axis=-1)
    by_share = []
    for s, share in enumerate(shares):
        # An extreme quantile is decided by the few tokens beyond it.
        few_B = tokens_B * min(share, 1 - share) < FEWEST_BEYOND
        row = []
        for b, value in enumerate(value_BS[:, s].tolist()):
            why = FEW_BEYOND if few_B[b] else None
            row.append(Jackknife(value, without_GBS[:, b, s], POSITIVE, why))
        by_share.append(row)
    return by_share


QUANTILES = ("abs_d_p50", "abs_d_p95", "abs_d_p99", "ratio_p01", "ratio_p50", "ratio_p99")


def token_quantiles(counts: CellCounts) -> dict[str, Jackknife]:
    """`QUANTILES` of |d| and of the ratio over all tokens, at any μ."""
    # The histograms keep one row, since all bins of μ are added.
    total = counts.d.total.sum(axis=0)[None]
    by_group = counts.d.by_group.sum(axis=1)[:, None]
    outside_G = counts.out_of_support.sum(axis=1)
    abs_d = (
        _Histogram(D_BINS.fold(total), bin_centres(D_BINS.positive)),
        _Histogram(D_GROUP_BINS.fold(by_group), D_GROUP_BINS.positive.edges),
    )
    ratio = (
        _Histogram(total, bin_centres(D_BINS)).ratio(outside_G.sum()),
        _Histogram(by_group, D_GROUP_BINS.edges).ratio(outside_G[:, None]),
    )
    by_share = _quantiles(*abs_d, [0.5, 0.95, 0.99]) + _quantiles(*ratio, [0.01, 0.5, 0.99])
    by_key = {key: row for key, [row] in zip(QUANTILES, by_share, strict=True)}
    by_key["ratio_p50"] = replace(by_key["ratio_p50"], why_no_interval=CROWDED)
    return by_key


def volatility_rows(counts: CellCounts, moments: CellMoments, prompts: int) -> list[ProbabilityBin]:
    """A row for each bin of μ: its edges, its tokens, and the scatter of each quantity."""
    d, d_by_group = counts.d.histograms
    outside_GB = counts.out_of_support
    ratio = (d.ratio(outside_GB.sum(axis=0)), d_by_group.ratio(outside_GB))
    tokens_B = ratio[1].counts.sum(axis=(0, 2)).tolist()
    ratio_max = list(map(_ratio_max, counts.d.largest, tokens_B))
    tv_max, topk_max = _largest(counts.tv), _largest(counts.topk)
    columns = (
        _scatter("ratio", moments.sums[0], ratio, ratio_max, prompts)
        | _scatter("tv_binary", moments.sums[1], counts.tv.histograms, tv_max, prompts)
        | _scatter("tv_topk", moments.sums[2], counts.topk.histograms, topk_max, prompts)
    )
    edges = [0.0, *MU_EDGES, 1.0]
    rows = []
    for b, tokens in enumerate(tokens_B):
        metrics = {key: estimate_B[b] for key, estimate_B in columns.items()}
        rows.append(ProbabilityBin(edges[b], edges[b + 1], tokens, metrics))
    return rows


def _scatter(
    quantity: str,
    sums_2GB: np.ndarray,
    histograms: tuple[_Histogram, _Histogram],
    max_B: list[Estimate],
    prompts: int,
) -> dict[str, list[Estimate]]:
    """The metrics of `VOLATILITY` for a quantity, by key: an estimate for each bin of μ."""
    total, by_group = histograms
    p01_B, p99_B = _quantiles(total, by_group, [0.01, 0.99])
    return {
        f"{quantity}_sd": _deviations(sums_2GB, by_group.counts.sum(axis=-1), prompts),
        f"{quantity}_p01": [p01.estimate(prompts) for p01 in p01_B],
        f"{quantity}_p99": [
            clamped(p99.estimate(prompts), None, largest.value)
            for p99, largest in zip(p99_B, max_B, strict=True)
        ],
        f"{quantity}_max": max_B,
    }


def _largest(scatter: ScatterCounts) -> list[Estimate]:
    return [point_estimate(value, EXTREME) for value in scatter.largest.tolist()]


def _ratio_max(d_max: np.float32, tokens: int) -> Estimate:
    """exp of the largest d: 0 if all tokens of the bin are out of support, where d_max is −∞."""
    with np.errstate(over="ignore"):
        return point_estimate(float(np.exp(d_max)) if tokens else np.nan, EXTREME)


def _deviations(sums_2GB: np.ndarray, count_GB: np.ndarray, prompts: int) -> list[Estimate]:
    """The standard deviation in each bin of μ, from Σ and Σ² by prompt group."""
    value_B, without_GB = without_groups(standard_deviation, *sums_2GB, count_GB)
    without_GB = jackknife_values(without_GB, count_GB > 0)
    estimates = []
    for b, tokens in enumerate(count_GB.sum(axis=0).tolist()):
        why = _why_no_interval(b, tokens)
        deviation = Jackknife(float(value_B[b]), without_GB[:, b], POSITIVE, why)
        estimates.append(deviation.estimate(prompts))
    return estimates


def _why_no_interval(mu_bin: int, tokens: int) -> str | None:
    """Why a standard deviation in a bin of μ has no interval; None if it may have one."""
    if not tokens:
        return NOT_MEASURED
    if tokens < FEWEST_TOKENS:
        return FEW_TOKENS
    # Near μ = 1 nearly all tokens agree, and a few with large drops dominate the spread.
    if mu_bin == MU_BINS - 1:
        return FEW_TOKENS_DECIDE
    return None
