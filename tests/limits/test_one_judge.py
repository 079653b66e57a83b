"""Every published limit at, below and above its bounds: all commands say the same word."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.limits.assess import Assessment, assess
from mismatch_cli.limits.judge import (
    BROKEN,
    EXCEEDED,
    HEALTHY,
    HOLDS,
    UNDECIDED,
    UNJUDGED,
    Number,
    Range,
    judge,
)
from mismatch_cli.limits.limit_sets import load_limits, parse_limits
from mismatch_cli.limits.published import Published, published
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.pair_summary import MetricEstimate
from mismatch_cli.metrics.update_table import OF_STEP
from mismatch_cli.studies.dashboard import QuotedNumber
from mismatch_cli.studies.gate import Findable, MeasuredMetric, PooledMetrics, check_limits
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace
from mismatch_cli.watch.watched_step import StepChecks

ARCHITECTURES = {"dense": "LlamaForCausalLM", "moe": "Qwen3MoeForCausalLM", "": ""}
OF_PAIRS = {"mismatch": "mismatch", "total": "current"}  # keys of metrics.jsonl


def cases(row: Published) -> Iterator[tuple[float, str, str]]:
    """A value, and the judge's word and level."""
    healthy, broken = (upper(row, level) for level in (HEALTHY, BROKEN))
    ours = METRICS.get(row.metric)
    agreement = 1.0 if row.direction == "min" else (ours and ours.agreement) or 0.0
    yield agreement + (healthy - agreement) / 2, HOLDS, ""
    yield healthy, HOLDS, ""
    if healthy != broken:
        yield (healthy + broken) / 2, EXCEEDED, HEALTHY
        yield broken, EXCEEDED, HEALTHY
    beyond = broken / 2 if row.direction == "min" else agreement + (broken - agreement) * 2
    yield beyond, EXCEEDED, BROKEN


def upper(row: Published, level: str) -> float:
    """The bound; of a range, the upper one."""
    return next(reversed(row.bounds(level).values()))


def about(row: Published) -> dict:
    """A manifest of a run for which the limit is."""
    quantised = {"quantization": "fp8"} if row.precision == "fp8" else {}
    side = {"architecture": ARCHITECTURES[row.family], "dtype": "bfloat16"} | quantised
    return {"rollout": side, "trainer": side, "config": {"sampling": {}}}


def in_report(row: Published, value: float, pair: str) -> Assessment:
    return assess({pair: {row.metric: Estimate(value)}}, about(row), tokens=10)


@pytest.fixture(scope="module")
def measurement() -> PooledMetrics:
    return PooledMetrics([Trace.open(bundled("traces") / "float32")], [])


def measured(measurement: PooledMetrics, row: Published, value: float, pair: str) -> Findable:
    """What `report` and `gate` find in a trace, with one number in place of its own."""
    if ":" in row.metric:
        metric = (
            MeasuredMetric(value, pair=pair)
            if pair == row.pair
            else MeasuredMetric(pair=pair, why="not measured")
        )
        return SimpleNamespace(find=lambda _: metric)
    other = copy(measurement)
    metrics = {row.metric: MetricEstimate(value)}
    pairs = {pair: replace(measurement.result.main, pair=pair, metrics=metrics)}
    other.result = replace(measurement.result, about=About(**about(row)), pairs=pairs)
    return other


