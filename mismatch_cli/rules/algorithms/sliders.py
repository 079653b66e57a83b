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

_DOUBLINGS, _EACH = 4, 8  # doublings of a threshold in either direction, and positions in each
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
    moved = next((mask for mask in algorithm.masks if mask.ratio.current == "trainer"), None)
    movable = {} if moved is None else _movable(moved)
    if moved is None or not movable:
        return [(algorithm, movable)]
    letters = trust_regions.symbols(moved.module)
    place = algorithm.masks.index(moved)
    positions: list[Position] = []
    for step in range(-_DOUBLINGS * _EACH, _DOUBLINGS * _EACH + 1):
        if step == 0:
            positions.append(
                (algorithm, {letters.get(name, name): value for name, value in movable.items()})
            )
            continue
        thresholds = {
            name: _scaled(name, value, 2 ** (step / _EACH)) for name, value in movable.items()
        }
        mask = replace(moved, chosen=tuple({**dict(moved.chosen), **thresholds}.items()))
        if _is_accepted(mask):
            masks = (*algorithm.masks[:place], mask, *algorithm.masks[place + 1 :])
            named = {letters.get(name, name): value for name, value in thresholds.items()}
            positions.append((replace(algorithm, masks=masks), named))
    return positions


def _movable(mask: Mask) -> dict[str, float]:
    """The thresholds above 0 that limit how far a token moves; none for masks that look at whole
    batches.
    """
    if mask.scope is not None:
        return {}
    numbers = {name: value for name, value in mask.parameters.items() if isinstance(value, float)}
    return {name: value for name, value in numbers.items() if name not in _FIXED and value > 0}


def _scaled(name: str, value: float, factor: float) -> float:
    if name in _ABOUT_1:
        return float(f"{1 + float(f'{value**factor - 1:.3g}'):.9g}")
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
    return Policies(
        _NONE_T, _NONE_T, _NONE_T, np.zeros(1, dtype=np.int64), topk, _NONE_T, average=_NONE_T
    )
