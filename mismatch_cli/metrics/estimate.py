"""A number with its interval, and the two ways of getting one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

FEWEST_PROMPTS = 10  # below, an interval over prompts would be a guess
FLOOR_RESOLUTION = 1e-7
_ROUNDING = 1e-12  # relative: a spread below it comes from the order of additions
BELOW_RESOLUTION = "below resolution"

EXTREME = "an extreme: no interval"
FEW_PROMPTS = f"fewer than {FEWEST_PROMPTS} prompts, or groups of them: no interval"
NO_SPREAD = "the same for all prompts: no interval"  # resampling cannot say how rare the unseen is
NOT_MEASURED = "not measured"
OVERFLOW = "larger than a float can hold"


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval over prompts; `note` says why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "note": self.note}


@dataclass(frozen=True)
class Replicates:
    """A value, and what it would be for other prompts: what its interval is made of.

    `other_R` holds bootstrap replicates, or (`deleted`) the value without each of the 32 groups of prompts, NaN for a
    group that holds nothing. Replicate r of two traces gives a prompt that both hold the same weight, so that the
    differences of replicates are replicates of the difference.
    """

    value: float
    other_R: np.ndarray
    deleted: bool = False

    def estimate(self, prompts: int) -> Estimate:
        """The value with its 95 % interval."""
        interval = jackknife_interval if self.deleted else percentile_interval
        return interval(self.value, self.other_R, prompts)


def clamped(estimate: Estimate, lowest: float | None, highest: float | None) -> Estimate:
    """A quantile from a histogram, held within the extremes, which are exact."""
    low, high = -inf if lowest is None else lowest, inf if highest is None else highest
    value, lower, upper = (
        None if x is None else min(max(x, low), high) for x in (estimate.value, estimate.low, estimate.high)
    )
    return Estimate(value, lower, upper, estimate.note)


def point(value: float, note: str | None = None) -> Estimate:
    """An estimate without interval; a value that is no finite number becomes None with a note."""
    value = float(value)
    if isfinite(value):
        return Estimate(value, note=note)
    return Estimate(None, note=OVERFLOW if value == float("inf") else NOT_MEASURED)


def finite_or_none(value: float) -> float | None:
    """The value as JSON can hold it."""
    return None if isinstance(value, float) and not isfinite(value) else value


def percentile_interval(value: float, replicate_B: np.ndarray, prompts: int) -> Estimate:
    """The 2.5 to 97.5 % range of bootstrap replicates."""
    if not isfinite(value) or prompts < FEWEST_PROMPTS:
        return point(value, FEW_PROMPTS)
    usable = replicate_B[np.isfinite(replicate_B)]
    if len(usable) < max(1, len(replicate_B) / 2):
        return point(value, "too few replicates have a value: no interval")
    low, high = np.percentile(usable, [2.5, 97.5])
    if high - low <= _ROUNDING * abs(value):
        return point(value, NO_SPREAD)
    return Estimate(float(value), float(low), float(high))


def jackknife_error(without_G: np.ndarray) -> float:
    """The standard error of a value, from the value with one group of prompts deleted at a time."""
    return float(np.sqrt((len(without_G) - 1) * np.mean((without_G - without_G.mean()) ** 2)))


def jackknife_interval(value: float, without_G: np.ndarray, prompts: int) -> Estimate:
    """value ± t · standard error, from the value with one group of prompts deleted at a time."""
    usable = without_G[np.isfinite(without_G)]
    if not isfinite(value) or min(prompts, len(usable)) < FEWEST_PROMPTS:
        return point(value, FEW_PROMPTS)
    error = jackknife_error(usable)
    if error <= _ROUNDING * abs(value):
        return point(value, NO_SPREAD)
    half_width = student_t(len(usable) - 1) * error
    return Estimate(float(value), float(value - half_width), float(value + half_width))


def student_t(degrees: int) -> float:
    """97.5 % point of Student's t, by its expansion in 1/degrees: 0.2 % off at 9 degrees, less beyond."""
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def times_floor(value: float | None, floor: float | None) -> float | str | None:
    """value / floor, the factor above the trainer's own noise; a floor below 1e-7 answers "below resolution"."""
    if value is None or floor is None:
        return None
    if abs(floor) < FLOOR_RESOLUTION:
        return BELOW_RESOLUTION
    return value / floor
