"""A summary compared with the trainer's own noise, published limits, and what others measured.

The limits disagree by an order of magnitude, so they are never merged into one: each keeps its
source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from mismatch_cli.limits.both_sides import family, precision
from mismatch_cli.limits.expected import Expected, place_of, sentence
from mismatch_cli.limits.reference import Bar, Measured, reference
from mismatch_cli.metrics.estimate import BELOW_RESOLUTION, FEW_PROMPTS, ONE_HAS_ALL
from mismatch_cli.metrics.gap_table import METRICS

LEADING = "abs_d_mean"  # compared with the floor, and with what is expected without a fault
_NORMAL_P95 = 1.959964  # of |x| for a standard normal distribution
_TAIL = 3.0  # a KL this many times what the bulk would give comes from the tail
_FEWEST_TOKENS = 200  # ten of them beyond p95
_NEAREST = 5
# float32 log-probabilities 0.1 apart are at most 0.1 × this apart after rounding
_ROUNDED = 1 + 1e-6
# Factor either way without an interval: as if five groups of prompts decided, t(4) / √5 is log 3.5
WITHOUT_INTERVAL = 3.5


def assess(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The `verdict` of a summary, as plain values (docs/json/verdict.md); rows without their
    metric are left out.
    """
    pairs, about = summary["pairs"], summary["about"]
    main = next(iter(pairs.values()))
    kind = {"family": family(about), "precision": precision(about)}
    bars = [row for bar in reference().bars if (row := _compared(bar, pairs, kind["family"]))]
    verdict = {
        "pair": main["pair"],
        **kind,
        "floor": _above_floor(main["metrics"], summary.get("floor")),
        "expected": _expected(main["metrics"], summary.get("expected")),
        "tail": _tail(main),
        "bars": bars,
        "measured": _nearest(main["metrics"], kind),
    }
    return {"sentences": list(sentences(verdict)), "status": status(bars), **verdict}


def status(bars: Sequence[Mapping[str, Any]]) -> str:
    """A number among all limits: `above` all, `mixed` (above some), else the least certain;
    empty without limits.
    """
    found = {row["standing"] for row in bars}
    if ABOVE in found:
        return ABOVE if found == {ABOVE} else MIXED
    return next((word for word in (BETWEEN, UNDECIDED, HEALTHY) if word in found), "")


@dataclass(frozen=True)
class _Number:
    """A metric of the summary, with its interval where it has one."""

    value: float
    low: float | None
    high: float | None
    few_decide: bool = False  # too few for an interval, and a point alone would claim too much
    agreement: float = 0.0

    @classmethod
    def of(cls, metrics: Mapping[str, Any], key: str, absolute: bool = False) -> _Number | None:
        found = metrics.get(key)
        if not found or found.get("value") is None:
            return None
        value, low, high = (found.get(part) for part in ("value", "low", "high"))
        if absolute:
            if low is not None and high is not None:
                low, high = (
                    (0.0 if low <= 0 <= high else min(abs(low), abs(high))),
                    max(abs(low), abs(high)),
                )
            value = abs(value)
        agreement = 0.0 if absolute else METRICS[key].agreement or 0.0
        return cls(value, low, high, found.get("note") in (ONE_HAS_ALL, FEW_PROMPTS), agreement)

    @property
    def range(self) -> tuple[float, float]:
        """Where the value may be; if few prompts decide it, its distance from agreement may be a
        few times off.
        """
        if self.few_decide:
            distance = self.value - self.agreement
            low, high = sorted((distance / WITHOUT_INTERVAL, distance * WITHOUT_INTERVAL))
            return self.agreement + low, self.agreement + high
        return (
            self.value if self.low is None else self.low,
            self.value if self.high is None else self.high,
        )


def _compared(bar: Bar, pairs: Mapping[str, Any], model_family: str) -> dict[str, Any] | None:
    """A limit and the number it applies to; None if it is for other models, or if the number is
    missing.
    """
    if bar.family and bar.family != model_family:
        return None
    pair = pairs[bar.pair] if bar.pair in pairs else next(iter(pairs.values()))
    found = _Number.of(pair["metrics"], bar.metric, bar.absolute)
    if found is None:
        return None
    healthy, broken = bar.bounds
    row = {name: value for name, value in vars(bar).items() if name != "family"}
    return row | {
        "pair": pair["pair"],
        "healthy": healthy,
        "broken": broken,
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "standing": position(*found.range, healthy, broken),
    }


def position(low: float, high: float, healthy: float, broken: float) -> str:
    """An interval's `standing` between two bounds; `undecided` if it spans one."""
    if high <= healthy * _ROUNDED:
        return HEALTHY
    if low > broken * _ROUNDED:
        return ABOVE
    return BETWEEN if low > healthy and high <= broken * _ROUNDED else UNDECIDED


