"""Numbers from a dashboard, without a trace: which limits hold, what others measured, what
causes such values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.frameworks import dialects
from mismatch_cli.limits.assess import LEADING, Assessment, LimitRow, assess, status
from mismatch_cli.limits.both_sides import family, precision
from mismatch_cli.limits.expected import expected_gap, place_of
from mismatch_cli.limits.published import published
from mismatch_cli.limits.reference import reference, usual_gap
from mismatch_cli.limits.suspects import suspects, unrecorded
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

_RARE = ("int8", "fp4")  # precisions of a side that only the JSON lists
_FACTOR = 2.0  # how close a value has to be to a known fault's for the fault to be named
_BOUNDS: dict[Scale, tuple[float, float]] = {
    POSITIVE: (0, inf), ABOVE_1: (1, inf), ABOVE_MINUS_1: (-1, inf), SHARE: (0, 1),
    SAMPLE_SIZE: (0, 1),
    CORRELATION: (-1, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Quoted:
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
    def of(cls, framework: str, name: str, value: float) -> Quoted:
        """Find the metric by its name on the dashboard, or by our key or label; a `UsageError` if
        that is ambiguous, unknown, or if the value is out of range.
        """
        if framework == OWN or (not framework and is_own(name)):
            metric = own_metric(name)
            _check(name, value, *bounds(metric))
            return cls(OWN, metric.key, value, metric.formula, "mismatch", metric.key)
        logged = framework_metric(framework, name)
        line, key = logged.line, dialects.metric_of(logged.line)
        _check(line.name, value, *(bounds(METRICS[key]) if key else _bounds_by_words(line.formula)))
        owner, note = logged.framework, logged.note
        return cls(owner, line.name, value, line.formula, line.pair, key, note)

    @property
    def is_of_the_update(self) -> bool:
        """Whether it compares the trainer with itself, and so says nothing about the engine."""
        return self.pair == dialects.UPDATE

    def to_json(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The number, its verdict, and the nearest values that others measured."""
        found = self._assessed(about)
        return {
            **vars(self),
            "metric": self.metric or None,
            "status": status(found.bars),
            "bars": to_json(found.bars),
            "measured": to_json(found.measured),
            "usual": self._usual(about),
            "by_precision": self.by_precision(about),
            "made_by": list(self._made_by(about)),
            "limit_on": None if found.bars else self._limit_on,
        }

    def _assessed(self, about: Mapping[str, Any]) -> Assessment:
        """The limits and measured values for its metric; for one that none of ours equals, the
        framework's own limits.
        """
        metric = self.metric or f"{self.framework}:{self.name}"
        return assess({self.pair: {metric: Estimate(self.value)}}, about)

    @property
    def _limit_on(self) -> str | None:
        """Our metric that a limit published by this name is about, though it is another number."""
        rows = (row for row in published() if row.name == self.name and row.metric in METRICS)
        return next((row.metric for row in rows), None)

    def _usual(self, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """The usual range of the precisions, and where the number is relative to it; known for
        the mean |d| only.
        """
        if self.metric != LEADING:
            return None
        expected = expected_gap(about)
        return {
            "who": expected.who,
            "low": expected.low,
            "high": expected.high,
            "where": place_of(self.value, expected),
            "source": usual_gap(about).source,
        }

    def by_precision(self, about: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Where the number would be for each precision, if the run's was not given."""
        if self.metric != LEADING or precision(about):
            return []
        rows = [row for row in reference().usual if row.precision and not row.other]
        of_family = {row.precision: row for row in rows if row.family in ("", family(about))}
        return [
            {
                "precision": row.precision,
                "low": row.low,
                "high": row.high,
                "where": place_of(self.value, row),
            }
            for row in of_family.values()
        ]

    def _made_by(self, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Causes of values of this size: precisions with it in their usual range, and faults
        that came close to it.
        """
        if not self.metric:
            return
        if self.metric == LEADING and (self._usual(about) or {}).get("where") != "within":
            for row in reference().usual:
                if row.precision and row.low <= self.value <= row.high:
                    yield {
                        "what": row.who,
                        "low": row.low,
                        "high": row.high,
                        "fault": False,
                        "source": row.source,
                    }
        ideal = METRICS[self.metric].agreement or 0.0
        distance = abs(self.value - ideal)
        for case in reference().measured:
            ends = sorted((abs(case.low - ideal), abs(case.high - ideal)))
            if (
                case.state
                and case.metric == self.metric
                and ends[0] / _FACTOR <= distance <= ends[1] * _FACTOR
            ):
                what = f"{case.setup} ({case.model})"
                yield {
                    "what": what,
                    "low": case.low,
                    "high": case.high,
                    "fault": True,
                    "source": case.source,
                }


@dataclass(frozen=True)
class DashboardNumbers(Study):
    """Quoted numbers with what is known about their run."""

    STUDY, FORMAT = "dashboard", "mismatch-cli verdict"

    numbers: Sequence[Quoted]
    about: Mapping[str, Any]  # as in a manifest, as far as it is known

    @cached_property
    def result(self) -> dict[str, Any]:
        return self.to_json()

    @property
    def lines_with_a_dtype(self) -> list[str]:
        """The line for a single number again, with a dtype, where the answer depends on it."""
        (first, *more) = self.numbers
        if more or not first.by_precision(self.about):
            return []
        owner = [name for name in (first.framework,) if name != OWN]
        number = f"{first.name}={first.value:g}"
        return [suggest("verdict", *owner, number, *_stated(self.about), "--dtype", "bf16")]

    def to_json(self) -> dict[str, Any]:
        """What `verdict --json` prints; documented in docs/json/verdict.md."""
        pair = next(
            (number.pair for number in self.numbers if not number.is_of_the_update), dialects.UPDATE
        )
        numbers = [number.to_json(self.about) for number in self.numbers]
        suspected = (
            []
            if pair == dialects.UPDATE
            else [*suspects(self.about, pair=pair), *unrecorded(self.about, pair)]
        )
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            "family": family(self.about),
            "precision": precision(self.about),
            "status": status(
                [from_json(LimitRow, row) for number in numbers for row in number["bars"]]
            ),
            "numbers": numbers,
            "suspects": [suspect.to_json() for suspect in suspected],
        }


def on_the_dtype(row: Mapping[str, Any]) -> str:
    """`within bf16 (0.001–0.07); above fp32 (1e-07–0.0004)`: where a number is for each precision
    of a run whose dtype was not given; empty if the answer does not depend on it.
    """
    places: dict[str, list[str]] = {"within": [], "above": [], "below": []}
    for each in row["by_precision"]:
        if each["precision"] not in _RARE:
            words = f"{each['precision']} ({each['low']:g}–{each['high']:g})"
            places[each["where"]].append(words)
    return "; ".join(f"{place} {', '.join(words)}" for place, words in places.items() if words)


def _stated(about: Mapping[str, Any]) -> list[str]:
    """What was typed about the run, apart from its precisions."""
    sampling, rollout = about["config"]["sampling"], about["rollout"]
    facts = {
        "--model": rollout.get("model") or rollout.get("architecture"),
        "--temperature": sampling["temperature"],
        "--top-p": sampling["top_p"],
    }
    return [str(word) for flag in facts if facts[flag] is not None for word in (flag, facts[flag])]


def listed(framework: str = "") -> list[dict[str, str | None]]:
    """Every known metric name, of one framework or of all; `metric` is ours with the same
    definition, if any.
    """
    rows: list[dict[str, str | None]] = []
    for name in [framework] if framework else [OWN, *dialects.names()]:
        if name == OWN:
            rows += [
                {
                    "framework": OWN,
                    "name": metric.key,
                    "formula": metric.formula,
                    "metric": metric.key,
                }
                for metric in METRICS.values()
                if metric.agreement is not None
            ]
        else:
            rows += [
                {
                    "framework": name,
                    "name": line.name,
                    "formula": line.formula,
                    "metric": dialects.metric_of(line) or None,
                }
                for line in dialects.lines(name)
            ]
    return rows


def bounds(metric: Metric) -> tuple[float, float]:
    """The range of a metric."""
    if metric.scale in _BOUNDS:
        low, high = _BOUNDS[metric.scale]
    elif metric.key == "spearman":
        low, high = -1, 1
    else:
        low, high = (
            (-inf if metric.signed or "signed" in metric.key else 0),
            1 if metric.unit == "share" else inf,
        )
    return (max(low, -1), 1) if metric.unit == "probability" else (low, high)


def _bounds_by_words(formula: str) -> tuple[float, float]:
    """The range that a formula's wording implies."""
    if "share" in formula:
        return 0, 1
    return (
        0
        if formula.startswith(("standard deviation", "√", "E_y mean |", "E_y |", "min |", "1 /"))
        else -inf
    ), inf


def _check(name: str, value: float, low: float, high: float) -> None:
    if low <= value <= high:
        return
    span = f"between {low:g} and {high:g}" if high < inf else f"at least {low:g}"
    hint = " Give a share, not a percentage." if (low, high) == (0, 1) and value > 1 else ""
    raise UsageError(f"{name}={value:g} is out of range: it is always {span}.{hint}")
