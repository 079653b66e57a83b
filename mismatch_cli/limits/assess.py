"""A summary compared with the trainer's own noise, published limits, and what others measured.

The limits disagree by an order of magnitude, so they are never merged into one: each keeps its
source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from mismatch_cli.limits.expected import Expected, expected_sentence, position_in_range
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
from mismatch_cli.limits.manifest_sides import family, precision
from mismatch_cli.limits.published import Bound, Published, published
from mismatch_cli.limits.reference import MeasuredRange, reference
from mismatch_cli.metrics.estimate import BELOW_RESOLUTION, Estimate
from mismatch_cli.metrics.gap_table import METRICS

LEADING = "abs_d_mean"  # compared with the floor, and with what is expected without a fault
_NORMAL_P95 = 1.959964  # of |x| for a standard normal distribution
_TAIL = 3.0  # a KL this many times what the bulk would give comes from the tail
_FEWEST_TOKENS = 200  # ten of them beyond p95
_NEAREST, _NEAREST_NOISE = 5, 2
FLOOR = "floor"  # the pair of a trainer with itself
# A number among all published limits, beside `healthy` and `undecided`
BETWEEN, ABOVE, MIXED = "between", "above", "mixed"


Metrics = Mapping[str, Estimate]  # of one pair, by key


@dataclass(frozen=True, kw_only=True)
class LimitRow:
    """A published limit, and what the judge says of the number it applies to."""

    publisher: str
    who: str
    source: str
    date: str
    name: str
    metric: str
    direction: str
    says: str
    note: str
    pair: str
    healthy: Bound
    broken: Bound
    text: str
    value: float | None
    low: float | None
    high: float | None
    standing: str
    level: str
    reason: str
    power: float | None
    few_prompts: bool

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high)

    @property
    def is_judged(self) -> bool:
        return self.standing != UNJUDGED


@dataclass(frozen=True)
class AboveFloor:
    """The gap in multiples of the trainer's own noise, with a worst-case interval of both."""

    metric: str
    value: float
    floor: float
    times: float | str | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class BesideExpected:
    """The mean |d| beside what the traces would have without a fault, nats."""

    value: float
    standing: str
    sentence: str


@dataclass(frozen=True)
class Tail:
    """k3 compared with what a normal distribution with the same p95 of |d| gives."""

    k3: float
    robust_spread: float
    bulk: float
    times: float | None


