"""A number with its interval, or with the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

FEWEST_PROMPTS = 10  # below, an interval over prompts would be a guess
FEWEST_GROUPS = 8  # of prompts: of ten prompts two or three may share one
FLOOR_RESOLUTION = 1e-7
BELOW_RESOLUTION = "below resolution"

EXTREME = "an extreme: no interval"
FEW_PROMPTS = f"fewer than {FEWEST_PROMPTS} prompts, or groups of them: no interval"
FEW_DECIDE = "a few prompts decide it: no interval"
NO_SPREAD = "the same for all prompts: no interval"  # nothing says how rare the unseen is
LARGEST_WEIGHTS = "a few responses decide it: no interval"
FEWEST_BEYOND = 150  # tokens beyond a quantile
FEW_BEYOND = f"fewer than {FEWEST_BEYOND} tokens beyond it: no interval"
FEWEST_TOKENS = 1000  # in a bin of μ
FEW_TOKENS = f"fewer than {FEWEST_TOKENS:,} tokens: no interval"
FEW_TOKENS_DECIDE = "a few tokens decide it: no interval"
CROWDED = "most ratios crowd at 1: no interval"  # how densely decides, and differs from trace to trace
FEW_AT_EDGE = "the few tokens near it decide it: no interval"
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


def student_t(degrees: float) -> float:
    """97.5 % point of Student's t, by its expansion in 1/degrees: 0.3 % off at 4 degrees, less beyond."""
    z = 1.959964
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def times_floor(value: float | None, floor: float | None) -> float | str | None:
    """value / floor, the factor above the trainer's own noise; a floor below 1e-7 answers "below resolution"."""
    if value is None or floor is None:
        return None
    if abs(floor) < FLOOR_RESOLUTION:
        return BELOW_RESOLUTION
    return value / floor
