"""Watches a run look by look: the new steps, their metrics, the alarms that they raise, and when
the run is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mismatch_cli.base.errors import UsageError, quoted
from mismatch_cli.base.registry import names_file
from mismatch_cli.frameworks import dialects
from mismatch_cli.limits.limit_sets import LimitSet
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.watch_state import Alarm
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.training_folder import AS
from mismatch_cli.watch.alarms import Event
from mismatch_cli.watch.dump import Dump, ImportedParts
from mismatch_cli.watch.folders import kind_of
from mismatch_cli.watch.growing_trace import GrowingTrace
from mismatch_cli.watch.history import History
from mismatch_cli.watch.state import Record, State
from mismatch_cli.watch.training_run import CompleteStep, GrowingTraining
from mismatch_cli.watch.watched_step import StepChecks

_LINES = 1000  # steps of `train` that are recorded with one save
USUAL_ALGORITHM = "grpo-clip-higher"  # shown if nothing says which algorithm trains


class GrowingRun(Protocol):
    """A run that grows."""

    kind: str
    algorithm: str  # the one that trains; empty if unknown

    @property
    def newest(self) -> int | None:
        """The highest step with any data."""

    @property
    def waiting(self) -> str:
        """Existing data that is incomplete."""

    @property
    def is_over(self) -> bool:
        """Whether the run itself says that it has ended."""

    @property
    def changed(self) -> float:
        """When it last grew, in seconds since 1970."""

    def look(self, *, final: bool) -> Iterator[CompleteStep]:
        """The newly completed steps; `final`: all existing ones, since this is the last look."""


class StepReport(NamedTuple):
    """A step, and what is to be told of alarms at it; `again`: it has grown since it was first
    reported.
    """

    step: int
    record: Record
    alarms: list[Event]
    again: bool

    @property
    def raises(self) -> bool:
        """Whether a limit does not hold at it that had held, or a reminder of one is due."""
        return any(event.is_alarm for event in self.alarms)


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure at every step, as typed."""

    sets: Sequence[LimitSet] = ()
    baseline: Sequence[Path] = ()
    algorithm: str | None = None
    format: str | None = None  # of a dump
    framework: str = ""  # whose metrics to log too

    def to_json(self, algorithm: str) -> dict[str, Any]:
        """What decides whether reported steps have to be measured again."""
        return {
            "limits": [asdict(of) for of in self.sets],
            "baseline": [str(path.absolute()) for path in self.baseline],
            "algorithm": algorithm,
            **({AS: self.framework} if self.framework else {}),
        }


class Watcher:
    """Watches an existing run; its state is in a folder that the caller has locked."""

    def __init__(
        self, run: Path, folder: Path, asked: MeasureRequest, say: Callable[[str], None]
    ) -> None:
        self.run, self._sets, self._framework = run, asked.sets, asked.framework
        kind = kind_of(run)
        self.source: GrowingRun
        if kind == "train":
            if asked.algorithm is not None:
                raise UsageError(
                    "--algorithm is for traces: a training run reports what its own blocks. "
                    "Leave it out."
                )
            if asked.framework:
                raise UsageError(
                    "--as is for traces: for a training run, `train --as` logs it at every step. "
                    "Leave it out."
                )
            self.source = GrowingTraining(run)
        elif kind == "trace":
            self.source = GrowingTrace(
                run if (run / "manifest.json").is_file() else run / "trace", self._told
            )
        named = "" if kind == "dump" else self.source.algorithm
        self.algorithm = asked.algorithm or named or USUAL_ALGORITHM
        if kind == "trace" and asked.algorithm is None and names_file(named):
            say(
                f"The trace names the mask {named}. To run that file, add: "
                f"{quoted('--algorithm', named)}"
            )
            self.algorithm = USUAL_ALGORITHM
        self.state = State(folder, run, asked.to_json(self.algorithm), lines=kind != "train")
        if kind == "dump":
            parts = ImportedParts(self.state.parts, folder / "traces", self.state.save)
            self.source = Dump(run, asked.format, parts, self._told, say)
        baseline = [Trace.open(path) for path in asked.baseline]
        self._judge = StepChecks.of(
            asked.sets, baseline, None if kind == "train" else parse_algorithm(self.algorithm)
        )
        self.history = History()
        for step, record in self.state.lines():
            self.history.add(step, record)
        self._grew, self._changed = time.monotonic(), 0.0

    def _told(self, step: int) -> str:
        return self.state.told.get(step, "")

    @property
    def folder_of_lines(self) -> Path:
        """The folder of the metrics.jsonl from which pages are made."""
        return self.run if self.source.kind == "train" else self.state.folder

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms of the limits that are set now, also from earlier sessions."""
        return self.state.alarms.of(self._sets)

    @property
    def since_growth(self) -> float:
        """Seconds since the run last grew, by the clock of the machine that wrote it."""
        return max(0.0, time.time() - self.source.changed) if self.source.changed else 0.0

    @property
    def idle(self) -> float:
        """Seconds since this process last saw something new."""
        return time.monotonic() - self._grew

    def look(self, *, final: bool = False) -> Iterator[StepReport]:
        """The complete steps that were not reported yet, in order; each is recorded before it is
        yielded.
        """
        ready = self.source.look(final=final)
        together = _LINES if self.source.kind == "train" else 1
        while some := list(islice(ready, together)):
            yield from self._on_record(some)
        if self.source.changed != self._changed:
            self._grew, self._changed = time.monotonic(), self.source.changed

    def _on_record(self, some: Sequence[CompleteStep]) -> list[StepReport]:
        """Record several steps with one save."""
        found = []
        for ready in some:
            known = ready.step in self.state.told
            # A `train` run: all its lines are read at the start
            if known and ready.record is not None:
                self.history.add(ready.step, ready.record)
                continue
            record, checks = self._judged(ready)
            # A kill may come between any two writes, and must leave nothing to repeat.
            # So alarms are recorded first, then the line, then the step, and reported after that.
            alarms = self.state.judged(ready.step, checks)
            self.history.add(ready.step, record)
            self.state.put(ready.step, record, ready.shards)
            found.append(StepReport(ready.step, record, alarms, known))
        if found:
            self.state.save()
        return found

    def _judged(self, ready: CompleteStep) -> tuple[Record, list[Any]]:
        if ready.record is None:
            record, checks = self._judge.of_traces(ready.step, ready.traces)
            return record | self._in_words(ready.traces), checks
        return ready.record, self._judge.of_record(ready.record, next(iter(ready.traces), None))

    def _in_words(self, traces: Sequence[Trace]) -> Record:
        if not self._framework:
            return {}
        found = dialects.readings(traces, [self._framework]).by_framework
        return {
            AS: {framework: dialects.values_by_name(lines) for framework, lines in found.items()}
        }

    def has_reached(self, step: int | None) -> bool:
        """Whether a step, or a later one, has been reported, in this session or an earlier one."""
        return step is not None and max(self.state.told, default=-1) >= step

    def is_done(self, until_step: int | None, idle: float | None) -> bool:
        """Whether `until_step` is complete, the run is over, or nothing new has come for `idle`
        seconds.
        """
        return (
            self.has_reached(until_step)
            or self.source.is_over
            or self.idle > (inf if idle is None else idle)
        )

    def unmeasured(self) -> list[str]:
        """The limits that could not be measured at any step; empty if there was no step."""
        if not self.state.told:
            return []
        return [limit.name for limit in self.state.unmeasured(self._sets)]