@pytest.mark.parametrize("row", published(), ids=lambda row: row.who)
def test_every_command_says_the_same(row, measurement):
    judged = [(value, row.pair, word, level) for value, word, level in cases(row)]
    other = "staleness"
    judged.append((upper(row, HEALTHY), other, UNJUDGED, ""))
    for value, pair, word, level in judged:
        at = f"{row.who}: {row.metric} = {value} ({pair})"
        if ":" not in row.metric:
            bars = in_report(row, value, pair).bars
            (of_report,) = [each for each in bars if each.who == row.who]
            assert (of_report.standing, of_report.level) == (word, level), at
            if pair != other:
                of_number = QuotedNumber.of("mismatch", row.metric, value).judged(about(row))
                (typed,) = [each for each in of_number.bars if each.who == row.who]
                assert (typed.standing, typed.level) == (word, level), at
        elif pair != other:
            framework, _, name = row.metric.partition(":")
            of_number = QuotedNumber.of(framework, name, value).judged(about(row))
            assert [each.standing for each in of_number.bars] == [word], at
        for name, limit_level in ((row.gate, BROKEN), (f"{row.gate}-{HEALTHY}", HEALTHY)):
            if not row.gate or (limit_level == HEALTHY and not row.has_two_levels):
                continue
            limits = load_limits(name)
            own = (each for each in limits.limits if each.source.startswith(f"{row.who}: "))
            sets = [replace(limits, limits=tuple(own))]
            number = measured(measurement, row, value, pair)
            is_within = (word, level, limit_level) == (EXCEEDED, HEALTHY, BROKEN)
            expected = HOLDS if is_within else word
            # Of a range, the last is the bound that the value is beyond
            assert check_limits(sets, number, None)[-1].status == expected, f"{name}: {at}"
            if row.metric in OF_STEP.values() and row.family == "":
                field = next(name for name, key in OF_STEP.items() if key == row.metric)
                record = {"step": 1, OF_PAIRS.get(pair, "none"): {field: value}}
                (check,) = StepChecks(sets).of_record(record, None)
                assert check.status == expected, f"watch --limits {name}: {at}"


def test_a_limit_for_models_of_another_kind_says_nothing(measurement):
    """`gate` fails on it, `report` and `verdict` leave it out."""
    moe = next(row for row in published() if row.gate == "miles-moe")
    dense = next(row for row in published() if row.gate == "miles")
    sets = [load_limits("miles-moe")]
    (check,) = check_limits(sets, measured(measurement, dense, 1e-5, "mismatch"), None)
    assert (check.status, check.holds) == (UNJUDGED, False)
    assert check.reason == "the limit is for mixtures of experts, and this model is not one of them"
    bars = in_report(dense, 1e-5, "mismatch").bars
    assert moe.who not in [row.who for row in bars]


def test_equal_weights_have_one_gap_and_staleness_says_nothing_of_it():
    limit = next(row for row in published() if row.gate == "nemo-rl" and row.metric == "k3")
    stale = next(row for row in published() if row.gate == "prime-rl")
    words = {}
    for pair in ("mismatch", "total"):
        rows = in_report(stale, 0.02, pair).bars
        words[pair] = {row.who: (row.standing, row.reason) for row in rows}
    assert words["mismatch"][stale.who] == words["total"][stale.who]
    assert words["total"][limit.who] == (
        UNJUDGED,
        "the number includes staleness, but the limit is for equal weights",
    )


def test_the_interval_decides_and_its_half_is_the_power():
    allowed, broken = Range(high=0.01), Range(high=0.02)
    for (value, half), word, level in (
        ((0.005, 0.004), HOLDS, ""),
        ((0.009, 0.004), UNDECIDED, ""),
        ((0.011, 0.004), UNDECIDED, ""),
        ((0.015, 0.004), EXCEEDED, HEALTHY),
        ((0.019, 0.004), EXCEEDED, HEALTHY),
        ((0.025, 0.004), EXCEEDED, BROKEN),
    ):
        standing = judge(Number(value, value - half, value + half), allowed, broken)
        assert (standing.word, standing.level) == (word, level), value
        assert standing.power == pytest.approx(half)
        assert standing.is_beyond == (value > 0.01)
    standing = judge(Number(0.019, 0.015, 0.023), allowed, broken)
    assert standing.reason == "0.019 is above 0.01; 0.019 is below 0.02, undecided: 0.015 to 0.023"
    assert judge(Number(float("nan")), allowed).reason == "not a number"
    assert judge(Number(float("nan")), allowed).word == EXCEEDED


def test_what_float32_rounds_away_is_relative_to_the_distance_from_agreement():
    """A correlation of 0.999 is 0.001 from agreement, and a millionth of that is rounding."""
    for bound, agreement, direction in ((0.1, 0.0, 1), (0.999, 1.0, -1), (1.05, 1.0, 1)):
        allowed = Range(high=bound) if direction > 0 else Range(low=bound)
        distance = abs(bound - agreement)
        for times, word in ((0.5e-6, HOLDS), (2e-6, EXCEEDED)):
            value = bound + direction * times * distance
            assert judge(Number(value, agreement=agreement), allowed).word == word


