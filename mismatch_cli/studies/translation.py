"""The gap in other frameworks' own metrics, to compare with their dashboards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.dialects import MetricReading, MetricReadings
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.studies.study import Study, check_poolable, folders_of
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace

ALL = "all"


def frameworks(name: str) -> list[str]:
    """The frameworks that a name means, `all` or one; a `UsageError` with the nearest names if it
    is unknown.
    """
    if name == ALL:
        return dialects.names()
    dialects.lines(name)  # refuses an unknown name
    return [name]


@dataclass(frozen=True, kw_only=True)
class TranslatedMetric:
    """A metric as a framework would log it."""

    name: str
    value: float | None  # None: the notes say why
    formula: str
    compares: str  # the two policies
    word: str  # which several frameworks use for different numbers; empty if none does
    topic: str
    notes: Sequence[str]
    source: str


@dataclass(frozen=True, kw_only=True)
class FrameworkMetrics:
    """What a framework logs, and when."""

    when: str
    metrics: Sequence[TranslatedMetric]


@dataclass(frozen=True, kw_only=True)
class TranslationResult:
    """What docs/json/report-as.md describes."""

    traces: Sequence[str]
    about: About
    out_of_support: int  # tokens
    frameworks: Mapping[str, FrameworkMetrics]


@dataclass(frozen=True)
class Translation(Study):
    """What the dashboard of one framework, or of each, would show for these traces."""

    STUDY, FORMAT = "translation", "mismatch-cli dialects"

    traces: Sequence[Trace]
    framework: str  # or `all`
    readings: MetricReadings

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        framework: str,
        workers: Workers = ALONE,
        on_responses: Callable[[int], None] = lambda _: None,
    ) -> Translation:
        """Read the pooled traces once for this framework, or for `all`."""
        check_poolable(traces)
        readings = dialects.readings(traces, frameworks(framework), workers, on_responses)
        return cls(traces, framework, readings)

    @cached_property
    def result(self) -> TranslationResult:
        """What `report --as NAME --json` prints."""
        by_framework = {}
        for framework, readings in self.readings.by_framework.items():
            metrics = list(map(_translated, readings))
            when = dialects.when(framework)
            by_framework[framework] = FrameworkMetrics(when=when, metrics=metrics)
        return TranslationResult(
            traces=folders_of(self.traces),
            about=About.of(self.traces),
            out_of_support=self.readings.out_of_support,
            frameworks=by_framework,
        )


def _translated(reading: MetricReading) -> TranslatedMetric:
    line = reading.line
    return TranslatedMetric(
        name=line.name,
        value=reading.value,
        formula=line.formula,
        compares=line.compares,
        word=line.word,
        topic=line.topic,
        notes=list(filter(None, (line.note, reading.why))),
        source=line.source,
    )
