"""The gap in other frameworks' own metrics, to compare with their dashboards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mismatch_cli.base.places import shorten_paths
from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.dialects import MetricReading, MetricReadings
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.studies.study import Study, check_poolable
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace

ALL = "all"


def frameworks(asked: str) -> list[str]:
    """The frameworks that a name stands for; a `UsageError` with the nearest names if it is
    unknown.
    """
    if asked == ALL:
        return dialects.names()
    dialects.lines(asked)
    return [asked]


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
    asked: str
    readings: MetricReadings

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        asked: str,
        workers: Workers = ALONE,
        on_responses: Callable[[int], None] = lambda _: None,
    ) -> Translation:
        """Read the pooled traces once for all requested frameworks."""
        check_poolable(traces)
        return cls(
            traces, asked, dialects.readings(traces, frameworks(asked), workers, on_responses)
        )

    @cached_property
    def result(self) -> TranslationResult:
        """What `report --as NAME --json` prints."""
        return TranslationResult(
            traces=shorten_paths([str(trace.folder) for trace in self.traces]),
            about=About.of(self.traces),
            out_of_support=self.readings.out_of_support,
            frameworks={
                framework: FrameworkMetrics(
                    when=dialects.when(framework),
                    metrics=[_logged(reading) for reading in readings],
                )
                for framework, readings in self.readings.by_framework.items()
            },
        )


def _logged(reading: MetricReading) -> TranslatedMetric:
    line = reading.line
    return TranslatedMetric(
        name=line.name,
        value=reading.value,
        formula=line.formula,
        compares=line.compares,
        word=line.word,
        topic=line.topic,
        notes=[note for note in (line.note, reading.why) if note],
        source=line.source,
    )
