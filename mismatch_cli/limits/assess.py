"""A summary compared with the trainer's own noise, published limits, and what others measured.

The limits disagree by an order of magnitude, so they are never merged into one: each keeps its
source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import log
from typing import Any

from mismatch_cli.limits.both_sides import family, precision
from mismatch_cli.limits.expected import Expected, place_of, sentence
from mismatch_cli.limits.judge import (
    BROKEN,
    EXCEEDED,
    HEALTHY,
    HOLDS,
    UNDECIDED,
    UNJUDGED,
    WITHOUT_INTERVAL,
    Number,
)
from mismatch_cli.limits.published import Published, published
from mismatch_cli.limits.reference import Measured, reference
from mismatch_cli.metrics.estimate import BELOW_RESOLUTION
from mismatch_cli.metrics.gap_table import METRICS

LEADING = "abs_d_mean"  # compared with the floor, and with what is expected without a fault
_NORMAL_P95 = 1.959964  # of |x| for a standard normal distribution
_TAIL = 3.0  # a KL this many times what the bulk would give comes from the tail
_FEWEST_TOKENS = 200  # ten of them beyond p95
_NEAREST, _NEAREST_NOISE = 5, 2
FLOOR = "floor"  # the pair of a trainer with itself
_OF_LIMIT = ("publisher", "who", "source", "date", "name", "metric", "direction", "says", "note")
# A number among all published limits, beside `healthy` and `undecided`
BETWEEN, ABOVE, MIXED = "between", "above", "mixed"


def assess(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The `verdict` of a summary, as plain values (docs/json/verdict.md); rows without their
    metric are left out.
    """
    pairs, about = summary["pairs"], summary["about"]
    main = next(iter(pairs.values()))
    kind = {"family": family(about), "precision": precision(about)}
    rows = [_compared(limit, pairs, kind) for limit in published()]
    bars = [row for row in rows if row is not None]
    verdict = {
        "pair": main["pair"],
        **kind,
        "floor": _above_floor(main["metrics"], summary.get("floor")),
        "expected": _expected(main["metrics"], summary.get("expected")),
        "tail": _tail(main),
        "bars": bars,
        "measured": _nearest(summary, kind),
    }
    return {"sentences": list(sentences(verdict)), "status": status(bars), **verdict}


def status(bars: Sequence[Mapping[str, Any]]) -> str:
    """A number among all limits: `above` all, `mixed` (above some), else the least certain;
    empty if no limit could be judged.
    """
    words = {(row["standing"], row["level"]) for row in bars if row["standing"] != UNJUDGED}
    if (EXCEEDED, BROKEN) in words:
        return ABOVE if len(words) == 1 else MIXED
    if any(word == EXCEEDED for word, _ in words):
        return BETWEEN
    if any(word == UNDECIDED for word, _ in words):
        return UNDECIDED
    return HEALTHY if words else ""


def _compared(
    limit: Published, pairs: Mapping[str, Any], kind: Mapping[str, str]
) -> dict[str, Any] | None:
    """A limit and what the judge says of the number it applies to; None if it is for other models
    or precisions, or if the summary has no such metric.
    """
    in_summary = any(limit.metric in pair["metrics"] for pair in pairs.values())
    if not in_summary or not _is_for(limit, kind):
        return None
    number = Number.of(pairs, limit.metric, limit.pair)
    standing = limit.standing(number)
    row = {name: getattr(limit, name) for name in _OF_LIMIT}
    return row | {
        "pair": number.pair,
        "healthy": limit.bound(HEALTHY),
        "broken": limit.bound(BROKEN),
        "text": limit.text(HEALTHY),
        "value": number.value,
        "low": number.low,
        "high": number.high,
        "standing": standing.word,
        "level": standing.level,
        "reason": standing.reason,
        "power": standing.power,
        "few_prompts": number.few_prompts,
    }


