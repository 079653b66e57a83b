"""A summary compared with the trainer's own noise, published limits, and what others measured.

The limits disagree by an order of magnitude, so they are never merged into one: each keeps its
source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
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
from mismatch_cli.metrics.estimate import BELOW_RESOLUTION, FEWEST_PROMPTS, Estimate
from mismatch_cli.metrics.gap_table import METRICS

LEADING = "abs_d_mean"  # compared with the floor, and with what is expected without a fault
FLOOR = "floor"  # the pair of a trainer with itself
# A number among all published limits, beside `healthy` and `undecided`
BETWEEN, ABOVE, MIXED = "between", "above", "mixed"
_NORMAL_P95 = 1.959964  # of |x| for a standard normal distribution
_TAIL = 3.0  # a KL this many times what the bulk would give comes from the tail
_FEWEST_TOKENS = 200  # ten of them beyond p95
# Rows of values measured elsewhere: of the gap, and of a trainer's own noise
_GAPS_SHOWN, _NOISES_SHOWN = 5, 2

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

    @property
    def is_judged_by_value(self) -> bool:
        """Whether the value alone decided, as it has no interval although its prompts suffice."""
        return self.is_judged and self.low is None and not self.few_prompts


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

    @property
    def is_above_expected(self) -> bool:
        """Whether the gap is larger than the precisions and settings on record make it."""
        return self.expected is not None and self.expected.standing == "above"


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
    bars = [_judged_row(limit, pairs) for limit in published() if _applies(limit, pairs, kind)]
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
        measured=_nearest_measured(pairs, floor or {}, kind),
    )
    return replace(assessment, sentences=list(sentences(assessment)))


def status(bars: Sequence[LimitRow]) -> str:
    """A number among all limits: `above` all, `mixed` (above some), else the least certain;
    empty if no limit could be judged.
    """
    judged = {(row.standing, row.level) for row in bars if row.is_judged}
    standings = {standing for standing, _ in judged}
    if (EXCEEDED, BROKEN) in judged:
        return ABOVE if len(judged) == 1 else MIXED
    if EXCEEDED in standings:
        return BETWEEN
    if UNDECIDED in standings:
        return UNDECIDED
    return HEALTHY if judged else ""


def _applies(limit: Published, pairs: Mapping[str, Metrics], kind: _Kind) -> bool:
    """Whether a limit is for models and precisions like these, and some pair has its metric."""
    if limit.family not in ("", kind.family) or limit.precision not in ("", kind.precision):
        return False
    return any(limit.metric in metrics for metrics in pairs.values())


def _judged_row(limit: Published, pairs: Mapping[str, Metrics]) -> LimitRow:
    """A limit, and what the judge says of the number that it applies to."""
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
    """The gap in multiples of the trainer's own noise; None unless both were measured."""
    gap = metrics.get(LEADING, Estimate(None))
    noise = (floor or {}).get(LEADING, Estimate(None))
    if gap.value is None or noise.value is None:
        return None
    times = METRICS[LEADING].times_floor(gap.value, noise.value)
    row = AboveFloor(LEADING, gap.value, noise.value, times)
    gap_interval = _positive_interval(gap)
    noise_interval = _positive_interval(noise)
    if times == BELOW_RESOLUTION or gap_interval is None or noise_interval is None:
        return row
    # How the errors of the two are related is unknown: each end is the worst case of both.
    gap_low, gap_high = gap_interval
    noise_low, noise_high = noise_interval
    return replace(row, low=gap_low / noise_high, high=gap_high / noise_low)


def _positive_interval(estimate: Estimate) -> tuple[float, float] | None:
    """An interval above 0, by which one can divide; None for any other, or without one."""
    if estimate.low is not None and estimate.high is not None and estimate.low > 0:
        return estimate.low, estimate.high
    return None


def _value(metrics: Metrics, key: str) -> float | None:
    """The value of a metric; None where it was not measured, or is not among the metrics."""
    return metrics.get(key, Estimate(None)).value


def _beside_expected(metrics: Metrics, expected: Expected | None) -> BesideExpected | None:
    """The gap beside the expected one; None without either, and for a gap within the range of
    other models or below it, which says nothing of this model.
    """
    gap = _value(metrics, LEADING)
    if expected is None or gap is None:
        return None
    position = position_in_range(gap, expected)
    if position != "above" and not expected.of_this_trace:
        return None
    return BesideExpected(gap, position, expected_sentence(gap, expected))


def _tail(metrics: Metrics, tokens: int) -> Tail | None:
    """How far k3 exceeds what the bulk of the tokens gives; None if the bulk explains it."""
    kl = _value(metrics, "k3")
    p95 = _value(metrics, "abs_d_p95")
    if kl is None or p95 is None or kl <= 0 or tokens < _FEWEST_TOKENS:
        return None
    # The spread of the bulk comes from p95, as the median would not do: half of a model's tokens
    # are certain and have no gap at any precision. With k3 ≈ d² / 2, such a bulk has σ² / 2.
    spread = p95 / _NORMAL_P95
    bulk = spread**2 / 2
    if kl <= _TAIL * bulk:
        return None
    return Tail(kl, spread, bulk, kl / bulk if bulk > 0 else None)


