"""Numbers from a dashboard, without a trace: which limits hold, what others measured, what
causes such values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.places import guide_pages
from mismatch_cli.frameworks import IMPORTERS, RECORDERS, dialects
from mismatch_cli.limits.assess import (
    LEADING,
    Assessment,
    LimitRow,
    MeasuredElsewhere,
    assess,
    status,
)
from mismatch_cli.limits.expected import expected_gap, position_in_range
from mismatch_cli.limits.manifest_sides import family, precision
from mismatch_cli.limits.published import published
from mismatch_cli.limits.reference import MeasuredRange, reference, usual_gap
from mismatch_cli.limits.suspects import Suspect, suspects, unrecorded_suspects
from mismatch_cli.metrics.estimate import (
    ABOVE_1,
    ABOVE_MINUS_1,
    CORRELATION,
    POSITIVE,
    SAMPLE_SIZE,
    SHARE,
    Estimate,
    Scale,
)
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.studies.metric_names import OWN, framework_metric, is_own, own_metric
from mismatch_cli.studies.study import Study

_FACTOR = 2.0  # how close a value has to be to a known fault's for the fault to be named
_RANGES: dict[Scale, tuple[float, float]] = {
    POSITIVE: (0, inf), ABOVE_1: (1, inf), ABOVE_MINUS_1: (-1, inf), SHARE: (0, 1),
    SAMPLE_SIZE: (0, 1),
    CORRELATION: (-1, 1),
}  # fmt: skip


@dataclass(frozen=True)
class QuotedNumber:
    """A number as a dashboard shows it; `metric` is our metric with the same definition, if
    there is one.
    """

    framework: str
    name: str
    value: float
    formula: str
    pair: str
    metric: str = ""
    note: str = ""

    @classmethod
    def of(cls, framework: str, name: str, value: float) -> QuotedNumber:
        """Find the metric by its name on the dashboard, or by our key or label; a `UsageError` if
        that is ambiguous, unknown, or if the value is out of range.
        """
        if framework == OWN or (not framework and is_own(name)):
            metric = own_metric(name)
            _check_range(name, value, *metric_range(metric))
            return cls(OWN, metric.key, value, metric.formula, "mismatch", metric.key)
        logged = framework_metric(framework, name)
        line = logged.line
        key = dialects.metric_of(line)
        possible = metric_range(METRICS[key]) if key else _range_by_formula(line.formula)
        _check_range(line.name, value, *possible)
        return cls(logged.framework, line.name, value, line.formula, line.pair, key, logged.note)

    @property
    def is_of_the_update(self) -> bool:
        """Whether it compares the trainer with itself, and so says nothing about the engine."""
        return self.pair == dialects.UPDATE

    def judged(self, about: Mapping[str, Any]) -> JudgedNumber:
        """The number with its verdict, and the nearest values that others measured."""
        assessment = self._assessment(about)
        return JudgedNumber(
            **vars(self) | {"metric": self.metric or None},
            status=assessment.status,
            bars=assessment.bars,
            measured=assessment.measured,
            usual=self._usual_range(about),
            by_precision=self.by_precision(about),
            made_by=list(self._made_by(about)),
            limit_on=None if assessment.bars else self._limit_on,
        )

    def _assessment(self, about: Mapping[str, Any]) -> Assessment:
        """The limits and measured values for its metric; for one that none of ours equals, the
        framework's own limits.
        """
        metric = self.metric or f"{self.framework}:{self.name}"
        return assess({self.pair: {metric: Estimate(self.value)}}, about)

    @property
    def _limit_on(self) -> str | None:
        """Our metric that a limit published by this name is about, though it is another number."""
        for limit in published():
            if limit.name == self.name and limit.metric in METRICS:
                return limit.metric
        return None

    def _usual_range(self, about: Mapping[str, Any]) -> UsualRange | None:
        if self.metric != LEADING:
            return None
        expected = expected_gap(about)
        return UsualRange(
            who=expected.who,
            low=expected.low,
            high=expected.high,
            where=position_in_range(self.value, expected),
            source=usual_gap(about).source,
        )

    def by_precision(self, about: Mapping[str, Any]) -> list[PrecisionRange]:
        """Where the number would be for each precision, if the run's was not given."""
        if self.metric != LEADING or precision(about):
            return []
        # Ranges of all families come first in the table, those of a single family after them.
        # A later range of the same precision replaces the earlier one.
        by_precision = {}
        for usual in reference().usual:
            if usual.precision and not usual.other and usual.family in ("", family(about)):
                where = position_in_range(self.value, usual)
                by_precision[usual.precision] = PrecisionRange(
                    usual.precision, usual.low, usual.high, where
                )
        return list(by_precision.values())

    def _made_by(self, about: Mapping[str, Any]) -> Iterator[SizeCause]:
        """Precisions with such values in their usual range, unless they are usual here, and faults
        that came close.
        """
        usual = self._usual_range(about)
        if usual is not None and usual.where != "within":
            for case in reference().usual:
                if case.precision and case.low <= self.value <= case.high:
                    yield SizeCause(
                        what=case.who,
                        low=case.low,
                        high=case.high,
                        fault=False,
                        source=case.source,
                    )
        if not self.metric:
            return
        for fault in reference().measured:
            if fault.state and fault.metric == self.metric and self._is_near(fault):
                yield SizeCause(
                    what=f"{fault.setup} ({fault.model})",
                    low=fault.low,
                    high=fault.high,
                    fault=True,
                    source=fault.source,
                )

    def _is_near(self, case: MeasuredRange) -> bool:
        """Whether its distance from agreement is within a factor of what somebody measured."""
        ideal = METRICS[self.metric].agreement or 0.0
        low, high = sorted((abs(case.low - ideal), abs(case.high - ideal)))
        return low / _FACTOR <= abs(self.value - ideal) <= high * _FACTOR


