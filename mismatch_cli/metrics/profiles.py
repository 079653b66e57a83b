"""The gap along a response, by position, turn and length, and the extremes over all tokens."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from mismatch_cli.base.arrays import Segments
from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import (
    CANCELLING,
    EXTREME,
    POSITIVE,
    Estimate,
    Scale,
    interval,
    jackknife_values,
    point_estimate,
    standard_deviation,
    without_groups,
)
from mismatch_cli.metrics.gaps import TokenGaps, flagged
from mismatch_cli.metrics.pair_summary import LengthRow, ProfileRow

# Bin b ≥ 1 holds distances 2^(b−1) … 2^b − 1; bin 0 only the first (or last) token.
POSITION_BINS = 24
_EDGES = np.concatenate([[0], 1 << np.arange(POSITION_BINS - 1)])
TURN_BINS = 24  # one per turn; the last one also holds all later turns
_QUANTITIES = {"abs_d_mean": POSITIVE, "tv_binary_mean": POSITIVE, "d_mean": CANCELLING}


class ResponseProfile(Accumulator):
    """Mean |d|, binary TV and signed d by distance from the beginning and end of the response, and
    by turn.

    Distances count every token of the response, including those outside the loss mask. A turn is a
    run of tokens in the loss mask. Sums by prompt group, float64: [2 directions, groups, bins, 5
    (Σ|d|, Σ|Δp|, Σd, tokens, tokens in support)] and [groups, turns, 6 (the same, number of
    turns)]. `longest`: tokens of the longest response, where the last bin ends.
    """

    LARGEST = ("longest",)

    def __init__(self) -> None:
        self.longest = 0
        self.by_distance = np.zeros((2, GROUPS, POSITION_BINS, 5))
        self.by_turn = np.zeros((GROUPS, TURN_BINS, 6))

    def update(self, gaps: TokenGaps) -> None:
        self.longest = max(self.longest, longest_response(gaps))
        pieces = _cut_at(gaps.later_turns, _cut_counted(gaps))
        group = gaps.group_S[pieces.response]
        sums = _piece_sums(gaps, pieces.starts)
        _add(self.by_distance[0], group, pieces.from_start, sums)
        _add(self.by_distance[1], group, pieces.from_end, sums)
        # The pieces of a turn are neighbours, so a turn begins where response or turn changes.
        turn = _turns(gaps, pieces)
        begin = np.flatnonzero(np.diff(pieces.response, prepend=-1) | np.diff(turn, prepend=-1))
        turn_sums = np.add.reduceat(sums, begin, axis=0)
        turn_sums = np.column_stack([turn_sums, turn_sums[:, 3] > 0])
        _add(self.by_turn, group[begin], np.minimum(turn[begin], TURN_BINS - 1), turn_sums)

    def positions(self, prompts: int) -> list[ProfileRow]:
        """The gap by distance from the first token."""
        return self._by_distance(0, prompts)

    def from_end(self, prompts: int) -> list[ProfileRow]:
        """The gap by distance from the last token."""
        return self._by_distance(1, prompts)

    def _by_distance(self, end: int, prompts: int) -> list[ProfileRow]:
        bounds = partial(bin_bounds, longest=self.longest)
        return _rows(self.by_distance[end], _means, bounds, _QUANTITIES, prompts)

    def turns(self, prompts: int) -> list[ProfileRow]:
        """The gap by turn, the length of a turn, and how many there are."""
        turns_B = self.by_turn[..., 5].sum(axis=0).astype(int).tolist()
        scales = _QUANTITIES | {"length_mean": POSITIVE}
        rows = _rows(self.by_turn, _means_and_length, turn_bounds, scales, prompts)
        return [replace(row, turns=turns_B[row.first - 1]) for row in rows]


def _add(cells_GBx: np.ndarray, group: np.ndarray, bin_: np.ndarray, sums: np.ndarray) -> None:
    """Add rows of sums to the cells of their groups and bins."""
    _, bins, width = cells_GBx.shape
    # `np.add.at` has a fast path for one flat index, not for pairs of them.
    index = ((group * bins + bin_) * width)[:, None] + np.arange(width)
    np.add.at(cells_GBx.reshape(-1), index.reshape(-1), sums.reshape(-1))


def position_cells(gaps: TokenGaps) -> np.ndarray:
    """Prompt group × POSITION_BINS + bin of the distance from the beginning, for each counted
    token: int32.
    """
    pieces = _cut_counted(gaps)
    first_cell = gaps.group_S[pieces.response] * POSITION_BINS
    cell = (first_cell + pieces.from_start).astype(np.int32)
    return np.repeat(cell, np.diff(gaps.counted_before(pieces.starts)))


class Pieces(NamedTuple):
    """Responses cut into pieces, each within one distance bin from either end."""

    starts: np.ndarray  # of each piece, then the end of the last one
    response: np.ndarray
    from_start: np.ndarray  # bin of the distance from the first token
    from_end: np.ndarray  # bin of the distance from the last token


def cut_by_position(offset_S1: np.ndarray) -> Pieces:
    """Cut responses where a distance bin begins."""
    length_S = np.diff(offset_S1)
    reaching = length_S[:, None] > _EDGES  # [S, bins]
    from_start = (offset_S1[:-1, None] + _EDGES)[reaching]
    # A bin from the end begins where the next closer one ends.
    from_end = (offset_S1[1:, None] - _EDGES)[reaching]
    starts = np.sort(np.concatenate([from_start, from_end, offset_S1]))
    starts = starts[np.diff(starts, prepend=-1) > 0]
    response = np.searchsorted(offset_S1, starts[:-1], side="right") - 1
    first = starts[:-1] - offset_S1[response]
    last = offset_S1[response + 1] - starts[1:]
    return Pieces(starts, response, position_bin(first), position_bin(last))


def _cut_counted(gaps: TokenGaps) -> Pieces:
    """The responses with counted tokens, cut by position; anything between two of them belongs to
    a piece's end.
    """
    counting = np.flatnonzero(gaps.responses.length_S)
    length_S = np.diff(gaps.response_offset_S1)
    # As if these responses were all there are, then moved to where they are in the slice.
    offset_S1 = np.concatenate([[0], np.cumsum(length_S[counting])])
    pieces = cut_by_position(offset_S1)
    moved_S = gaps.response_offset_S1[counting] - offset_S1[:-1]
    pieces.starts[:-1] += moved_S[pieces.response]
    pieces.starts[-1] = gaps.response_offset_S1[-1]
    return pieces._replace(response=counting[pieces.response])


def _cut_at(positions: np.ndarray, pieces: Pieces) -> Pieces:
    """The pieces, cut again at some positions of the slice."""
    if not len(positions):
        return pieces
    starts, *columns = pieces
    positions = np.setdiff1d(positions, starts, assume_unique=True)
    piece = np.searchsorted(starts, positions) - 1
    inside = (piece >= 0) & (piece < len(starts) - 1)
    positions, piece = positions[inside], piece[inside]
    # Each new piece has the response and bins of the piece that it is cut from.
    cut = (np.insert(column, piece + 1, column[piece]) for column in columns)
    return Pieces(np.insert(starts, piece + 1, positions), *cut)


def _piece_sums(gaps: TokenGaps, starts: np.ndarray) -> np.ndarray:
    """[pieces, 5]: Σ|d|, Σ|Δp|, Σd, tokens, tokens in support."""
    tokens = Segments(gaps.counted_before(starts))
    sums = np.empty((len(starts) - 1, 5))
    sums[:, 0] = tokens.sum(gaps.abs_d_N)
    sums[:, 1] = tokens.sum(gaps.abs_dp_N)
    sums[:, 2] = tokens.sum(gaps.d_N)
    sums[:, 3] = sums[:, 4] = tokens.length_S
    if gaps.out_of_support_N is not None:
        sums[:, 4] -= tokens.sum(gaps.out_of_support_N)
    return sums


def _turns(gaps: TokenGaps, pieces: Pieces) -> np.ndarray:
    """How many turns of its response precede each piece's turn."""
    before_piece = np.searchsorted(gaps.later_turns, pieces.starts[:-1], side="right")
    begin = gaps.response_offset_S1[pieces.response]
    return before_piece - np.searchsorted(gaps.later_turns, begin)