def test_what_is_infinite_crosses_the_bound_that_it_is_beyond():
    """It is equally far from both, of which a limit often has but one."""
    for value, allowed, reason in (
        (inf, Range(high=0.015), "inf is above 0.015"),
        (-inf, Range(low=0.5), "-inf is below 0.5"),
        (inf, Range(-0.1, 0.1), "inf is above 0.1"),
        (-inf, Range(-0.1, 0.1), "-inf is below -0.1"),
        (0.5, Range(0.1, 0.2), "0.5 is above 0.2"),
    ):
        standing = judge(Number(value), allowed)
        assert (standing.word, standing.reason) == (EXCEEDED, reason)
    assert Range(0.1, 0.2).nearest_bound(0.12) == 0.1 and Range(0.1, 0.2).nearest_bound(0.18) == 0.2


def test_a_value_and_its_bound_are_told_apart():
    for number, allowed, reason in (
        (Number(0.9989995, agreement=1.0), Range(low=0.999), "0.9989995 is below 0.999"),
        (Number(0.0123456789), Range(high=0.01), "0.0123457 is above 0.01"),
        (
            Number(0.01, 0.005, 0.02),
            Range(high=0.01),
            "0.01 is the bound, undecided: 0.005 to 0.02",
        ),
    ):
        assert judge(number, allowed).reason == reason


def test_a_recorded_ratio_is_as_far_from_agreement_as_one_of_a_trace():
    """A line of metrics.jsonl has the tolerance of a trace: a millionth of the distance from 1."""
    sets = [parse_limits({"limits": {"ratio_p01": {"min": 0.999}}}, "mine")]
    for value, word in ((0.999 - 5e-10, HOLDS), (0.999 - 5e-9, EXCEEDED)):
        record = {"step": 1, "mismatch": {"ratio_p01": value}}
        (check,) = StepChecks(sets).of_record(record, None)
        assert check.status == word
    (check,) = StepChecks(sets).of_record({"step": 1, "current": {"ratio_p50": 1.0}}, None)
    assert check.status == UNJUDGED and "metrics.jsonl does not have it" in check.reason


def test_a_bound_of_0_has_no_tolerance_and_allows_0():
    """As for `diagnosis:faults`, of which there may be none."""
    none, positive = Range(high=0.0), Range(low=0.0)
    for number, allowed, word in (
        (Number(0.0), none, HOLDS),
        (Number(0.0), positive, HOLDS),
        (Number(1.0), none, EXCEEDED),
        (Number(-1e-9), positive, EXCEEDED),
        (Number(0.1, 0.0, 0.2), none, UNDECIDED),
        (Number(-0.1, -0.2, 0.0), positive, UNDECIDED),
    ):
        assert judge(number, allowed).word == word


def test_few_prompts_leave_the_distance_from_agreement_uncertain_by_a_factor():
    """By 3.5 either way: a ratio of 1.07 is between 1.02 and 1.245, never on the other side of 1."""
    for value, agreement, low, high in (
        (1.07, 1.0, 1.02, 1.245),
        (0.93, 1.0, 0.755, 0.98),
        (0.07, 0.0, 0.02, 0.245),
        (-0.07, 0.0, -0.245, -0.02),
    ):
        may_be = Number(value, few_prompts=True, agreement=agreement).range
        assert (may_be.low, may_be.high) == (pytest.approx(low), pytest.approx(high))
    # Half an interval is none
    for number in (Number(1.0, 0.5, None), Number(1.0, None, 2.0), Number(1.0)):
        assert not number.has_interval and number.range == Range(1.0, 1.0)
        assert judge(number, Range(high=1.5)).power is None
    whole = Number(1.0, 0.5, 2.0, few_prompts=True)
    assert whole.has_interval and whole.range == Range(0.5, 2.0)
    assert judge(whole, Range(high=1.5)).power == 1.0
