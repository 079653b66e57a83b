"""Volatility by bin of the rollout probability, and quantiles over all tokens, from the cells' counts and moments.

The paper's point in one table: at low μ the ratio of two policies that hardly differ is volatile, their TV is not.
Standard deviations come from sums; quantiles from histograms with 3 % bins; both get their interval by deleting one of
32 groups of prompts at a time. Ratio quantiles are exp of quantiles of d, with 0 for tokens out of support.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.cells import D_BINS, MU_BINS, MU_EDGES, TV_BINS, CellCounts, CellMoments
from mismatch_cli.metrics.estimate import EXTREME, Estimate, Replicates, clamped, jackknife_interval, point
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.histograms import quantiles, without_each_group


def _ratio_edges() -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.exp(edge) for edge in D_BINS.edges)
    low[0] = high[0] = 0.0  # d < −128, and out of support
    return low, high


_RATIO_EDGES = _ratio_edges()


def token_quantiles(counts: CellCounts) -> dict[str, Replicates]:
    """Quantiles of |d| and of the ratio over all tokens, whatever their μ."""
    signed_G = counts.d.counts.sum(axis=1)
    abs_d = _quantiles_of(D_BINS.fold(signed_G), D_BINS.positive.edges, [0.5, 0.95, 0.99])
    ratio = _quantiles_of(_with_zeros(signed_G, counts.out_of_support.sum(1)), _RATIO_EDGES, [0.01, 0.5, 0.99])
    names = ("abs_d_p50", "abs_d_p95", "abs_d_p99", "ratio_p01", "ratio_p50", "ratio_p99")
    return dict(zip(names, [*abs_d, *ratio], strict=True))


def volatility_rows(counts: CellCounts, moments: CellMoments, prompts: int) -> list[dict[str, Any]]:
    """One row for each bin of μ: its edges, its tokens, and what scatters in it."""
    ratio = _with_zeros(counts.d.counts, counts.out_of_support)
    columns = {
        "ratio_sd": _deviations(moments.sums[0], ratio.sum(-1), prompts),
        "ratio_p01": _by_bin(ratio, _RATIO_EDGES, 0.01, prompts),
        "ratio_p99": _by_bin(ratio, _RATIO_EDGES, 0.99, prompts),
        "ratio_max": [_ratio_max(d, tokens) for d, tokens in zip(counts.d.largest, ratio.sum((0, 2)), strict=True)],
    }
    for name, scatter, sums in (("tv_binary", counts.tv, moments.sums[1]), ("tv_topk", counts.topk, moments.sums[2])):
        columns[f"{name}_sd"] = _deviations(sums, scatter.counts.sum(-1), prompts)
        columns[f"{name}_p01"] = _by_bin(scatter.counts, TV_BINS.edges, 0.01, prompts)
        columns[f"{name}_p99"] = _by_bin(scatter.counts, TV_BINS.edges, 0.99, prompts)
        columns[f"{name}_max"] = [point(float(value), EXTREME) for value in scatter.largest]
    for name in ("ratio", "tv_binary", "tv_topk"):
        columns[f"{name}_p99"] = [
            clamped(p99, None, most.value)
            for p99, most in zip(columns[f"{name}_p99"], columns[f"{name}_max"], strict=True)
        ]
    tokens_B = ratio.sum((0, 2))
    edges = [0.0, *MU_EDGES, 1.0]
    return [
        {"mu_low": edges[b], "mu_high": edges[b + 1], "tokens": int(tokens_B[b])}
        | {name: estimates[b].to_dict() for name, estimates in columns.items()}
        for b in range(MU_BINS)
    ]


def _with_zeros(signed: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Counts of the ratio: those of d, with the tokens of ratio 0 in the lowest bin."""
    counts = signed.copy()
    counts[..., 0] += zeros
    return counts


def _ratio_max(d: np.float32, tokens: np.integer) -> Estimate:
    if tokens and d == -np.inf:
        return point(0.0, EXTREME)  # every token of the bin is out of support
    with np.errstate(over="ignore"):
        return point(float(np.exp(d)) if tokens else np.nan, EXTREME)


def _quantiles_of(counts_Gx: np.ndarray, edges: tuple[np.ndarray, np.ndarray], shares: list[float]) -> list[Replicates]:
    values = quantiles(counts_Gx.sum(axis=0), edges, shares)
    without_Gx = np.full((GROUPS, len(shares)), np.nan)
    without_Gx[counts_Gx.any(axis=1)] = quantiles(without_each_group(counts_Gx), edges, shares)
    return [Replicates(float(values[i]), without_Gx[:, i], deleted=True) for i in range(len(shares))]


def _by_bin(counts: np.ndarray, edges: tuple[np.ndarray, np.ndarray], share: float, prompts: int) -> list[Estimate]:
    return [_quantiles_of(counts[:, b], edges, [share])[0].estimate(prompts) for b in range(MU_BINS)]


def _deviations(sums_2GB: np.ndarray, count_GB: np.ndarray, prompts: int) -> list[Estimate]:
    """Standard deviation in each bin of μ, from Σ and Σ² by prompt group."""
    first_GB, second_GB = sums_2GB
    value_B = _deviation(first_GB.sum(0), second_GB.sum(0), count_GB.sum(0))
    with np.errstate(invalid="ignore"):
        without_GB = _deviation(*(x.sum(0) - x for x in (first_GB, second_GB, count_GB)))
    return [jackknife_interval(value_B[b], without_GB[count_GB[:, b] > 0, b], prompts) for b in range(MU_BINS)]


def _deviation(first: np.ndarray, second: np.ndarray, count: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(np.maximum(second / count - (first / count) ** 2, 0))
