"""A number with its interval, or with the reason for not having one.

Every interval over prompts comes from leaving out one group of prompts at a time, and allows for
skewness. A few prompts carry much of a gap, so a mean and its error rise together, and value ± t ·
error ends too low more often than too high. Four things correct that: a scale on which the value
is least skewed, a correction of Student's t for the remaining skewness (Hall 1992, On the removal
of skewness by transformation), fewer degrees of freedom if a few groups dominate the error, and an
error that is larger by G / (G − 1), as G groups are few. An interval is never withheld because few
prompts decide it, as those are the traces with the larger values; the note says that they do.
lab/interval_coverage.py measures the resulting coverage.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TypeVar

import numpy as np

FEWEST_PROMPTS = 10  # with fewer, an interval over prompts would be a guess
FEWEST_GROUPS = 8  # of prompts: two or three of ten prompts may share one
FEWEST_PAIRED = 4  # prompts, or groups of them, for the difference of two means on the same tokens
FLOOR_RESOLUTION = 1e-7
BELOW_RESOLUTION = "below resolution"

EXTREME = "an extreme: no interval"
FEW_PROMPTS = f"fewer than {FEWEST_PROMPTS} prompts, or groups of them: no interval"
FEW_DECIDE = "a few prompts decide it"
ONE_HAS_ALL = "one group of prompts has all of it: no interval"
NO_SPREAD = "the same for all prompts: no interval"  # it is unknown how rare unseen values are
LARGEST_WEIGHTS = "a few responses decide it: no interval"
FEWEST_BEYOND = 150  # tokens beyond a quantile
FEW_BEYOND = f"fewer than {FEWEST_BEYOND} tokens beyond it: no interval"
FEWEST_TOKENS = 1000  # in a bin of μ
FEW_TOKENS = f"fewer than {FEWEST_TOKENS:,} tokens: no interval"
FEW_TOKENS_DECIDE = "a few tokens decide it: no interval"
# The density of ratios around their median decides, and it differs from trace to trace.
CROWDED = "most ratios crowd at 1: no interval"
FEW_AT_EDGE = "the few tokens near it decide it: no interval"
NOT_MEASURED = "not measured"
OVERFLOW = "larger than a float can hold"


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval over prompts; `note` says why an interval is missing, or
    what to know of it.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str | None = None


def clamped(estimate: Estimate, lowest: float | None, highest: float | None) -> Estimate:
    """A quantile from a histogram, clamped to the exact extremes."""
    lowest = -inf if lowest is None else lowest
    highest = inf if highest is None else highest

    def clamp(number: float | None) -> float | None:
        return None if number is None else min(max(number, lowest), highest)

    value, low, high = map(clamp, (estimate.value, estimate.low, estimate.high))
    return Estimate(value, low, high, estimate.note)


def point_estimate(value: float, note: str | None = None) -> Estimate:
    """An estimate without an interval; a value that is not finite becomes None with a note."""
    value = float(value)
    if isfinite(value):
        return Estimate(value, note=note)
    return Estimate(None, note=OVERFLOW if value == inf else NOT_MEASURED)


def finite_or_none(value: float) -> float | None:
    """The value in a form that JSON can hold."""
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def student_t(degrees: float) -> float:
    """The 97.5 % point of Student's t, by its expansion in 1/degrees: 0.3 % off at 4 degrees,
    less beyond.
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def times_floor(value: float | None, floor: float | None) -> float | str | None:
    """value / floor, the factor above the trainer's own noise; "below resolution" if the noise
    is below 1e-7.
    """
    if value is None or floor is None:
        return None
    if abs(floor) < FLOOR_RESOLUTION:
        return BELOW_RESOLUTION
    return value / floor


_ROUNDING = 1e-12  # relative: a smaller spread comes from the order of additions
_FEWEST_DECIDING = 5.0  # groups
_LEAST_DEGREES = 4.0
# More skewness of the error comes from a single group.
# Correcting all of it would widen the interval without covering the truth more often.
_MOST_SKEWNESS = 0.3
_LEAST_SKEWNESS = 1e-6


def _same(x: np.ndarray) -> np.ndarray:
    return x


@dataclass(frozen=True)
class Scale:
    """A transformation that makes an interval symmetric except for the data's skewness, its
    derivative, and the part of the skewness that is corrected.

    With `errors`, it is applied to the value in units of so many of its own standard errors, and
    the interval contains that of the value itself. No value is below `lowest`.
    """

    to: Callable[[np.ndarray], np.ndarray]
    back: Callable[[np.ndarray], np.ndarray]
    slope: Callable[[float], float]
    skewness: float = 1.0
    errors: float = 0.0
    lowest: float = -inf


