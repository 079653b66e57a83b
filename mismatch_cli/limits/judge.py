"""The one judge: a measured number beside what is allowed, in one of four words.

Every command asks it: `report` and `verdict` for the published limits, `gate` and `watch` for the
limits that somebody chose. So the same number gets the same word everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf, isnan

from mismatch_cli.metrics.estimate import FEW_PROMPTS, NOT_MEASURED, ONE_HAS_ALL, Estimate

HOLDS, EXCEEDED, UNDECIDED, UNJUDGED = "holds", "exceeded", "undecided", "unjudged"
HEALTHY, BROKEN = "healthy", "broken"  # the levels of a limit
BOUNDS = {"max": "≤ {}", "min": "≥ {}", "max_size": "within ±{}"}  # in words
# Two float32 log-probabilities 0.1 apart are at most 0.1 × (1 + this) apart after rounding
_ROUNDED = 1e-6
# Factor either way without an interval: as if five groups of prompts decided, t(4) / √5 is log 3.5
WITHOUT_INTERVAL = 3.5


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`, both ends included: what a limit allows, or where a number may
    be.
    """

    low: float = -inf
    high: float = inf

    @classmethod
    def of(cls, bounds: Mapping[str, float]) -> Range:
        """From bounds by their names: `min`, `max`, or `max_size` of a signed number."""
        size = bounds.get("max_size", inf)
        return cls(bounds.get("min", -size), bounds.get("max", size))

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def lies_within(self, other: Range) -> bool:
        return other.contains(self.low) and other.contains(self.high)

    def lies_outside(self, other: Range) -> bool:
        return self.high < other.low or self.low > other.high

    def widened(self, agreement: float) -> Range:
        """The range with what float32 rounds away, relative to each bound's distance from
        agreement; an infinite bound remains so.
        """
        low = self.low - _ROUNDED * abs(self.low - agreement)
        high = self.high + _ROUNDED * abs(self.high - agreement)
        return Range(low, high)

    def nearest_bound(self, value: float) -> float:
        """The end that a value crosses, or comes closest to."""
        # An infinite value is as far from either end.
        if value > self.high:
            return self.high
        if value < self.low:
            return self.low
        return min((self.low, self.high), key=lambda bound: abs(bound - value))


def agreement_of(metric: str) -> float:
    """The value of a metric if the two policies are equal; 0 for one that is not of the catalog."""
    from mismatch_cli.metrics.gap_table import METRICS

    if metric not in METRICS:
        return 0.0
    return METRICS[metric].agreement or 0.0


