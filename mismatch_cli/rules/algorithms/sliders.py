"""The positions of a slider: an algorithm with different thresholds, from strict to loose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Mask
from mismatch_cli.rules.policies import Policies, TopKLogProbs

_DOUBLINGS = 4  # of a threshold, in either direction
_PER_DOUBLING = 8  # positions
# These select and weight tokens, and do not limit how far they move
_FIXED = ("alpha", "least_weight")
_ABOUT_1 = ("band_low", "band_high", "max_ratio")  # ratios: equal policies are at 1
_NONE_T = np.zeros(0, dtype=np.float32)

Position = tuple[Algorithm, Mapping[str, float]]  # thresholds by letter, if they have one


def slider_positions(algorithm: Algorithm) -> list[Position]:
    """The algorithm with its thresholds times 1/16 … 16, itself included, and the thresholds of
    each.

    Bounds on a ratio are raised to that power. Thresholds have three digits, so that they are easy
    to type. Only the first mask that limits the trainer moves; values that it refuses are left out.
    """
    limiting = algorithm.limiting.masks
    movable = _movable(limiting[0]) if limiting else {}
    if not movable:
        return [(algorithm, {})]
    mask = limiting[0]
    index = algorithm.masks.index(mask)
    positions: list[Position] = []
    for step in range(-_DOUBLINGS * _PER_DOUBLING, _DOUBLINGS * _PER_DOUBLING + 1):
        # Rounding would change the published thresholds, so they are not scaled by 1
        if step == 0:
            positions.append((algorithm, _by_letter(mask, movable)))
            continue
        factor = 2 ** (step / _PER_DOUBLING)
        thresholds = {name: _scaled(name, value, factor) for name, value in movable.items()}
        moved = replace(mask, chosen=tuple((dict(mask.chosen) | thresholds).items()))
        if _is_accepted(moved):
            masks = (*algorithm.masks[:index], moved, *algorithm.masks[index + 1 :])
            positions.append((replace(algorithm, masks=masks), _by_letter(mask, thresholds)))
    return positions


def _by_letter(mask: Mask, thresholds: Mapping[str, float]) -> dict[str, float]:
    letters = trust_regions.symbols(mask.module)
    return {letters.get(name, name): value for name, value in thresholds.items()}


def _movable(mask: Mask) -> dict[str, float]:
    """The thresholds above 0 that limit how far a token moves; none for masks that look at whole
    batches.
    """
    if mask.scope is not None:
        return {}
    movable = {}
    for name, value in mask.parameters.items():
        if isinstance(value, float) and value > 0 and name not in _FIXED:
            movable[name] = value
    return movable


def _scaled(name: str, value: float, factor: float) -> float:
    if name in _ABOUT_1:
        # Three digits of the distance from 1, so that strict bounds such as 1.0003 stay apart
        distance = float(f"{value**factor - 1:.3g}")
        return float(f"{1 + distance:.9g}")
    return float(f"{value * factor:.3g}")


def _is_accepted(mask: Mask) -> bool:
    """Whether the mask accepts these thresholds, tested without tokens."""
    try:
        mask.decide(_no_token(int(mask.parameters.get("k", 0))), _NONE_T)
    except MismatchError:
        return False
    return True


@cache
def _no_token(k: int) -> Policies:
    none_TK = np.zeros((0, k), dtype=np.float32)
    topk = TopKLogProbs(_NONE_T, none_TK, none_TK, none_TK, none_TK)
    offset_S1 = np.zeros(1, dtype=np.int64)
    return Policies(_NONE_T, _NONE_T, _NONE_T, offset_S1, topk, _NONE_T, average=_NONE_T)