def position_bin(distance: np.ndarray) -> np.ndarray:
    """The bin of a distance in tokens, the exponent of its float32; `bin_bounds` is the inverse."""
    exponent = (distance.astype(np.float32).view(np.int32) >> np.int32(23)) - np.int32(126)
    return np.clip(exponent, 0, POSITION_BINS - 1, out=exponent)


def bin_bounds(position_bin: int, longest: int) -> tuple[int, int]:
    """The first and last distance of a bin, none beyond the longest response's."""
    if position_bin == 0:
        return 0, 0
    first = int(_EDGES[position_bin])
    return first, min(2 * first - 1, longest - 1)


def longest_response(gaps: TokenGaps) -> int:
    """Tokens of the longest response that has counted ones."""
    length_S = np.diff(gaps.response_offset_S1)
    return int(length_S[gaps.responses.length_S > 0].max(initial=0))


def turn_bounds(turn_bin: int) -> tuple[int, int | None]:
    """The first and last turn of a bin, from 1; the last bin has no end."""
    turn = turn_bin + 1
    return turn, turn if turn < TURN_BINS else None


def _rows(
    sums_GBx: np.ndarray,
    evaluate: Callable[[np.ndarray], np.ndarray],
    bounds: Callable[[int], tuple[int, int | None]],
    scales: Mapping[str, Scale],
    prompts: int,
) -> list[ProfileRow]:
    """A row for each bin with tokens; column 3 of the sums is their number."""
    return [
        ProfileRow(*bounds(b), count, **estimates)  # type: ignore[arg-type]
        for b, count, estimates in _bins(sums_GBx, evaluate, 3, scales, prompts)
    ]