@dataclass(frozen=True)
class Number:
    """A measured number with its 95 % interval where it has one; or, without a value, `why`."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    pair: str = ""
    why: str = ""
    few_prompts: bool = False  # too few for an interval, and the value alone claims too much
    agreement: float = 0.0  # the value at equal policies, from which the error is a factor

    @classmethod
    def of(cls, pairs: Mapping[str, Mapping[str, Estimate]], metric: str, pair: str) -> Number:
        """A metric of one of these pairs; the first pair if none is named."""
        name = pair_for(pair, pairs)
        if not name:
            return cls(pair=pair, why=no_pair(pair, pairs))
        estimate = pairs[name].get(metric) or Estimate(None)
        if estimate.value is None:
            return cls(pair=name, why=estimate.note or NOT_MEASURED)
        return cls(
            estimate.value,
            estimate.low,
            estimate.high,
            pair=name,
            few_prompts=estimate.note in (ONE_HAS_ALL, FEW_PROMPTS),
            agreement=agreement_of(metric),
        )

    @property
    def has_interval(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def range(self) -> Range:
        """The values that the number may have: its interval, or without one the value alone; with
        too few prompts, its distance from agreement may be `WITHOUT_INTERVAL` times off.
        """
        assert self.value is not None
        if self.low is not None and self.high is not None:
            return Range(self.low, self.high)
        if not self.few_prompts:
            return Range(self.value, self.value)
        distance = self.value - self.agreement
        low, high = sorted((distance / WITHOUT_INTERVAL, distance * WITHOUT_INTERVAL))
        return Range(self.agreement + low, self.agreement + high)


def pair_for(pair: str, measured: Collection[str]) -> str:
    """The measured pair that a limit on `pair` applies to; empty if there is none.

    Where the trainer has the weights that sampled, there is one gap: with staleness or without.
    A number that includes staleness says nothing of a limit on equal weights.
    """
    names = list(measured)
    if not pair:
        return next(iter(names), "")
    if pair in names:
        return pair
    if pair == "total" and names == ["mismatch"]:
        return "mismatch"
    return ""


def no_pair(pair: str, measured: Collection[str]) -> str:
    """Why a limit on a pair says nothing."""
    if pair == "mismatch" and "total" in measured:
        return "the number includes staleness, but the limit is for equal weights"
    return f"no {pair} pair was measured (measured: {', '.join(measured)})"


@dataclass(frozen=True)
class Standing:
    """What the judge says of a number.

    `word`: `holds` or `exceeded`, if all of the interval agrees; `undecided`, if it contains the
    bound; `unjudged` without a number. `level`: of a published limit, the last one that all of the
    interval exceeds: `healthy`, or `broken` too. `is_beyond`: whether the value itself is. `power`:
    how far from the bound a number with this interval has to be for a word; None without one.
    """

    word: str
    number: Number
    level: str = ""
    reason: str = ""
    power: float | None = None
    is_beyond: bool = False

    @property
    def is_judged(self) -> bool:
        return self.word != UNJUDGED


def judge(number: Number, healthy: Range, broken: Range | None = None) -> Standing:
    """Whether a number holds a limit: `healthy` is what is allowed; values outside `broken`, which
    is at least as wide, are broken. Without a second level they are the same.
    """
    if number.value is None:
        return Standing(UNJUDGED, number, reason=number.why)
    if isnan(number.value):
        return Standing(EXCEEDED, number, BROKEN, "not a number", is_beyond=True)
    if broken is None:
        broken = healthy
    interval = number.range
    allowed = healthy.widened(number.agreement)
    not_broken = broken.widened(number.agreement)
    standing = Standing(
        HOLDS, number, power=_power(number), is_beyond=not allowed.contains(number.value)
    )
    if interval.lies_within(allowed):
        return standing
    if interval.lies_outside(not_broken):
        reason = _describe_excess(number.value, broken)
        return replace(standing, word=EXCEEDED, level=BROKEN, reason=reason)
    if interval.lies_outside(allowed):
        reason = _describe_excess(number.value, healthy)
        # Certainly not healthy, but whether it is broken may be undecided.
        if not interval.lies_within(not_broken):
            reason = f"{reason}; {_describe_doubt(standing, interval, broken)}"
        return replace(standing, word=EXCEEDED, level=HEALTHY, reason=reason)
    return replace(standing, word=UNDECIDED, reason=_describe_doubt(standing, interval, healthy))


def _power(number: Number) -> float | None:
    if number.value is None or number.low is None or number.high is None:
        return None
    return max(number.high - number.value, number.value - number.low)


def _describe_excess(value: float, allowed: Range) -> str:
    bound = allowed.nearest_bound(value)
    if value == bound:
        return f"{value:.6g} is the bound"
    direction = "below" if value < bound else "above"
    # More digits only where six would show two different numbers as one.
    digits = 6 if f"{value:.6g}" != f"{bound:.6g}" else 10
    return f"{value:.{digits}g} is {direction} {bound:.{digits}g}"


def _describe_doubt(standing: Standing, interval: Range, allowed: Range) -> str:
    value = standing.number.value
    assert value is not None
    excess = _describe_excess(value, allowed)
    why = "" if standing.power is not None else " with so few prompts"
    return f"{excess}, undecided{why}: {interval.low:.3g} to {interval.high:.3g}"
