"""GBPO: pulls the ratio to a target that follows from the advantage minus the group's median.

As in the authors' verl, the loss is |A| |r − ρ*| with ρ* = 1 − ε_low + (ε_low + ε_high) σ(z / λ),
where z is A minus the group's median A, and A itself only weighs. If advantages are divided by a
standard deviation, so is z. The median of a single answer counts as 0.

Source: GBPO, arXiv 2604.18578; loss |A| |r − ρ*|.
"""

from collections.abc import Sequence

import numpy as np

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = (
    "sign(A) sign(ρ* − {r}) {r} with ρ* = 1 − {ratio_low} + ({ratio_low} + {ratio_high}) "
    "σ((A − median A of the group) / {temperature})"
)
SYMBOLS = {"ratio_low": "ε_low", "ratio_high": "ε_high", "temperature": "λ"}
SCOPE = "group"


def collect(
    compared: Compared,
    advantage_T: Array,
    *,
    ratio_low: float = 0.3,
    ratio_high: float = 0.3,
    temperature: float = 1e-4,
) -> Array:
    """A at each response's first token; NaN at the others."""
    xp = namespace(advantage_T)
    first_T = compared.responses.position_T == 0
    return xp.where(first_T, advantage_T, xp.full_like(advantage_T, float("nan")))[:, None]


def settle(
    rows_UM: np.ndarray,
    *,
    ratio_low: float = 0.3,
    ratio_high: float = 0.3,
    temperature: float = 1e-4,
) -> Sequence[float]:
    """The median A of the group's responses; 0 for a single one, which has nothing to compare."""
    advantage_U = rows_UM[:, 0]
    advantage_S = advantage_U[~np.isnan(advantage_U)]  # only first tokens have one
    return [np.median(advantage_S) if len(advantage_S) > 1 else 0.0]


def weight(
    compared: Compared,
    level: Level,
    advantage_T: Array,
    settled_TF: Array,
    *,
    ratio_low: float = 0.3,
    ratio_high: float = 0.3,
    temperature: float = 1e-4,
) -> Array:
    """r with the sign that moves it to its target, times the sign of A, which cancels the one in
    the coefficient.
    """
    if not (0 <= ratio_low <= 1 and ratio_high >= 0 and temperature > 0):
        raise UsageError(
            "A threshold is out of range: choose ε_low from 0 to 1, ε_high ≥ 0 and λ > 0."
        )
    xp = namespace(advantage_T)
    # σ(x) − ½ = tanh(x / 2) / 2, which neither overflows nor cancels at x = 0
    half_T = xp.tanh((advantage_T - settled_TF[:, 0]) / (2 * temperature)) / 2
    target_less_1_T = (ratio_high - ratio_low) / 2 + (ratio_low + ratio_high) * half_T
    toward_T = xp.sign(target_less_1_T - compared.level_ratio_less_1_T(level))
    return xp.sign(advantage_T) * toward_T * compared.level_ratio_T(level)
