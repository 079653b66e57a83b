"""The gap in other frameworks' own metrics, to compare with their dashboards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_cli.base.json_form import to_json
from mismatch_cli.base.places import shown
from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.dialects import Reading, Readings
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


@dataclass(frozen=True)
class Translation(Study):
    """What the dashboard of one framework, or of each, would show for these traces."""

    STUDY, FORMAT = "translation", "mismatch-cli dialects"

    traces: Sequence[Trace]
    asked: str
    readings: Readings

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

    def to_json(self) -> dict[str, Any]:
        """What `report --as NAME --json` prints; documented in docs/json/report-as.md."""
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            "traces": shown([str(trace.folder) for trace in self.traces]),
            "about": to_json(About.of(self.traces, 0)),
            "out_of_support": self.readings.out_of_support,
            "frameworks": {
                framework: {
                    "when": dialects.when(framework),
                    "metrics": [_row(reading) for reading in readings],
                }
                for framework, readings in self.readings.by_framework.items()
            },
        }


def _row(reading: Reading) -> dict[str, Any]:
    line = reading.line
    return {
        "name": line.name,
        "value": reading.value,
        "formula": line.formula,
        "compares": line.compares,
        "word": line.word,
        "topic": line.topic,
        "notes": [note for note in (line.note, reading.why) if note],
        "source": line.source,
    }