@dataclass(frozen=True)
class MeasuredElsewhere(MeasuredRange):
    """What somebody measured, and the same metric here."""

    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The `verdict` of a summary (docs/json/verdict.md)."""

    sentences: Sequence[str]
    status: str
    pair: str
    family: str
    precision: str
    floor: AboveFloor | None
    expected: BesideExpected | None
    tail: Tail | None
    bars: Sequence[LimitRow]
    measured: Sequence[MeasuredElsewhere]


@dataclass(frozen=True)
class _Kind:
    """What limits and published values are chosen by."""

    family: str
    precision: str


def assess(
    pairs: Mapping[str, Metrics],
    manifest: Mapping[str, Any],
    *,
    tokens: int = 0,
    floor: Metrics | None = None,
    expected: Expected | None = None,
) -> Assessment:
    """Judge the metrics of each pair, of which the first is the one asked about.

    `tokens` is how many the first pair has, `floor` the metrics of the trainer against itself,
    `expected` the gap without a fault. Rows without their metric are left out.
    """
    pair, main = next(iter(pairs.items()))
    kind = _Kind(family(manifest), precision(manifest))
    rows = (_compared(limit, pairs, kind) for limit in published())
    bars = [row for row in rows if row is not None]
    assessment = Assessment(
        sentences=(),
        status=status(bars),
        pair=pair,
        family=kind.family,
        precision=kind.precision,
        floor=_above_floor(main, floor),
        expected=_beside_expected(main, expected),
        tail=_tail(main, tokens),
        bars=bars,
        measured=_nearest(pairs, floor, kind),
    )
    return replace(assessment, sentences=list(sentences(assessment)))


def status(bars: Sequence[LimitRow]) -> str:
    """A number among all limits: `above` all, `mixed` (above some), else the least certain;
    empty if no limit could be judged.
    """
    words = {(row.standing, row.level) for row in bars if row.is_judged}
    if (EXCEEDED, BROKEN) in words:
        return ABOVE if len(words) == 1 else MIXED
    if any(word == EXCEEDED for word, _ in words):
        return BETWEEN
    if any(word == UNDECIDED for word, _ in words):
        return UNDECIDED
    return HEALTHY if words else ""


def _compared(limit: Published, pairs: Mapping[str, Metrics], kind: _Kind) -> LimitRow | None:
    """A limit and what the judge says of the number it applies to; None if it is for other models
    or precisions, or if no pair has such a metric.
    """
    if not any(limit.metric in metrics for metrics in pairs.values()) or not _is_for(limit, kind):
        return None
    number = Number.of(pairs, limit.metric, limit.pair)
    standing = limit.standing(number)
    return LimitRow(
        publisher=limit.publisher,
        who=limit.who,
        source=limit.source,
        date=limit.date,
        name=limit.name,
        metric=limit.metric,
        direction=limit.direction,
        says=limit.says,
        note=limit.note,
        pair=number.pair,
        healthy=limit.bound(HEALTHY),
        broken=limit.bound(BROKEN),
        text=limit.text(HEALTHY),
        value=number.value,
        low=number.low,
        high=number.high,
        standing=standing.word,
        level=standing.level,
        reason=standing.reason,
        power=standing.power,
        few_prompts=number.few_prompts,
    )


def _above_floor(metrics: Metrics, floor: Metrics | None) -> AboveFloor | None:
    """The gap in multiples of the trainer's own noise; None without either."""
    gap, noise = metrics.get(LEADING), (floor or {}).get(LEADING)
    if gap is None or noise is None or gap.value is None or noise.value is None:
        return None
    times = METRICS[LEADING].times_floor(gap.value, noise.value)
    row = AboveFloor(LEADING, gap.value, noise.value, times)
    if times == BELOW_RESOLUTION or None in (gap.low, gap.high, noise.low, noise.high):
        return row
    assert gap.low is not None and gap.high is not None
    assert noise.low is not None and noise.high is not None
    if gap.low > 0 and noise.low > 0:
        return replace(row, low=gap.low / noise.high, high=gap.high / noise.low)
    return row


def _value(metrics: Metrics, key: str) -> float | None:
    """None where it was not measured, or is not among the metrics."""
    estimate = metrics.get(key)
    return None if estimate is None else estimate.value


def _beside_expected(metrics: Metrics, expected: Expected | None) -> BesideExpected | None:
    """None without a gap, or within the range of other models, which says nothing of this one."""
    gap = _value(metrics, LEADING)
    if expected is None or gap is None:
        return None
    place = position_in_range(gap, expected)
    if place != "above" and not expected.of_this_trace:
        return None
    return BesideExpected(gap, place, expected_sentence(gap, expected))


def _tail(metrics: Metrics, tokens: int) -> Tail | None:
    """None if the bulk of the tokens explains k3.

    The median would not do: half of a model's tokens are certain and have no gap at any precision.
    """
    kl, p95 = _value(metrics, "k3"), _value(metrics, "abs_d_p95")
    if kl is None or p95 is None or kl <= 0 or tokens < _FEWEST_TOKENS:
        return None
    spread = p95 / _NORMAL_P95
    bulk = spread**2 / 2
    if kl <= _TAIL * bulk:
        return None
    return Tail(kl, spread, bulk, kl / bulk if bulk > 0 else None)


def _is_for(row: Published, kind: _Kind) -> bool:
    """Whether a limit is about models and precisions like these."""
    return row.family in ("", kind.family) and row.precision in ("", kind.precision)