def _above_floor(
    metrics: Mapping[str, Any], floor: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The gap in multiples of the trainer's own noise, with a worst-case interval from those of
    both.
    """
    gap, noise = _value(metrics, LEADING), _value((floor or {}).get("metrics", {}), LEADING)
    if floor is None or gap is None or noise is None:
        return None
    times = METRICS[LEADING].times_floor(gap, noise)
    row = {
        "metric": LEADING,
        "value": gap,
        "floor": noise,
        "times": times,
        "low": None,
        "high": None,
    }
    ends = [of[LEADING].get(end) for of in (metrics, floor["metrics"]) for end in ("low", "high")]
    if times == BELOW_RESOLUTION or None in ends:
        return row
    low, high, floor_low, floor_high = ends
    if low > 0 and floor_low > 0:
        row |= {"low": low / floor_high, "high": high / floor_low}
    return row


def _value(metrics: Mapping[str, Any], key: str) -> float | None:
    """None where it was not measured, or is not part of the summary."""
    value: float | None = metrics.get(key, {}).get("value")
    return value


def _expected(
    metrics: Mapping[str, Any], expected: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The mean |d| beside what the traces would have without a fault.

    None without a gap, or within the range of other models, which says nothing of this one.
    """
    gap = _value(metrics, LEADING)
    if expected is None or gap is None:
        return None
    range_ = Expected(**expected)
    place = place_of(gap, range_)
    if place != "above" and not range_.of_this_trace:
        return None
    return {
        "value": gap,
        "standing": place,
        "sentence": sentence(gap, range_),
    }


def _tail(pair: Mapping[str, Any]) -> dict[str, Any] | None:
    """k3 compared with what a normal distribution with the same p95 of |d| gives; None if the bulk
    explains it.

    The median would not do: half of a model's tokens are certain and have no gap at any precision.
    """
    kl, p95 = _value(pair["metrics"], "k3"), _value(pair["metrics"], "abs_d_p95")
    if kl is None or p95 is None or kl <= 0 or pair["counts"]["tokens"] < _FEWEST_TOKENS:
        return None
    spread = p95 / _NORMAL_P95
    bulk = spread**2 / 2
    if kl <= _TAIL * bulk:
        return None
    return {
        "k3": kl,
        "robust_spread": spread,
        "bulk": bulk,
        "times": kl / bulk if bulk > 0 else None,
    }


def _is_for(row: Published, kind: Mapping[str, str]) -> bool:
    """Whether a limit is about models and precisions like these."""
    return row.family in ("", kind["family"]) and row.precision in ("", kind["precision"])


def _nearest(summary: Mapping[str, Any], kind: Mapping[str, str]) -> list[dict[str, Any]]:
    """The measured rows of this family for metrics of this summary: same precision first, then
    the nearest. After those of the gap come those of a trainer's own noise, if it was measured.
    """
    pairs, floor = summary["pairs"], summary.get("floor")
    main = next(iter(pairs.values()))["metrics"]
    families = ("", kind["family"])
    rows = [row for row in reference().measured if not kind["family"] or row.family in families]
    of_gap = [
        (row, pairs.get(row.pair, {"metrics": main})["metrics"])
        for row in rows
        if row.pair != FLOOR
    ]
    of_noise = [(row, floor["metrics"]) for row in rows if row.pair == FLOOR] if floor else []
    return [*_closest(of_gap, kind, _NEAREST), *_closest(of_noise, kind, _NEAREST_NOISE)]


def _closest(
    rows: Sequence[tuple[Measured, Mapping[str, Any]]], kind: Mapping[str, str], number: int
) -> list[dict[str, Any]]:
    """So many rows, each with the value of its metric here."""
    candidates = []
    for row, metrics in rows:
        value = _value(metrics, row.metric)
        if value is not None:
            unlike = not row.precision or row.precision != kind["precision"]
            candidates.append((unlike, _distance(row, value), vars(row) | {"value": value}))
    ordered = sorted(candidates, key=lambda candidate: candidate[:2])
    return [row for *_, row in ordered[:number]]


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


_LARGEST_FACTOR = 1000


def sentences(verdict: Mapping[str, Any]) -> Iterator[str]:
    """A verdict in words, sentence by sentence."""
    yield _floor_sentence(verdict["floor"])
    if (expected := verdict["expected"]) is not None:
        yield expected["sentence"]
    yield from limit_sentences(verdict["bars"])
    judged = [row for row in verdict["bars"] if row["standing"] != UNJUDGED]
    if any(row["low"] is None and not row["few_prompts"] for row in judged):
        yield "Numbers without an interval are compared by their value alone."
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


_OF_PAIR = {"total": "With staleness, ", "staleness": "For staleness alone, "}


def limit_sentences(bars: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many limits hold for each pair, an exceeded one's first, and how sure that is."""
    pairs = dict.fromkeys(row["pair"] for row in bars)
    exceeded = {row["pair"] for row in bars if row["standing"] == EXCEEDED}
    texts = [
        _OF_PAIR.get(pair, "") + counted([row for row in bars if row["pair"] == pair])
        for pair in sorted(pairs, key=lambda pair: pair not in exceeded)
    ]
    if any(row["standing"] == UNDECIDED and row["power"] is None for row in bars):
        texts.append(
            f"Undecided values come from too few prompts: they may be {WITHOUT_INTERVAL:g} times "
            "as large, or as small."
        )
    return texts


def counted(bars: Sequence[Mapping[str, Any]]) -> str:
    """`7 of 9 published limits hold, 2 are undecided, exceeded: Tinker (2), verl.`"""
    words = [row["standing"] for row in bars]
    parts = [f"{words.count(HOLDS)} of {len(bars)} published limits hold"]
    undecided = words.count(UNDECIDED)
    if undecided:
        parts.append(f"{undecided} {'is' if undecided == 1 else 'are'} undecided")
    for level, text in _BEYOND.items():
        names = Counter(row["publisher"] for row in bars if row["level"] == level)
        if names:
            listed = (f"{name} ({n})" if n > 1 else name for name, n in names.items())
            parts.append(f"{text}: {', '.join(listed)}")
    reasons = Counter(row["reason"] for row in bars if row["standing"] == UNJUDGED)
    parts += [f"{n} could not be judged: {reason}" for reason, n in reasons.items()]
    return ", ".join(parts) + "."


def strictest_first(bars: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Limits on one metric, the one that it exceeds most first."""
    return sorted(bars, key=lambda row: (_ORDER.index(row["standing"]), _strictness(row)))


def _strictness(row: Mapping[str, Any]) -> float:
    """Smaller for a stricter bound; of a range, by its width."""
    bound = row["healthy"]
    if not isinstance(bound, int | float):
        low, high = bound
        return float(high - low)
    return float(-bound if row["direction"] == "min" else bound)


_ORDER = (EXCEEDED, UNDECIDED, HOLDS, UNJUDGED)
_BEYOND = {HEALTHY: "not healthy", BROKEN: "exceeded"}


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
