"""Whether limits hold: every limit compared with its measurement, in one object behind every
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from mismatch_cli.base import numbers
from mismatch_cli.diagnosis.diagnose import Findings, diagnose
from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.dialects import MetricReading
from mismatch_cli.limits.assess import LEADING
from mismatch_cli.limits.judge import (
    BOUNDS,
    HOLDS,
    UNDECIDED,
    Number,
    Range,
    Standing,
    judge,
)
from mismatch_cli.limits.limit_sets import (
    DIAGNOSIS,
    FACTORS,
    FAULTS,
    OF_BASELINE,
    OF_EXPECTED,
    OF_FLOOR,
    WHOLE_INTERVAL,
    CheckRow,
    Limit,
    LimitSet,
)
from mismatch_cli.limits.manifest_sides import family
from mismatch_cli.limits.published import for_other_models
from mismatch_cli.metrics.estimate import FEW_DECIDE, FLOOR_RESOLUTION
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.studies.diagnosis import gather_evidence
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.studies.study import Study, folders_of
from mismatch_cli.trace.origin import Shortfall
from mismatch_cli.trace.reader import Trace


@dataclass(frozen=True)
class MeasuredMetric(Number):
    """A metric's measurement with what relative limits refer to."""

    floor: float | None = None
    expected: float | None = None  # the largest value without a fault
    # What the value consists of, for the sentence that says why a limit does not hold
    detail: str = ""
    # Its interval claims too much, since a few prompts decide the value
    few_decide: bool = False


@dataclass(frozen=True)
class Check:
    """A limit with its measurement, and what the judge says of it."""

    limits: str  # the name of its set
    limit: Limit
    measured: MeasuredMetric
    standing: Standing
    # The bound as a value of the metric; for a factor, as a distance from agreement
    allowed: float | None
    reference: float | None  # the floor's, the baseline's or the expected value

    @property
    def holds(self) -> bool:
        """Whether the gate lets it pass.

        Where the interval contains the bound, the value decides, unless the limit asks for the
        whole interval.
        """
        if self.standing.word != UNDECIDED:
            return self.standing.word == HOLDS
        if self.limit.decide == WHOLE_INTERVAL and self.measured.has_interval:
            return True
        return not self.standing.is_beyond

    @property
    def is_judged(self) -> bool:
        """Whether there was a value to compare with the limit."""
        return self.standing.is_judged

    @property
    def status(self) -> str:
        """`holds`, `exceeded`, `undecided` or, without a value, `unjudged`."""
        return self.standing.word

    @property
    def reason(self) -> str:
        """Why the limit does not hold, is undecided or cannot be judged; empty if it holds."""
        if self.standing.word == HOLDS:
            return ""
        reason = self.standing.reason
        if self.is_judged and self.limit.bound in FACTORS and self.limit.agreement:
            reason += f", both as distances from {self.limit.agreement:g}"
        if self.is_judged and self.measured.detail:
            reason += f": {self.measured.detail}"
        return reason


class Findable(Protocol):
    """What limits are checked on."""

    def find(self, limit: Limit) -> MeasuredMetric:
        """The measurement of a limit's metric, or why there is none."""