def _nearest(
    pairs: Mapping[str, Metrics], floor: Metrics | None, kind: _Kind
) -> list[MeasuredElsewhere]:
    """The measured rows of this family for metrics of these pairs: same precision first, then
    the nearest. After those of the gap come those of a trainer's own noise, if it was measured.
    """
    main = next(iter(pairs.values()))
    families = ("", kind.family)
    rows = [row for row in reference().measured if not kind.family or row.family in families]
    of_gap = [(row, pairs.get(row.pair, main)) for row in rows if row.pair != FLOOR]
    of_noise = [(row, floor) for row in rows if row.pair == FLOOR] if floor else []
    return [*_closest(of_gap, kind, _NEAREST), *_closest(of_noise, kind, _NEAREST_NOISE)]


def _closest(
    rows: Sequence[tuple[MeasuredRange, Metrics]], kind: _Kind, number: int
) -> list[MeasuredElsewhere]:
    """So many rows, each with the value of its metric here."""
    candidates = []
    for row, metrics in rows:
        value = _value(metrics, row.metric)
        if value is not None:
            unlike = not row.precision or row.precision != kind.precision
            here = MeasuredElsewhere(**vars(row), value=value)
            candidates.append((unlike, _distance(row, value), here))
    ordered = sorted(candidates, key=lambda candidate: candidate[:2])
    return [row for *_, row in ordered[:number]]


def _distance(row: MeasuredRange, value: float) -> float:
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


def sentences(assessment: Assessment) -> Iterator[str]:
    """An assessment in words, sentence by sentence."""
    yield _floor_sentence(assessment.floor)
    if assessment.expected is not None:
        yield assessment.expected.sentence
    yield from limit_sentences(assessment.bars)
    judged = [row for row in assessment.bars if row.is_judged]
    if any(row.low is None and not row.few_prompts for row in judged):
        yield "Numbers without an interval are compared by their value alone."
    if assessment.tail is not None:
        yield _tail_sentence(assessment.tail.times)


def _floor_sentence(floor: AboveFloor | None) -> str:
    if floor is None:
        return "The trainer's own noise was not measured, so its share of the gap is unknown."
    times, low, high = floor.times, floor.low, floor.high
    if not isinstance(times, float):
        return "The trainer's own noise is below 1e-7 nats, too small for a ratio."
    if low is None or high is None:
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


def limit_sentences(bars: Sequence[LimitRow]) -> list[str]:
    """How many limits hold for each pair, an exceeded one's first, and how sure that is."""
    pairs = dict.fromkeys(row.pair for row in bars)
    exceeded = {row.pair for row in bars if row.standing == EXCEEDED}
    texts = [
        _OF_PAIR.get(pair, "") + tally([row for row in bars if row.pair == pair])
        for pair in sorted(pairs, key=lambda pair: pair not in exceeded)
    ]
    if any(row.standing == UNDECIDED and row.power is None for row in bars):
        texts.append(
            f"Undecided values come from too few prompts: they may be {WITHOUT_INTERVAL:g} times "
            "as large, or as small."
        )
    return texts


def tally(bars: Sequence[LimitRow]) -> str:
    """`7 of 9 published limits hold, 2 are undecided, exceeded: Tinker (2), verl.`"""
    words = [row.standing for row in bars]
    parts = [f"{words.count(HOLDS)} of {len(bars)} published limits hold"]
    undecided = words.count(UNDECIDED)
    if undecided:
        parts.append(f"{undecided} {'is' if undecided == 1 else 'are'} undecided")
    for level, text in _BEYOND.items():
        names = Counter(row.publisher for row in bars if row.level == level)
        if names:
            listed = (f"{name} ({n})" if n > 1 else name for name, n in names.items())
            parts.append(f"{text}: {', '.join(listed)}")
    reasons = Counter(row.reason for row in bars if row.standing == UNJUDGED)
    parts += [f"{n} could not be judged: {reason}" for reason, n in reasons.items()]
    return ", ".join(parts) + "."


def strictest_first(bars: Sequence[LimitRow]) -> list[LimitRow]:
    """Limits on one metric, the one that it exceeds most first."""
    return sorted(bars, key=lambda row: (_ORDER.index(row.standing), _strictness(row)))


def _strictness(row: LimitRow) -> float:
    """Smaller for a stricter bound; of a range, by its width."""
    bound = row.healthy
    if not isinstance(bound, int | float):
        low, high = bound
        return float(high - low)
    return float(-bound if row.direction == "min" else bound)


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
