"""The gap along a response: by position, by length, and the largest and smallest values over all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import EXTREME, POSITIVE, SIGNED, Estimate, interval, left_out, point
from mismatch_cli.metrics.gaps import Segments, TokenGaps
from mismatch_cli.metrics.hashing import GROUPS

# bin b ≥ 1 holds distances 2^(b−1) … 2^b − 1; bin 0 the first (or the last) token alone
POSITION_BINS = 24
_EDGES = np.concatenate([[0], 1 << np.arange(POSITION_BINS - 1)])
_QUANTITIES = {"abs_d_mean": POSITIVE, "tv_binary_mean": POSITIVE, "d_mean": SIGNED}


class PositionProfile(Accumulator):
    """Mean |d|, mean binary TV and mean signed d by distance from the beginning and from the end of the response.

    Distances count every token of the response, also those that the loss mask leaves out. Sums by prompt group,
    float64: [2 directions, groups, bins, 5 (Σ|d|, Σ|Δp|, Σd, tokens, tokens in support)].
    """

    def __init__(self) -> None:
        self.sums = np.zeros((2, GROUPS, POSITION_BINS, 5))

    def update(self, gaps: TokenGaps) -> None:
        starts, response, from_start, from_end = cut_by_position(gaps.response_offset_S1)
        pieces = Segments(gaps.kept_before(starts))
        sums = np.empty((len(starts) - 1, 5))
        for column, values_N in enumerate((gaps.abs_d_N, gaps.abs_dp_N, gaps.d_N)):
            sums[:, column] = pieces.sum(values_N)
        sums[:, 3] = sums[:, 4] = pieces.length_S
        if gaps.out_of_support_N is not None:
            sums[:, 4] -= pieces.sum(gaps.out_of_support_N)
        for direction, bin_ in enumerate((from_start, from_end)):
            cell = gaps.group_S[response] * POSITION_BINS + bin_
            for column in range(5):
                cells = np.bincount(cell, weights=sums[:, column], minlength=GROUPS * POSITION_BINS)
                self.sums[direction, :, :, column] += cells.reshape(GROUPS, POSITION_BINS)

    def result(self, prompts: int) -> dict[str, list[dict[str, Any]]]:
        return {"positions": _rows(self.sums[0], prompts), "from_end": _rows(self.sums[1], prompts)}


def cut_by_position(offset_S1: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cut responses where a distance bin begins: starts (and the last end), and each piece's response and bins."""
    length_S = np.diff(offset_S1)
    reaching = length_S[:, None] > _EDGES  # [S, bins]
    from_start = (offset_S1[:-1, None] + _EDGES)[reaching]
    from_end = (offset_S1[1:, None] - _EDGES)[reaching]  # a bin of the end begins where the next one, nearer, ends
    starts = np.sort(np.concatenate([from_start, from_end, offset_S1]))
    starts = starts[np.diff(starts, prepend=-1) > 0]
    begin = starts[:-1]
    response = np.searchsorted(offset_S1, begin, side="right") - 1
    first, last = begin - offset_S1[response], offset_S1[response + 1] - starts[1:]
    return starts, response, position_bin(first), position_bin(last)


def position_bin(distance: np.ndarray) -> np.ndarray:
    """The bin of a distance in tokens: the exponent of its float32; `bin_bounds` says what a bin holds."""
    exponent = (distance.astype(np.float32).view(np.int32) >> np.int32(23)) - np.int32(126)
    return np.clip(exponent, 0, POSITION_BINS - 1, out=exponent)


def bin_bounds(position_bin: int) -> tuple[int, int]:
    """The first and the last distance of a bin."""
    first = int(_EDGES[position_bin])
    return first, 2 * first - 1 if first else 0


def _rows(sums_GBx: np.ndarray, prompts: int) -> list[dict[str, Any]]:
    total_Bx = sums_GBx.sum(axis=0)
    value_B, without_GB = _means(total_Bx), _means(total_Bx - sums_GBx)
    rows = []
    for b in np.flatnonzero(total_Bx[:, 3]):
        occupied_G = sums_GBx[:, b, 3] > 0
        estimates: dict[str, Estimate] = {
            name: interval(value_B[b, q], left_out(without_GB[:, b, q], occupied_G), prompts, scale)
            for q, (name, scale) in enumerate(_QUANTITIES.items())
        }
        first, last = bin_bounds(b)
        row = {"first": first, "last": last, "tokens": int(total_Bx[b, 3])}
        rows.append(row | {name: estimate.to_dict() for name, estimate in estimates.items()})
    return rows


def _means(sums_x5: np.ndarray) -> np.ndarray:
    counts = sums_x5[..., [4, 3, 4]]
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums_x5[..., :3] / counts


_BINS = 32  # bin b holds lengths 2^(b−1) … 2^b − 1


class LengthProfile(Accumulator):
    """Mean and standard deviation of Σd of the sequences in each octave of length.

    Sums by prompt group, float64: [groups, bins, 3 (sequences, Σ Σd, Σ (Σd)²)].
    """

    def __init__(self) -> None:
        self.sums = np.zeros((GROUPS, _BINS, 3))

    def update(self, group_S: np.ndarray, length_S: np.ndarray, d_S: np.ndarray) -> None:
        """Length in tokens that have a d, and Σd over them; a response without any is no sequence."""
        bin_S = np.frexp(length_S.astype(np.float64))[1]
        np.add.at(self.sums, (group_S, bin_S), np.stack([length_S > 0, d_S, d_S * d_S], axis=1))

    def result(self, prompts: int) -> list[dict[str, Any]]:
        total_B3 = self.sums.sum(axis=0)
        (mean_B, sd_B), (mean_GB, sd_GB) = _mean_and_sd(total_B3), _mean_and_sd(total_B3 - self.sums)
        occupied_GB = self.sums[:, :, 0] > 0
        mean_GB, sd_GB = left_out(mean_GB, occupied_GB), left_out(sd_GB, occupied_GB)
        return [
            {
                "first": 2 ** int(b - 1),
                "last": 2 ** int(b) - 1,
                "sequences": int(total_B3[b, 0]),
                "d_sum_mean": interval(mean_B[b], mean_GB[:, b], prompts, SIGNED).to_dict(),
                "d_sum_sd": interval(sd_B[b], sd_GB[:, b], prompts, POSITIVE).to_dict(),
            }
            for b in np.flatnonzero(total_B3[:, 0])
        ]


def _mean_and_sd(sums_x3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count, first, second = np.moveaxis(sums_x3, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = first / count
        return mean, np.where(count > 1, np.sqrt(np.maximum(second / count - mean**2, 0)), np.nan)


_KEYS = ("d_max", "d_min", "tv_signed_max", "tv_signed_min", "kl_binary_max", "tv_topk_max", "kl_topk_max")


class Extremes(Accumulator):
    """Minimum and maximum of d and Δp, maximum of the divergences, as largest values of ± the quantity."""

    LARGEST = ("largest",)

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