@dataclass(frozen=True)
class UsualRange:
    """The mean |d| of models measured so far in the precisions of a run, nats, and where a number
    is relative to it: `below`, `within` or `above`.
    """

    who: str
    low: float
    high: float
    where: str
    source: str


@dataclass(frozen=True)
class PrecisionRange:
    """The mean |d| of models measured so far in one precision that a run may have, nats, and where
    a number is relative to it.
    """

    precision: str
    low: float
    high: float
    where: str


@dataclass(frozen=True)
class SizeCause:
    """What has caused values of a number's size: a precision, or a fault."""

    what: str
    low: float
    high: float
    fault: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class JudgedNumber:
    """A quoted number, its verdict, and what causes such values."""

    framework: str
    name: str
    value: float
    formula: str
    pair: str
    metric: str | None  # ours with the same definition
    note: str
    status: str
    bars: Sequence[LimitRow]
    measured: Sequence[MeasuredElsewhere]
    usual: UsualRange | None  # known for the mean |d| only
    by_precision: Sequence[PrecisionRange]
    made_by: Sequence[SizeCause]
    limit_on: str | None  # our metric that a limit published by this name is about

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def owner(self) -> str:
        """The framework that logs it; empty for a metric of ours."""
        return "" if self.framework == OWN else self.framework


@dataclass(frozen=True, kw_only=True)
class DashboardResult:
    """What docs/json/verdict.md describes."""

    family: str
    precision: str
    status: str  # for all numbers together
    numbers: Sequence[JudgedNumber]
    suspects: Sequence[Suspect]


