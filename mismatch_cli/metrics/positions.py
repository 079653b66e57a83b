"""The gap by position in the response, counted from its beginning and from its end."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.jackknife import POSITIVE, SIGNED, interval, left_out
from mismatch_cli.metrics.segments import Segments

# bin b ≥ 1 holds distances 2^(b−1) … 2^b − 1; bin 0 the first (or the last) token alone
BINS = 24
_EDGES = np.concatenate([[0], 1 << np.arange(BINS - 1)])
_QUANTITIES = {"abs_d_mean": POSITIVE, "tv_binary_mean": POSITIVE, "d_mean": SIGNED}


class PositionProfile:
    """Mean |d|, mean binary TV and mean signed d by distance from the beginning and from the end of the response.

    Distances count every token of the response, also those that the loss mask leaves out. Sums by prompt group,
    float64: [2 directions, groups, bins, 5 (Σ|d|, Σ|Δp|, Σd, tokens, tokens in support)].
    """

    def __init__(self) -> None:
        self.sums = np.zeros((2, GROUPS, BINS, 5))

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
            cell = gaps.group_S[response] * BINS + bin_
            for column in range(5):
                cells = np.bincount(cell, weights=sums[:, column], minlength=GROUPS * BINS)
                self.sums[direction, :, :, column] += cells.reshape(GROUPS, BINS)

    def merge(self, other: PositionProfile) -> None:
        self.sums += other.sums

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
    return np.clip(exponent, 0, BINS - 1, out=exponent)


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