def _bins(
    sums_GBx: np.ndarray,
    evaluate: Callable[[np.ndarray], np.ndarray],
    count: int,
    scales: Mapping[str, Scale],
    prompts: int,
) -> Iterator[tuple[int, int, dict[str, Estimate]]]:
    """Each nonempty bin with its count, a column of the sums, and the result of `evaluate` on
    these scales.
    """
    value_Bx, without_GBx = without_groups(evaluate, sums_GBx)
    count_GB = sums_GBx[:, :, count]
    without_GBx = jackknife_values(without_GBx, count_GB[:, :, None] > 0)
    total_B = count_GB.sum(axis=0)
    for b in np.flatnonzero(total_B).tolist():
        estimates = {}
        for quantity, (name, scale) in enumerate(scales.items()):
            value, without_G = value_Bx[b, quantity], without_GBx[:, b, quantity]
            estimates[name] = interval(value, without_G, prompts, scale)
        yield b, int(total_B[b]), estimates


def _means(sums_x5: np.ndarray) -> np.ndarray:
    return sums_x5[..., :3] / sums_x5[..., [4, 3, 4]]


def _means_and_length(sums_x6: np.ndarray) -> np.ndarray:
    return np.concatenate([_means(sums_x6), sums_x6[..., 3:4] / sums_x6[..., 5:]], axis=-1)


_BINS = 32  # bin b holds lengths 2^(b−1) … 2^b − 1