def _above_floor(
    metrics: Mapping[str, Any], floor: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The gap in multiples of the trainer's own noise, with a worst-case interval from those of
    both.
    """
    gap = _Number.of(metrics, LEADING)
    noise = _Number.of(floor["metrics"], LEADING) if floor else None
    if gap is None or noise is None:
        return None
    times = METRICS[LEADING].times_floor(gap.value, noise.value)
    row = {
        "metric": LEADING,
        "value": gap.value,
        "floor": noise.value,
        "times": times,
        "low": None,
        "high": None,
    }
    if times == BELOW_RESOLUTION or None in (gap.low, gap.high, noise.low, noise.high):
        return row
    (low, high), (floor_low, floor_high) = gap.range, noise.range
    if low > 0 and floor_low > 0:
        row |= {"low": low / floor_high, "high": high / floor_low}
    return row


def _expected(
    metrics: Mapping[str, Any], expected: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The mean |d| beside what the traces would have without a fault.

    None without a gap, or within the range of other models, which says nothing of this one.
    """
    gap = _Number.of(metrics, LEADING)
    if expected is None or gap is None:
        return None
    range_ = Expected(**expected)
    place = place_of(gap.value, range_)
    if place != "above" and not range_.of_this_trace:
        return None
    return {
        "value": gap.value,
        "standing": place,
        "sentence": sentence(gap.value, range_),
    }


def _tail(pair: Mapping[str, Any]) -> dict[str, Any] | None:
    """k3 compared with what a normal distribution with the same p95 of |d| gives; None if the bulk
    explains it.

    The median would not do: half of a model's tokens are certain and have no gap at any precision.
    """
    kl, p95 = _Number.of(pair["metrics"], "k3"), _Number.of(pair["metrics"], "abs_d_p95")
    if kl is None or p95 is None or kl.value <= 0 or pair["counts"]["tokens"] < _FEWEST_TOKENS:
        return None
    spread = p95.value / _NORMAL_P95
    bulk = spread**2 / 2
    if kl.value <= _TAIL * bulk:
        return None
    return {
        "k3": kl.value,
        "robust_spread": spread,
        "bulk": bulk,
        "times": kl.value / bulk if bulk > 0 else None,
    }


def _nearest(metrics: Mapping[str, Any], kind: Mapping[str, str]) -> list[dict[str, Any]]:
    """The measured rows of this family for metrics of this summary: same precision first, then
    the nearest.
    """
    found = []
    for row in reference().measured:
        number = _Number.of(metrics, row.metric)
        if number and (not kind["family"] or row.family in ("", kind["family"])):
            unlike = not row.precision or row.precision != kind["precision"]
            found.append(
                (unlike, _distance(row, number.value), vars(row) | {"value": number.value})
            )
    return [row for *_, row in sorted(found, key=lambda candidate: candidate[:2])[:_NEAREST]]


def _distance(row: Measured, value: float) -> float:
    """The log of the factor between a value and a range, both measured from the value at
    agreement.
    """
    ideal = METRICS[row.metric].agreement or 0.0
    distances = sorted(abs(end - ideal) for end in (row.low, row.high))
    distance = abs(value - ideal)
    if distances[0] <= distance <= distances[1]:
        return 0.0
    if distance == 0:
        return float("inf")
    return min(abs(log(distance / end)) for end in distances if end > 0)


HEALTHY, BETWEEN, ABOVE, UNDECIDED, MIXED = "healthy", "between", "above", "undecided", "mixed"
_LARGEST_FACTOR = 1000
_WORDS = {
    ABOVE: "Exceeded",
    BETWEEN: "Between healthy and broken",
    UNDECIDED: "Undecided (the interval spans the limit)",
}


def sentences(verdict: Mapping[str, Any]) -> Iterator[str]:
    """A verdict in words, sentence by sentence."""
    yield _floor_sentence(verdict["floor"])
    if (expected := verdict["expected"]) is not None:
        yield expected["sentence"]
    yield from _limit_sentences(verdict["bars"], verdict["pair"])
    if (tail := verdict["tail"]) is not None:
        yield _tail_sentence(tail["times"])


def _floor_sentence(floor: Mapping[str, Any] | None) -> str:
    if floor is None:
        return "The trainer's own noise was not measured, so its share of the gap is unknown."
    times, low, high = floor["times"], floor["low"], floor["high"]
    if times == BELOW_RESOLUTION:
        return "The trainer's own noise is below 1e-7 nats, too small for a ratio."
    if low is None:
        return f"The mean |Δlog p| is {_times(times)} the trainer's own noise (no interval)."
    if low <= 1 <= high:
        return (
            f"The gap is indistinguishable from the trainer's own noise: {times:.1f} × "
            f"({low:.1f} to {high:.1f})."
        )
    return (
        f"The mean |Δlog p| is {_times(times)} the trainer's own noise ({_short(low)} to "
        f"{_short(high)})."
    )


def _limit_sentences(bars: Sequence[Mapping[str, Any]], pair: str) -> Iterator[str]:
    if not bars:
        return
    sources: dict[str, list[str]] = {}
    for row in bars:
        sources.setdefault(row["standing"], []).append(row["who"])
    yield f"{len(sources.get(HEALTHY, []))} of {len(bars)} published limits hold."
    for name, word in _WORDS.items():
        if name in sources:
            yield f"{word}: {'; '.join(sources[name])}."
    if pair == "total":
        yield (
            "The trainer's weights differ from those that sampled, so every number here includes "
            "staleness."
        )
    elif stale := [row["who"] for row in bars if row["pair"] == "total"]:
        yield f"Compared with the current trainer, staleness included: {'; '.join(stale)}."
    if any(row["low"] is None for row in bars):
        yield "Numbers without an interval are compared by their value alone."


def _tail_sentence(times: float | None) -> str:
    if times is None:
        return "Rare tokens cause all of the KL: 95 % of the tokens agree exactly."
    return (
        f"Rare tokens dominate the KL: k3 is {_times(times)} what the other 95 % of the tokens "
        "would give."
    )


def _times(factor: float) -> str:
    return f"more than {_LARGEST_FACTOR} ×" if factor > _LARGEST_FACTOR else f"{_short(factor)} ×"


def _short(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"
