"""Importance sampling: the ratio, clamped without a gradient through the bounds.

Source: TIS, CISPO.
"""

from collections.abc import Mapping
from math import inf

from mismatch_cli.base.arrays import Array, clamp
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

SYMBOLS = {"cap": "C"}


def formula(parameters: Mapping[str, float]) -> str:
    """`r`, `min(r, C)` or `max(min(r, C), floor)`, with their values."""
    text = "{r}" if parameters["cap"] == inf else f"min({{r}}, {parameters['cap']:g})"
    return f"max({text}, {parameters['floor']:g})" if parameters["floor"] else text


def weight(
    compared: Compared, level: Level, advantage_T: Array, *, floor: float = 0.0, cap: float = inf
) -> Array:
    """max(min(r, cap), floor)."""
    if not 0 <= floor <= cap or cap == 0:
        raise UsageError(
            f"floor={floor:g}, cap={cap:g} is out of range: choose 0 ≤ floor ≤ cap, and cap > 0."
        )
    ratio_T = compared.level_ratio_T(level)
    if floor == 0 and cap == inf:
        return ratio_T
    return clamp(ratio_T, floor, cap)