# Values on both sides of 0 are seldom skewed: less correction adds less noise.
SIGNED = Scale(_same, _same, lambda _: 1.0, 0.5)
LOG_FACTOR = replace(SIGNED, skewness=0.0)  # of two values with similar skewness
POSITIVE = Scale(np.log, np.exp, lambda x: 1 / x)
ABOVE_1 = Scale(lambda x: np.log(x - 1), lambda y: 1 + np.exp(y), lambda x: 1 / (x - 1))
# A mean of gaps that cancel is as skewed as a positive value once it is many errors from 0, where
# asinh is a logarithm. Near 0 it is symmetric: a logarithm's interval would end too far from 0.
CANCELLING = Scale(np.arcsinh, np.sinh, lambda x: 1 / np.sqrt(1 + x**2), 0.5, errors=2.0)
ABOVE_MINUS_1 = replace(CANCELLING, skewness=1.0, lowest=-1.0)
# Intervals of log-odds reach far enough with a quarter of the correction.
SHARE = Scale(
    lambda x: np.log(x) - np.log1p(-x),
    lambda y: 1 / (1 + np.exp(-y)),
    lambda x: 1 / (x * (1 - x)),
    0.25,
)
# (mean w)² / mean w² is as skewed as the few large weights.
SAMPLE_SIZE = replace(SHARE, skewness=1.0)
CORRELATION = Scale(np.arctanh, np.tanh, lambda x: 1 / (1 - x**2))


@dataclass(frozen=True)
class Jackknife:
    """A value, and the value without each group of prompts, as from `jackknife_values`.

    Group g holds the same prompts in two traces, so differences of these values are the jackknife
    of the difference.
    """

    value: float
    without_G: np.ndarray
    scale: Scale = SIGNED
    why_no_interval: str | None = None  # a reason against one of any width

    def estimate(self, prompts: int) -> Estimate:
        """The value with its 95 % interval."""
        if self.why_no_interval:
            return point_estimate(self.value, self.why_no_interval)
        return interval(self.value, self.without_G, prompts, self.scale)

    def paired(self) -> Estimate:
        """A difference on the same tokens, with its interval from four groups of prompts on.

        The prompts' own sizes cancel, and t has G − 1 degrees: of equal traces with 4 to 9 prompts
        it marks 3 to 6 %, whether or not a few prompts are five times worse.
        """
        usable_G = self.without_G[np.isfinite(self.without_G)]
        if len(usable_G) < FEWEST_PAIRED or np.ptp(usable_G) <= _ROUNDING * abs(self.value):
            return point_estimate(self.value, FEW_PROMPTS)
        low, high = self.value - _reach(usable_G.mean() - usable_G, skewness=0.0)
        return Estimate(float(self.value), float(low), float(high))


def interval(value: float, without_G: np.ndarray, prompts: int, scale: Scale = SIGNED) -> Estimate:
    """The 95 % interval of a value, from its values without one group of prompts at a time.

    With y the value on its scale, y_g the value without group g and u_g = ȳ − y_g: error² = G / (G
    − 1) Σ u², skewness a = Σ u³ / (Σ u²)^1.5, and degrees of freedom 2 / (Σ u⁴ / (Σ u²)² − 1/G), at
    most G − 1. Where nothing is left without one group, which a logarithm cannot express, y_g is
    linear in the value, and the skewness is not corrected.
    """
    usable_G = without_G[~np.isnan(without_G)]
    if not np.isfinite(value) or prompts < FEWEST_PROMPTS or len(usable_G) < FEWEST_GROUPS:
        return point_estimate(value, FEW_PROMPTS)
    if np.ptp(usable_G) <= _ROUNDING * abs(value):
        return point_estimate(value, NO_SPREAD)
    if not np.isfinite(usable_G).all():  # without one group nothing is left to divide by
        return point_estimate(value, ONE_HAS_ALL)
    (low, high), groups = _ends(value, usable_G, scale)
    if scale.errors:
        plain, groups = _ends(value, usable_G, replace(SIGNED, skewness=scale.skewness))
        low, high = min(low, plain[0]), max(high, plain[1])
    if not (isfinite(low) and isfinite(high)):
        return point_estimate(value, OVERFLOW)
    few_decide = groups < _FEWEST_DECIDING
    return Estimate(float(value), max(low, scale.lowest), high, FEW_DECIDE if few_decide else None)


def _ends(value: float, usable_G: np.ndarray, scale: Scale) -> tuple[tuple[float, float], float]:
    """The two ends of an interval on one scale, and how many groups decide them."""
    unit = scale.errors * _error(usable_G) if scale.errors else 1.0
    skewness, y, y_G, scale = _on_scale(value / unit, usable_G / unit, scale)
    u_G, power = _deviations(y_G)
    count = len(u_G)
    with np.errstate(all="ignore"):
        reach = np.ldexp(_reach(u_G * count / (count - 1), skewness), power)
        low, high = (unit * scale.back(y - reach)).tolist()
    return (low, high), effective_groups(u_G)