class LengthProfile(Accumulator):
    """The mean and standard deviation of Σd over the sequences in each octave of length.

    Sums by prompt group, float64: [groups, bins, 3 (sequences, Σ Σd, Σ (Σd)²)].
    """

    def __init__(self) -> None:
        self.sums = np.zeros((GROUPS, _BINS, 3))

    def update(self, group_S: np.ndarray, length_S: np.ndarray, d_S: np.ndarray) -> None:
        """Add the number of tokens with a d, and Σd over them; a response without any is not a
        sequence.
        """
        bin_S = np.frexp(length_S.astype(np.float64))[1]
        np.add.at(self.sums, (group_S, bin_S), np.stack([length_S > 0, d_S, d_S * d_S], axis=1))

    def result(self, prompts: int) -> list[LengthRow]:
        return [
            LengthRow(2 ** (b - 1), 2**b - 1, count, **estimates)
            for b, count, estimates in _bins(self.sums, _mean_and_sd, 0, _MOMENTS, prompts)
        ]


_MOMENTS = {"d_sum_mean": CANCELLING, "d_sum_sd": POSITIVE}


def _mean_and_sd(sums_x3: np.ndarray) -> np.ndarray:
    count, first, second = np.moveaxis(sums_x3, -1, 0)
    deviation = np.where(count > 1, standard_deviation(first, second, count), np.nan)
    return np.stack([first / count, deviation], axis=-1)


_KEYS = (
    "d_max",
    "d_min",
    "tv_signed_max",
    "tv_signed_min",
    "kl_binary_max",
    "tv_topk_max",
    "kl_topk_max",
)


class Extremes(Accumulator):
    """Extremes of d and Δp and maxima of the divergences, kept as largest values of ± the
    quantity.
    """

    LARGEST = ("largest",)

    def __init__(self) -> None:
        self.largest = np.full(len(_KEYS), -np.inf)
        self.out_of_support = 0

    def update(self, gaps: TokenGaps) -> None:
        if not len(gaps.logq_N):
            return
        # The neutral 0 of d out of support must not become its minimum or maximum.
        d_N = gaps.d_N
        if gaps.out_of_support_N is not None:
            self.out_of_support += int(gaps.out_of_support_N.sum())
            d_N = d_N[~gaps.out_of_support_N]
        largest = dict.fromkeys(_KEYS, -np.inf)
        if len(d_N):
            largest["d_max"], largest["d_min"] = d_N.max(), -d_N.min()
        largest["tv_signed_max"], largest["tv_signed_min"] = gaps.dp_N.max(), -gaps.dp_N.min()
        largest["kl_binary_max"] = gaps.binary_kl_N.max()
        topk = gaps.topk
        if topk is not None:
            largest["tv_topk_max"] = largest_of(topk.tv_N, topk.tv_counts_N)
            largest["kl_topk_max"] = largest_of(topk.kl_N, topk.kl_counts_N)
        np.maximum(self.largest, list(largest.values()), out=self.largest)

    def result(self) -> dict[str, Estimate]:
        values = dict(zip(_KEYS, self.largest.tolist(), strict=True))
        d_max, d_min = values.pop("d_max"), -values.pop("d_min")
        dp_max, dp_min = values["tv_signed_max"], -values["tv_signed_min"]
        ratio_min = ratio_max = np.nan
        if dp_max > -np.inf:  # there was a token
            with np.errstate(over="ignore"):
                ratio_min, ratio_max = float(np.exp(d_min)), float(np.exp(d_max))
        values |= {
            "abs_d_max": max(d_max, -d_min),
            "tv_binary_max": max(dp_max, -dp_min),
            "tv_signed_min": dp_min,
            "ratio_min": 0.0 if self.out_of_support else ratio_min,
            "ratio_max": ratio_max,
        }
        return {
            key: point_estimate(np.nan if value == -np.inf else value, EXTREME)
            for key, value in values.items()
        }


def largest_of(values_N: np.ndarray, counts_N: np.ndarray | None) -> float:
    """The largest counted value, −∞ if no value counts; without `counts_N` all do."""
    return float(flagged(values_N, counts_N).max(initial=-np.inf))