class PooledMetrics:
    """The pooled metrics of some traces: the summary that `report` prints, and frameworks' own
    metrics on request.
    """

    def __init__(
        self, traces: Sequence[Trace], frameworks: Sequence[str], workers: Workers = ALONE
    ) -> None:
        self.traces = traces
        self.result = analyse_mismatch(traces, 0, workers).result
        self.diagnosis = None
        if DIAGNOSIS in frameworks:
            self.diagnosis = diagnose(gather_evidence(traces, workers))
        self._readings: dict[str, MetricReading] = {}
        dashboards = [name for name in frameworks if name != DIAGNOSIS]
        if dashboards:
            readings = dialects.readings(traces, dashboards, workers)
            for name, of_framework in readings.by_framework.items():
                for reading in of_framework:
                    self._readings[f"{name}:{reading.line.name}"] = reading

    def find(self, limit: Limit) -> MeasuredMetric:
        """The measurement of a limit's metric, or why there is none."""
        if self.diagnosis is not None and limit.framework == DIAGNOSIS:
            return _diagnosed(limit.metric.removeprefix(f"{DIAGNOSIS}:"), self.diagnosis)
        if limit.framework:
            reading = self._readings[limit.metric]
            return MeasuredMetric(reading.value, pair=reading.line.pair, why=reading.why)
        why = for_other_models(limit.family, family(self.result.about.manifest))
        if why:
            return MeasuredMetric(pair=limit.pair, why=why)
        return self._own_metric(limit)

    def _own_metric(self, limit: Limit) -> MeasuredMetric:
        """The measurement of a metric of ours, from the summary."""
        pairs = {name: pair.metrics for name, pair in self.result.pairs.items()}
        number = Number.of(pairs, limit.metric, limit.pair)
        if number.value is None:
            return MeasuredMetric(pair=number.pair, why=number.why)
        estimate = pairs[number.pair][limit.metric]
        measured = MeasuredMetric(**vars(number), few_decide=estimate.note == FEW_DECIDE)
        if estimate.noise:
            measured = replace(measured, floor=estimate.noise.floor)
        if limit.metric == LEADING and number.pair == self.result.main.pair:
            measured = replace(measured, expected=self.result.expected.high)
        return measured


def _diagnosed(name: str, diagnosis: Findings) -> MeasuredMetric:
    """How many faults were found, or whether one check found something; an impossible check is
    not measured.
    """
    pair = diagnosis.evidence.pair.name
    if name == FAULTS:
        faults = [finding.check for finding in diagnosis.faults]
        return MeasuredMetric(float(len(faults)), pair=pair, detail=", ".join(faults))
    finding = next(finding for finding in diagnosis.findings if finding.check == name)
    if finding.status == "untested":
        return MeasuredMetric(pair=pair, why=finding.reason)
    return MeasuredMetric(float(finding.status == "found"), pair=pair, detail=finding.sentence)


def check_limits(
    sets: Sequence[LimitSet], measured: Findable, baseline: Findable | None
) -> list[Check]:
    """Every limit of every set, in order; relative limits need a baseline."""
    checks = []
    for limit_set in sets:
        for limit in limit_set.limits:
            checks.append(_check(limit_set.name, limit, measured, baseline))
    return checks


def _check(name: str, limit: Limit, metrics: Findable, baseline: Findable | None) -> Check:
    measured = metrics.find(limit)
    if measured.value is None:
        return Check(name, limit, measured, judge(measured, Range()), None, None)
    reference, why = _reference(limit, measured, baseline)
    if why:
        return Check(name, limit, measured, judge(Number(why=why), Range()), None, None)
    allowed = _allowed(limit, reference)
    standing = judge(
        _comparable(limit, measured), Range.of({_bound_of_value(limit.bound): allowed})
    )
    return Check(name, limit, measured, standing, allowed, reference)


def _bound_of_value(bound: str) -> str:
    """The bound of a file of limits as one of a value."""
    if bound in BOUNDS:
        return bound
    return "min" if bound == "max_below_baseline" else "max"


def _reference(
    limit: Limit, measured: MeasuredMetric, baseline: Findable | None
) -> tuple[float | None, str]:
    """The number that a relative limit starts from, or why there is none; neither for an absolute
    limit.
    """
    if limit.bound in OF_BASELINE:
        assert baseline is not None
        # The pair of the traces counts, whatever pair comes first in the baseline.
        earlier = baseline.find(replace(limit, pair=measured.pair))
        reference = earlier.value
        why = f"in the baseline: {earlier.why}"
    elif limit.bound == OF_FLOOR:
        reference = measured.floor
        why = "the trace has no noise floor (noise_responses)"
    elif limit.bound == OF_EXPECTED:
        reference = measured.expected
        why = f"what is expected of the {measured.pair} pair is not known"
    else:
        return None, ""
    if reference is None:
        return None, why
    return reference, ""


def _allowed(limit: Limit, reference: float | None) -> float:
    """The bound as a value of the metric; for a factor, as a distance from agreement."""
    if reference is None:
        return limit.threshold
    if limit.bound == "max_above_baseline":
        return reference + limit.threshold
    if limit.bound == "max_below_baseline":
        return reference - limit.threshold
    if limit.bound == OF_EXPECTED:
        return limit.threshold * reference
    distance = abs(reference - limit.agreement)
    if limit.bound == OF_FLOOR:
        distance = max(distance, FLOOR_RESOLUTION)  # anything below is indistinguishable from zero
    return limit.threshold * distance


