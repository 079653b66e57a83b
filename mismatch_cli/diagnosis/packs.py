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
    responses, place_of = model.responses, model.place_of
    gap_S = _gaps(sample)
    least = _FAR * np.median(gap_S[responses])
    # Responses that are as recorded may be the first of their packs
    far = [s for s in responses if gap_S[s] > least]
    later = tuple(s for s in far if place_of[s] > 0)
    if not later:
        return
    neighbour = "each response after the one before it"
    after_one = Hypothesis(neighbour, before=lambda _: 1, responses=later)
    yield after_one
    sizes = [size for size in PACKS if _is_pack(size, model, far)]
    if not sizes and left(after_one) < _HELPS:
        sizes = list(PACKS)
    for size in sizes:
        inner = tuple(s for s in later if place_of[s] % size)
        yield Hypothesis(f"packs of {size}", before=partial(_place_in_pack, size), responses=inner)


def _place_in_pack(size: int, place: int) -> int:
    return place % size


def _is_pack(size: int, model: ModelAtHand, far: Iterable[int]) -> bool:
    """Whether exactly the first response of every pack is not far."""
    firsts = {s for s in model.responses if model.place_of[s] % size == 0}
    return firsts == set(model.responses) - set(far)


def _gaps(sample: Sample) -> np.ndarray:
    """The mean |d| of each response over its tokens that count, nats; 0 without any."""
    response_N, responses = sample.response_N, sample.num_responses
    sum_S = np.bincount(response_N, np.abs(sample.d_N), responses)
    count_S = np.bincount(response_N, minlength=responses)
    return np.divide(sum_S, count_S, out=np.zeros(responses), where=count_S > 0)
