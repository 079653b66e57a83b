"""The gap along a response, by position, turn and length, and the extremes over all tokens."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from mismatch_cli.base.arrays import Segments
from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import (
    EXTREME,
    POSITIVE,
    SIGNED,
    Estimate,
    Scale,
    interval,
    jackknife_values,
    point_estimate,
    without_groups,
)
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.pair_summary import LengthRow, ProfileRow

# bin b ≥ 1 holds distances 2^(b−1) … 2^b − 1; bin 0 only the first (or last) token
POSITION_BINS = 24
_EDGES = np.concatenate([[0], 1 << np.arange(POSITION_BINS - 1)])
TURN_BINS = 24  # one per turn; the last one also holds all later turns
_QUANTITIES = {"abs_d_mean": POSITIVE, "tv_binary_mean": POSITIVE, "d_mean": SIGNED}


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
        starts, response, *distances = _cut_at(gaps.later_turns, _cut_counted(gaps))
        pieces, group = Segments(gaps.counted_before(starts)), gaps.group_S[response]
        sums = np.empty((len(group), 5))
        for column, values_N in enumerate((gaps.abs_d_N, gaps.abs_dp_N, gaps.d_N)):
            sums[:, column] = pieces.sum(values_N)
        sums[:, 3] = sums[:, 4] = pieces.length_S
        if gaps.out_of_support_N is not None:
            sums[:, 4] -= pieces.sum(gaps.out_of_support_N)
        for cells, bin_ in zip(self.by_distance, distances, strict=True):
            _add(cells, group, bin_, sums)
        turn = _turns(gaps, starts[:-1], response)
        begin = np.flatnonzero(np.diff(response, prepend=-1) | np.diff(turn, prepend=-1))
        sums = np.add.reduceat(sums, begin, axis=0)
        sums = np.column_stack([sums, sums[:, 3] > 0])
        _add(self.by_turn, group[begin], np.minimum(turn[begin], TURN_BINS - 1), sums)

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
    place = ((group * bins + bin_) * width)[:, None] + np.arange(width)
    np.add.at(cells_GBx.reshape(-1), place.reshape(-1), sums.reshape(-1))


def position_cells(gaps: TokenGaps) -> np.ndarray:
    """Prompt group × POSITION_BINS + bin of the distance from the beginning, for each counted
    token: int32.
    """
    starts, response, from_start, _ = _cut_counted(gaps)
    cell = (gaps.group_S[response] * POSITION_BINS + from_start).astype(np.int32)
    return np.repeat(cell, np.diff(gaps.counted_before(starts)))


def _cut_counted(gaps: TokenGaps) -> tuple[np.ndarray, ...]:
    """`cut_by_position` of the responses with counted tokens; anything between two of them
    belongs to a piece's end.
    """
    counting = np.flatnonzero(gaps.responses.length_S)
    begin_S, length_S = gaps.response_offset_S1[:-1], np.diff(gaps.response_offset_S1)
    offset_S1 = np.concatenate([[0], np.cumsum(length_S[counting])])
    starts, response, *bins = cut_by_position(offset_S1)
    moved_S = begin_S[counting] - offset_S1[:-1]
    starts[:-1] += moved_S[response]
    starts[-1] = gaps.response_offset_S1[-1]
    return starts, counting[response], *bins


def _cut_at(places: np.ndarray, cut: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Pieces from `_cut_counted`, cut again at some places of the slice."""
    if not len(places):
        return cut
    starts, *facts = cut
    places = np.setdiff1d(places, starts, assume_unique=True)
    piece = np.searchsorted(starts, places) - 1
    inside = (piece >= 0) & (piece < len(starts) - 1)
    places, piece = places[inside], piece[inside]
    return np.insert(starts, piece + 1, places), *(
        np.insert(fact, piece + 1, fact[piece]) for fact in facts
    )


def _turns(gaps: TokenGaps, begin: np.ndarray, response: np.ndarray) -> np.ndarray:
    """How many turns of its response precede each piece's turn, from where the piece begins."""
    later = gaps.later_turns
    return np.searchsorted(later, begin, side="right") - np.searchsorted(
        later, gaps.response_offset_S1[response]
    )