def _comparable(limit: Limit, measured: MeasuredMetric) -> Number:
    """The number to compare with `allowed`: for a factor, its distance from agreement."""
    if limit.bound not in FACTORS or measured.value is None:
        return measured
    ideal = limit.agreement
    distance = Number(abs(measured.value - ideal), few_prompts=measured.few_prompts)
    if measured.low is None or measured.high is None:
        return distance
    low, high = sorted((abs(measured.low - ideal), abs(measured.high - ideal)))
    if measured.low <= ideal <= measured.high:
        low = 0.0  # some value of the interval agrees
    return replace(distance, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """What docs/json/gate.md describes."""

    traces: Sequence[str]
    baseline: Sequence[str] | None
    passed: bool
    status: str
    verdict: str
    partial: Sequence[Shortfall]
    allow_partial: bool
    checks: Sequence[CheckRow]


@dataclass(frozen=True)
class GateAnalysis(Study):
    """The checks of every set of limits on some traces, with or without a baseline."""

    STUDY, FORMAT = "gate", "mismatch-cli gate"

    sets: Sequence[LimitSet]
    checks: Sequence[Check]
    measured: PooledMetrics
    baseline: PooledMetrics | None = None
    allow_partial: bool = False  # whether incomplete traces may pass

    @classmethod
    def of(
        cls,
        sets: Sequence[LimitSet],
        traces: Sequence[Trace],
        baseline: Sequence[Trace],
        *,
        allow_partial: bool = False,
        workers: Workers = ALONE,
    ) -> GateAnalysis:
        """Measure the traces, and the baseline if there is one, and check every limit."""
        frameworks = frameworks_of(sets)
        measured = PooledMetrics(traces, frameworks, workers)
        earlier = None
        if baseline:
            earlier = PooledMetrics(baseline, frameworks, workers)
        return cls(sets, check_limits(sets, measured, earlier), measured, earlier, allow_partial)

    @cached_property
    def failed(self) -> list[Check]:
        """What does not hold, and after it what could not be judged: neither opens a gate."""
        return self.exceeded + self.unjudged

    @property
    def exceeded(self) -> list[Check]:
        """What does not hold: all of its interval is beyond the limit, or its value decides."""
        return [check for check in self.checks if check.is_judged and not check.holds]

    @property
    def unjudged(self) -> list[Check]:
        return [check for check in self.checks if not check.is_judged]

    @cached_property
    def partial(self) -> list[Shortfall]:
        """What each partial trace lacks, including the baseline's."""
        partial = list(self.measured.result.about.partial)
        if self.baseline is not None:
            partial += self.baseline.result.about.partial
        return partial

    @property
    def refused(self) -> str:
        """Why the traces fail whatever the limits say: missing data must not open a gate.

        Empty if they may pass.
        """
        if self.allow_partial or not self.partial:
            return ""
        lacking = "; ".join(f"{each.trace}: {', '.join(each.reasons)}" for each in self.partial)
        return f"{lacking}. A partial trace fails unless you allow it: --allow-partial"

    @property
    def passed(self) -> bool:
        return not self.failed and not self.refused

    @property
    def status(self) -> str:
        """`passed`, `failed`, or `unjudged` if no limit is exceeded but some have no value."""
        if self.passed:
            return "passed"
        if self.exceeded or self.refused:
            return "failed"
        return "unjudged"

    @property
    def verdict(self) -> str:
        """Whether it passed, and why."""
        answers = {"passed": "Passed", "failed": "Failed", "unjudged": "Could not be judged"}
        return f"{answers[self.status]}: {self.reason}"

    @property
    def reason(self) -> str:
        """How many limits hold, which do not or have no value, and why the traces are refused."""
        total = len(self.checks)
        if self.passed:
            return f"{self._all_hold}{self._undecided}."
        sentences = []
        if self.exceeded:
            limits = "; ".join(map(_exceeded, self.exceeded))
            verb = "do" if len(self.exceeded) > 1 else "does"
            sentences.append(f"{_count_of(self.exceeded, total)} {verb} not hold: {limits}.")
        if self.unjudged:
            limits = "; ".join(f"{subject(check)}: {check.reason}" for check in self.unjudged)
            sentences.append(f"{_count_of(self.unjudged, total)} could not be judged: {limits}.")
        if self.refused:
            sentences.append(f"{self.refused}.")
        return " ".join(sentences)

    @property
    def _all_hold(self) -> str:
        total = len(self.checks)
        if total > 1:
            return f"{total} of {total} limits hold"
        return "The limit holds"

    @property
    def _undecided(self) -> str:
        """How many limits pass although their intervals contain them."""
        undecided = [check for check in self.checks if check.status == UNDECIDED]
        if not undecided:
            return ""
        if len(self.checks) == 1:
            return ", but is undecided: the interval contains it"
        return f", {len(undecided)} of them undecided: the interval contains the limit"

    @cached_property
    def result(self) -> GateResult:
        """What `--json` prints."""
        baseline = None
        if self.baseline is not None:
            baseline = folders_of(self.baseline.traces)
        return GateResult(
            traces=folders_of(self.measured.traces),
            baseline=baseline,
            passed=self.passed,
            status=self.status,
            verdict=self.verdict,
            partial=self.partial,
            allow_partial=self.allow_partial,
            checks=list(map(check_row, self.checks)),
        )


def _exceeded(check: Check) -> str:
    """A limit that does not hold; an undecided one with what decided."""
    limit = f"{subject(check)} {check.limit.text}"
    if check.status == UNDECIDED:
        return f"{limit} (by its value; undecided)"
    return limit


def _count_of(checks: Sequence[Check], total: int) -> str:
    """How many of all limits these are, as the beginning of a sentence."""
    if total > 1:
        return f"{len(checks)} of {total} limits"
    return "The limit"


def frameworks_of(sets: Sequence[LimitSet]) -> list[str]:
    """The frameworks whose own metrics these limits name."""
    frameworks: set[str] = set()
    for limit_set in sets:
        frameworks.update(limit.framework for limit in limit_set.limits)
    return sorted(frameworks - {""})


def subject(check: Check) -> str:
    """The metric as the limits name it, and its pair."""
    return f"{check.limit.metric} ({check.measured.pair})"


def measured_parts(check: Check) -> tuple[str, str]:
    """The value and its 95 % interval, each a dash if there is none."""
    measured = check.measured
    value, interval = numbers.estimate(measured.value, measured.low, measured.high)
    if interval == numbers.MISSING:
        return _number_text(check, measured.value), interval
    if measured.few_decide:
        value += numbers.FEW
    return value, interval


def measured_text(check: Check) -> str:
    """The value, with its interval if it has one."""
    value, interval = measured_parts(check)
    if interval == numbers.MISSING:
        return value
    return f"{value} {interval}"


def limit_text(check: Check) -> str:
    """The bound in words; a relative bound with its reference."""
    text = check.limit.text.replace("floor", "noise")
    if check.reference is not None:
        name = {OF_FLOOR: "noise", OF_EXPECTED: "expected"}.get(check.limit.bound, "baseline")
        text += f"; {name} {_number_text(check, check.reference)}"
    if check.limit.decide == WHOLE_INTERVAL:
        text += " (95 % sure)"
    return text


def _number_text(check: Check, value: float | None) -> str:
    if check.limit.framework == DIAGNOSIS and value is not None:
        return numbers.count(int(value))
    if check.limit.agreement == 1:
        return numbers.near(value, 1)
    return numbers.number(value, 4)


def source_text(check: Check) -> str:
    """A limit's source and reason."""
    return "; ".join(filter(None, (check.limit.source, check.limit.why)))


def check_row(check: Check) -> CheckRow:
    """A check as a row of the JSON."""
    limit = check.limit
    measured = check.measured
    return CheckRow(
        limits=check.limits,
        metric=limit.metric,
        pair=measured.pair,
        value=measured.value,
        low=measured.low,
        high=measured.high,
        bound=limit.bound,
        threshold=limit.threshold,
        decide=limit.decide,
        reference=check.reference,
        allowed=check.allowed,
        holds=check.holds,
        status=check.status,
        reason=check.reason or None,
        power=check.standing.power,
        source=limit.source,
        why=limit.why,
    )
