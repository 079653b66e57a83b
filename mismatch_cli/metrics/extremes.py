"""Largest and smallest values over all tokens: exact, and without interval."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.estimate import EXTREME, Estimate, point
from mismatch_cli.metrics.gaps import TokenGaps

_KEYS = ("d_max", "d_min", "tv_signed_max", "tv_signed_min", "kl_binary_max", "tv_topk_max", "kl_topk_max")


class Extremes:
    """Minimum and maximum of d and Δp, maximum of the divergences, as largest values of ± the quantity."""

    def __init__(self) -> None:
        self.largest = np.full(len(_KEYS), -np.inf)
        self.out_of_support = 0

    def update(self, gaps: TokenGaps) -> None:
        if not len(gaps.logq_N):
            return
        outside_N, d_N = gaps.out_of_support_N, gaps.d_N
        if outside_N is not None:
            self.out_of_support += int(outside_N.sum())
            d_N = d_N[~outside_N]
        d_max, d_min = (d_N.max(), -d_N.min()) if len(d_N) else (-np.inf, -np.inf)
        found = [d_max, d_min, gaps.dp_N.max(), -gaps.dp_N.min(), gaps.binary_kl_N.max(), -np.inf, -np.inf]
        if (topk := gaps.topk) is not None:
            found[5] = _largest(topk.tv_N, topk.tv_counts_N)
            found[6] = _largest(topk.kl_N, topk.kl_counts_N)
        np.maximum(self.largest, found, out=self.largest)

    def merge(self, other: Extremes) -> None:
        np.maximum(self.largest, other.largest, out=self.largest)
        self.out_of_support += other.out_of_support

    def result(self) -> dict[str, Estimate]:
        largest = dict(zip(_KEYS, self.largest.tolist(), strict=True))
        d_max, d_min = largest["d_max"], -largest["d_min"]
        seen = largest["tv_signed_max"] > -np.inf
        ratio_min = 0.0 if self.out_of_support else _exp(d_min)
        values = {
            "abs_d_max": max(d_max, -d_min),
            "tv_binary_max": max(largest["tv_signed_max"], largest["tv_signed_min"]),
            "tv_signed_max": largest["tv_signed_max"],
            "tv_signed_min": -largest["tv_signed_min"],
            "ratio_min": ratio_min if seen else np.nan,
            "ratio_max": _exp(d_max) if seen else np.nan,
            "kl_binary_max": largest["kl_binary_max"],
            "tv_topk_max": largest["tv_topk_max"],
            "kl_topk_max": largest["kl_topk_max"],
        }
        return {name: _extreme(value) for name, value in values.items()}


def _largest(values_N: np.ndarray, counts_N: np.ndarray | None) -> float:
    values_N = values_N if counts_N is None else values_N[counts_N]
    return float(values_N.max()) if len(values_N) else -np.inf


def _exp(d: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(d))


def _extreme(value: float) -> Estimate:
    return point(np.nan if abs(value) == np.inf and value < 0 else value, EXTREME)