@dataclass(frozen=True)
class DashboardNumbers(Study):
    """Quoted numbers with what is known about their run."""

    STUDY, FORMAT = "dashboard", "mismatch-cli verdict"

    numbers: Sequence[QuotedNumber]
    about: Mapping[str, Any]  # as in a manifest, as far as it is known

    @cached_property
    def result(self) -> DashboardResult:
        """What `verdict --json` prints."""
        numbers = [number.judged(self.about) for number in self.numbers]
        return DashboardResult(
            family=family(self.about),
            precision=precision(self.about),
            status=status([limit for number in numbers for limit in number.bars]),
            numbers=numbers,
            suspects=self._suspects,
        )

    @property
    def framework(self) -> str:
        """The framework of the first number that is not ours; empty if all are."""
        for number in self.numbers:
            if number.framework != OWN:
                return number.framework
        return ""

    @property
    def has_importer(self) -> bool:
        return self.framework in registry.names(IMPORTERS)

    @property
    def needs_a_recorder(self) -> bool:
        """Whether only a recorder inside a run of the framework gets token ids, as its own dumps
        lack them.
        """
        if self.framework not in registry.names(RECORDERS):
            return False
        if not self.has_importer:
            return True
        module = registry.load(IMPORTERS, self.framework, "format")
        return not getattr(module, "SAVES_IDS", True)

    @property
    def recording_page(self) -> str:
        """The page of the guide that says how to record a run of the framework; empty if there is
        no recorder for it.
        """
        if self.framework not in registry.names(RECORDERS):
            return ""
        return self.framework if f"tutorials/{self.framework}" in guide_pages() else "record"

    @property
    def _suspects(self) -> Sequence[Suspect]:
        """Settings that may cause a gap to the engine; none if every number is of the update."""
        for number in self.numbers:
            if not number.is_of_the_update:
                recorded = suspects(self.about, pair=number.pair)
                return (*recorded, *unrecorded_suspects(self.about, number.pair))
        return ()

    @property
    def lines_with_a_dtype(self) -> list[str]:
        """The line for a single number again, with a dtype, where the answer depends on it."""
        first, *others = self.numbers
        if others or not first.by_precision(self.about):
            return []
        words = [f"{first.name}={first.value:g}", *_typed_facts(self.about), "--dtype", "bf16"]
        if self.framework:
            words.insert(0, self.framework)
        return [suggest("verdict", *words)]


def _typed_facts(about: Mapping[str, Any]) -> list[str]:
    """The flags that were typed about the run, apart from its precisions."""
    sampling = about["config"]["sampling"]
    rollout = about["rollout"]
    facts = {
        "--model": rollout.get("model") or rollout.get("architecture"),
        "--temperature": sampling["temperature"],
        "--top-p": sampling["top_p"],
    }
    words = []
    for flag, value in facts.items():
        if value is not None:
            words += [flag, str(value)]
    return words


@dataclass(frozen=True)
class ListedMetric:
    """A metric that `verdict` knows; `metric` is ours with the same definition, if any."""

    framework: str
    name: str
    formula: str
    metric: str | None


def listed_metrics(framework: str = "") -> list[ListedMetric]:
    """Every known metric, of one framework or of all."""
    names = [framework] if framework else [OWN, *dialects.names()]
    metrics = []
    for name in names:
        if name == OWN:
            for ours in METRICS.values():
                if ours.agreement is not None:
                    metrics.append(ListedMetric(OWN, ours.key, ours.formula, ours.key))
        else:
            for line in dialects.lines(name):
                key = dialects.metric_of(line) or None
                metrics.append(ListedMetric(name, line.name, line.formula, key))
    return metrics


def metric_range(metric: Metric) -> tuple[float, float]:
    """The smallest and the largest value that a metric can have."""
    if metric.scale in _RANGES:
        low, high = _RANGES[metric.scale]
    elif metric.key == "spearman":
        low, high = -1, 1
    else:
        is_signed = metric.signed or "signed" in metric.key
        low = -inf if is_signed else 0
        high = 1 if metric.unit == "share" else inf
    if metric.unit == "probability":
        return max(low, -1), 1
    return low, high


def _range_by_formula(formula: str) -> tuple[float, float]:
    """The range that the wording of a formula implies."""
    if "share" in formula:
        return 0, 1
    if formula.startswith(("standard deviation", "√", "E_y mean |", "E_y |", "min |", "1 /")):
        return 0, inf
    return -inf, inf


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if low <= value <= high:
        return
    span = f"between {low:g} and {high:g}" if high < inf else f"at least {low:g}"
    is_percentage = (low, high) == (0, 1) and value > 1
    hint = " Give a share, not a percentage." if is_percentage else ""
    raise UsageError(f"{name}={value:g} is out of range: it is always {span}.{hint}")