def _error(without_G: np.ndarray) -> float:
    """The standard error, of enormous values too, whose squares would be infinite."""
    spread = float(np.ptp(without_G))
    return spread * standard_error(without_G / spread)


def _on_scale(
    value: float, usable_G: np.ndarray, scale: Scale
) -> tuple[float, float, np.ndarray, Scale]:
    """The part of the skewness to correct, the value and those without a group on a scale where
    they are finite, and that scale.
    """
    with np.errstate(all="ignore"):
        # A share that was summed in floats may be 1 + 1e-16, which has no log-odds.
        inside_G = usable_G.clip(*scale.back(np.array([-inf, inf])))
        if np.abs(usable_G - inside_G).max() <= _ROUNDING:
            usable_G = inside_G
        y = float(scale.to(np.array(value)))
        y_G = scale.to(usable_G)
        # A share that can be negative, or a correlation of 1, has no value on its scale.
        # Its interval is formed without a transformation.
        if not np.isfinite(y) or np.isnan(y_G).any():
            return SIGNED.skewness, value, usable_G, SIGNED
        if not np.isfinite(y_G).all():
            return 0.0, y, y + scale.slope(value) * (usable_G - value), scale
    return scale.skewness, y, y_G, scale


def _deviations(y_G: np.ndarray) -> tuple[np.ndarray, int]:
    """u_g = ȳ − y_g in units of a power of two, and its exponent."""
    # The exponent is 0 except for enormous values, whose u⁴ would be infinite.
    power = 200 * int(np.frexp(np.abs(y_G).max())[1] / 200)
    y_G = np.ldexp(y_G, -power)
    return y_G.mean() - y_G, power


def effective_groups(u_G: np.ndarray) -> float:
    """The number of equally weighted groups with the same effect."""
    squares = float(u_G @ u_G)
    return float(np.abs(u_G).sum()) ** 2 / squares if squares > 0 else 0.0


def _reach(u_G: np.ndarray, skewness: float) -> np.ndarray:
    """How far the interval extends below and above the value, on its scale: error · h(± t), h
    Hall's transformation.
    """
    count = len(u_G)
    squares = float(u_G @ u_G)
    degrees = 2 / max(float((u_G**4).sum()) / squares**2 - 1 / count, 1e-9)
    t = student_t(min(max(degrees, _LEAST_DEGREES), count - 1)) * np.array([1.0, -1.0])
    a = skewness * float((u_G**3).sum()) / squares**1.5
    a = min(max(a, -_MOST_SKEWNESS), _MOST_SKEWNESS)
    if abs(a) > _LEAST_SKEWNESS:
        t = 3 / a * (np.cbrt(1 + a * (t - a / 6)) - 1)
    return np.sqrt((count - 1) / count * squares) * t


def standard_deviation(first: np.ndarray, second: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The standard deviation from Σx, Σx² and the number of x, without Bessel's correction."""
    return np.sqrt(np.maximum(second / count - (first / count) ** 2, 0))


def standard_error(without_G: np.ndarray) -> float:
    """The standard error of a value, from its values without one group of prompts at a time."""
    return float(np.sqrt((len(without_G) - 1) * np.mean((without_G - without_G.mean()) ** 2)))


Result = TypeVar("Result")


def without_groups(evaluate: Callable[..., Result], *sums_Gx: np.ndarray) -> tuple[Result, Result]:
    """`evaluate` on sums by prompt group: on all of them, and with each group left out in turn."""
    totals_x = [sums.sum(axis=0) for sums in sums_Gx]
    # A broken recording may hold ∞ − ∞, which is NaN without a warning.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        left_Gx = [total - sums for total, sums in zip(totals_x, sums_Gx, strict=True)]
        return evaluate(*totals_x), evaluate(*left_Gx)


def grouped_ratio(
    part_G: np.ndarray, whole_G: np.ndarray, prompts: int, scale: Scale = POSITIVE
) -> Estimate:
    """Σ part / Σ whole, from sums by prompt group."""
    value, without_G = without_groups(np.true_divide, part_G, whole_G)
    return interval(float(value), jackknife_values(without_G, whole_G > 0), prompts, scale)


def grouped_share(part_G: np.ndarray, whole_G: np.ndarray, prompts: int) -> Estimate:
    """Σ part / Σ whole where the part belongs to the whole: the value and its interval are between
    0 and 1.
    """
    return clamped(grouped_ratio(part_G, whole_G, prompts, SHARE), 0.0, 1.0)


def jackknife_values(without_G: np.ndarray, occupied_G: np.ndarray) -> np.ndarray:
    """The values for a `Jackknife`: NaN for an empty group, infinity for a group without which
    nothing is left.
    """
    return np.where(occupied_G, np.where(np.isnan(without_G), np.inf, without_G), np.nan)
