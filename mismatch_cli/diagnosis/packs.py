"""Responses that are packed into one row, and see those before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.diagnosis.model import Hypothesis, ModelAtHand
from mismatch_cli.diagnosis.sample import Sample

if TYPE_CHECKING:
    Left = Callable[[Hypothesis], float]

PACKS = (2, 3, 4, 6, 8, 16)  # responses
_HELPS = 1.0  # of the gap left: other sizes of packs are tried
_FAR = 0.5  # of the median gap of all responses


def after_neighbours(model: ModelAtHand, sample: Sample, left: Left) -> Iterator[Hypothesis]:
    """Responses after the one before them in the trace, and in packs: of the size at which the
    first response of each, and no other, is as recorded; else, if the former helps, of all sizes.

    `left`: the share of the gap that undoing a hypothesis leaves.
    """
    gap_S = _gaps(sample)
    # Those that are as recorded may be the first of their packs
    far = [s for s in model.rows if gap_S[s] > _FAR * np.median(gap_S[model.rows])]
    later = tuple(s for s in far if model.place_S[s] > 0)
    if not later:
        return
    one = Hypothesis("each response after the one before it", before=lambda _: 1, rows=later)
    yield one
    sizes = [size for size in PACKS if _is_pack(size, model, far)]
    for size in sizes or (PACKS if left(one) < _HELPS else ()):
        own = tuple(s for s in later if model.place_S[s] % size)
        yield Hypothesis(f"packs of {size}", before=partial(_within, size), rows=own)


def _within(size: int, place: int) -> int:
    return place % size


def _is_pack(size: int, model: ModelAtHand, far: Iterable[int]) -> bool:
    """Whether exactly the first response of every pack is not far."""
    firsts = {s for s in model.rows if model.place_S[s] % size == 0}
    return firsts == set(model.rows) - set(far)


def _gaps(sample: Sample) -> np.ndarray:
    """The mean |d| of each response over its tokens that count, nats; 0 without any."""
    response_N = sample.response_N
    sums = (np.bincount(response_N, w, sample.num_responses) for w in (np.abs(sample.d_N), None))
    gap_S, count_S = sums
    return np.divide(gap_S, count_S, out=np.zeros(sample.num_responses), where=count_S > 0)