def cut_by_position(offset_S1: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cut responses where a distance bin begins: the starts (and the last end), and each piece's
    response and bins.
    """
    length_S = np.diff(offset_S1)
    reaching = length_S[:, None] > _EDGES  # [S, bins]
    from_start = (offset_S1[:-1, None] + _EDGES)[reaching]
    # A bin from the end begins where the next closer one ends
    from_end = (offset_S1[1:, None] - _EDGES)[reaching]
    starts = np.sort(np.concatenate([from_start, from_end, offset_S1]))
    starts = starts[np.diff(starts, prepend=-1) > 0]
    begin = starts[:-1]
    response = np.searchsorted(offset_S1, begin, side="right") - 1
    first, last = begin - offset_S1[response], offset_S1[response + 1] - starts[1:]
    return starts, response, position_bin(first), position_bin(last)


def position_bin(distance: np.ndarray) -> np.ndarray:
    """The bin of a distance in tokens, the exponent of its float32; `bin_bounds` is the inverse."""
    exponent = (distance.astype(np.float32).view(np.int32) >> np.int32(23)) - np.int32(126)
    return np.clip(exponent, 0, POSITION_BINS - 1, out=exponent)


def bin_bounds(position_bin: int, longest: int) -> tuple[int, int]:
    """The first and last distance of a bin, none beyond the longest response's."""
    first = int(_EDGES[position_bin])
    return first, min(2 * first - 1, longest - 1) if first else 0


def longest_response(gaps: TokenGaps) -> int:
    """Tokens of the longest response that has counted ones."""
    length_S = np.diff(gaps.response_offset_S1)
    return int(length_S[gaps.responses.length_S > 0].max(initial=0))


def turn_bounds(turn_bin: int) -> tuple[int, int | None]:
    """The first and last turn of a bin, from 1; the last bin has no end."""
    return turn_bin + 1, turn_bin + 1 if turn_bin < TURN_BINS - 1 else None


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
    without_GBx, total_B = (
        jackknife_values(without_GBx, count_GB[:, :, None] > 0),
        count_GB.sum(axis=0),
    )
    for b in np.flatnonzero(total_B).tolist():
        made = zip(scales.items(), value_Bx[b], without_GBx[:, b].T, strict=True)
        row = {
            name: interval(value, without_G, prompts, scale)
            for (name, scale), value, without_G in made
        }
        yield b, int(total_B[b]), row


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


_MOMENTS = {"d_sum_mean": SIGNED, "d_sum_sd": POSITIVE}


def _mean_and_sd(sums_x3: np.ndarray) -> np.ndarray:
    count, first, second = np.moveaxis(sums_x3, -1, 0)
    mean = first / count
    return np.stack(
        [mean, np.where(count > 1, np.sqrt(np.maximum(second / count - mean**2, 0)), np.nan)],
        axis=-1,
    )


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
        outside_N, d_N = gaps.out_of_support_N, gaps.d_N
        if outside_N is not None:
            self.out_of_support += int(outside_N.sum())
            d_N = d_N[~outside_N]
        d_max, d_min = (d_N.max(), -d_N.min()) if len(d_N) else (-np.inf, -np.inf)
        found = [
            d_max,
            d_min,
            gaps.dp_N.max(),
            -gaps.dp_N.min(),
            gaps.binary_kl_N.max(),
            -np.inf,
            -np.inf,
        ]
        if (topk := gaps.topk) is not None:
            found[5] = largest_of(topk.tv_N, topk.tv_counts_N)
            found[6] = largest_of(topk.kl_N, topk.kl_counts_N)
        np.maximum(self.largest, found, out=self.largest)

    def result(self) -> dict[str, Estimate]:
        values = dict(zip(_KEYS, self.largest.tolist(), strict=True))
        d_max, d_min, tv_min = values.pop("d_max"), -values.pop("d_min"), -values["tv_signed_min"]
        seen = values["tv_signed_max"] > -np.inf
        with np.errstate(over="ignore"):
            ratio_min, ratio_max = (float(np.exp(d)) if seen else np.nan for d in (d_min, d_max))
        values |= {
            "abs_d_max": max(d_max, -d_min),
            "tv_binary_max": max(values["tv_signed_max"], -tv_min),
            "tv_signed_min": tv_min,
            "ratio_min": 0.0 if self.out_of_support else ratio_min,
            "ratio_max": ratio_max,
        }
        return {
            name: point_estimate(np.nan if value == -np.inf else value, EXTREME)
            for name, value in values.items()
        }


def largest_of(values_N: np.ndarray, counts_N: np.ndarray | None) -> float:
    values_N = values_N if counts_N is None else values_N[counts_N]
    return float(values_N.max()) if len(values_N) else -np.inf