def _nearest_measured(
    pairs: Mapping[str, Metrics], floor: Metrics, kind: _Kind
) -> list[MeasuredElsewhere]:
    """What others measured of this family, beside the same metric here: rows of the same precision
    first, then the nearest value. Rows of a trainer's own noise follow those of the gap.
    """
    main = next(iter(pairs.values()))
    of_gap: list[MeasuredElsewhere] = []
    of_noise: list[MeasuredElsewhere] = []
    for row in reference().measured:
        is_noise = row.pair == FLOOR
        metrics = floor if is_noise else pairs.get(row.pair, main)
        value = _value(metrics, row.metric)
        if value is None or (kind.family and row.family not in ("", kind.family)):
            continue
        rows = of_noise if is_noise else of_gap
        rows.append(MeasuredElsewhere(**vars(row), value=value))

    def remoteness(row: MeasuredElsewhere) -> tuple[bool, float]:
        has_same_precision = row.precision != "" and row.precision == kind.precision
        return not has_same_precision, _distance(row)

    of_gap.sort(key=remoteness)
    of_noise.sort(key=remoteness)
    return [*of_gap[:_GAPS_SHOWN], *of_noise[:_NOISES_SHOWN]]


def _distance(row: MeasuredElsewhere) -> float:
    """The log of the factor between the value here and the range measured elsewhere, both as
    distances from the value at agreement; 0 within the range.
    """
    assert row.value is not None
    ideal = METRICS[row.metric].agreement or 0.0
    nearer, farther = sorted((abs(row.low - ideal), abs(row.high - ideal)))
    distance = abs(row.value - ideal)
    if nearer <= distance <= farther:
        return 0.0
    if distance == 0:
        return inf
    bound = nearer if distance < nearer else farther
    return abs(log(distance / bound))


def sentences(assessment: Assessment) -> Iterator[str]:
    """An assessment in words, sentence by sentence."""
    yield _floor_sentence(assessment.floor)
    if assessment.expected is not None:
        yield assessment.expected.sentence
    yield from limit_sentences(assessment.bars)
    if any(row.is_judged_by_value for row in assessment.bars):
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
    by_pair: dict[str, list[LimitRow]] = {}
    for row in bars:
        by_pair.setdefault(row.pair, []).append(row)
    exceeded = {row.pair for row in bars if row.standing == EXCEEDED}
    texts = []
    for pair in sorted(by_pair, key=lambda pair: pair not in exceeded):
        texts.append(_OF_PAIR.get(pair, "") + tally(by_pair[pair]))
    if any(row.standing == UNDECIDED and row.power is None for row in bars):
        texts.append(
            f"Undecided values come from too few prompts (an interval needs {FEWEST_PROMPTS}): "
            f"they may be {WITHOUT_INTERVAL:g} times as large, or as small."
        )
    return texts


_BEYOND = {HEALTHY: "not healthy", BROKEN: "exceeded"}


def tally(bars: Sequence[LimitRow]) -> str:
    """`7 of 9 published limits hold, 2 are undecided, exceeded: Tinker (2), verl.`"""
    standings = Counter(row.standing for row in bars)
    clauses = [f"{standings[HOLDS]} of {len(bars)} published limits hold"]
    undecided = standings[UNDECIDED]
    if undecided:
        verb = "is" if undecided == 1 else "are"
        clauses.append(f"{undecided} {verb} undecided")
    for level, text in _BEYOND.items():
        publishers = Counter(row.publisher for row in bars if row.level == level)
        if publishers:
            clauses.append(f"{text}: {_list_publishers(publishers)}")
    reasons = Counter(row.reason for row in bars if not row.is_judged)
    for reason, limits in reasons.items():
        clauses.append(f"{limits} could not be judged: {reason}")
    return ", ".join(clauses) + "."


def _list_publishers(publishers: Counter[str]) -> str:
    """`Tinker (2), verl`: how many limits each has, if more than one."""
    names = []
    for name, limits in publishers.items():
        names.append(f"{name} ({limits})" if limits > 1 else name)
    return ", ".join(names)


_ORDER = (EXCEEDED, UNDECIDED, HOLDS, UNJUDGED)


def strictest_first(bars: Sequence[LimitRow]) -> list[LimitRow]:
    """Limits on one metric, the one that it exceeds most first."""
    return sorted(bars, key=lambda row: (_ORDER.index(row.standing), _strictness(row)))


def _strictness(row: LimitRow) -> float:
    """A sort key, smaller for a stricter bound; that of a range is its width."""
    bound = row.healthy
    if not isinstance(bound, int | float):
        low, high = bound
        return float(high - low)
    return float(-bound if row.direction == "min" else bound)


def _tail_sentence(times: float | None) -> str:
    if times is None:
        return "Rare tokens cause all of the KL: 95 % of the tokens agree exactly."
    return (
        f"Rare tokens dominate the KL: k3 is {_times(times)} what the other 95 % of the tokens "
        "would give."
    )


_LARGEST_FACTOR = 1000


def _times(factor: float) -> str:
    if factor > _LARGEST_FACTOR:
        return f"more than {_LARGEST_FACTOR} ×"
    return f"{_short(factor)} ×"


def _short(value: float) -> str:
    """Two digits without an exponent where `g` needs none: `1200`, not `1.2e+03`."""
    return f"{float(f'{value:.2g}'):g}"
