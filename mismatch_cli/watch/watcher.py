"""Watches a run look by look: the new steps, their metrics, the alarms that they raise, and when
the run is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mismatch_cli.base.errors import UsageError, quoted
from mismatch_cli.base.registry import names_file
from mismatch_cli.frameworks import dialects
from mismatch_cli.limits.limit_sets import LimitSet
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.gate import Check
from mismatch_cli.studies.watch_state import Alarm
from mismatch_cli.trace.training_folder import AS
from mismatch_cli.watch.alarms import Event, limit_of
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
    """A step, and what the user hears of alarms at it; `again`: it has grown since it was first
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
        request: dict[str, Any] = {
            "limits": [asdict(limit_set) for limit_set in self.sets],
            "baseline": [str(path.absolute()) for path in self.baseline],
            "algorithm": algorithm,
        }
        if self.framework:
            request[AS] = self.framework
        return request


class Watcher:
    """Watches an existing run; its state is in a folder that the caller has locked."""

    source: GrowingRun

    def __init__(
        self, run: Path, folder: Path, request: MeasureRequest, say: Callable[[str], None]
    ) -> None:
        self.run = run
        self._request = request
        kind = kind_of(run)
        self.algorithm = request.algorithm or USUAL_ALGORITHM
        if kind == "train":
            self.source = _training(run, request)
            self.algorithm = self.source.algorithm or USUAL_ALGORITHM
        elif kind == "trace":
            self.source = GrowingTrace(_trace_in(run), self._reported)
            if request.algorithm is None:
                self.algorithm = _algorithm_to_run(self.source.algorithm, say)
        # `train` writes lines of its own, and measures what its algorithm blocks.
        is_trace = kind != "train"
        self.state = State(folder, run, request.to_json(self.algorithm), lines=is_trace)
        if kind == "dump":
            # Only the state knows which parts of the dump were imported.
            parts = ImportedParts(self.state.parts, folder / "traces", self.state.save)
            self.source = Dump(run, request.format, parts, self._reported, say)
        algorithm = parse_algorithm(self.algorithm) if is_trace else None
        self._checks = StepChecks.of(request.sets, request.baseline, algorithm)
        self.history = History(self.state.lines())
        self._grew = time.monotonic()
        self._changed = 0.0

    def _reported(self, step: int) -> str:
        return self.state.reported.get(step, "")

    @property
    def folder_of_lines(self) -> Path:
        """The folder of the metrics.jsonl from which pages are made."""
        return self.run if self.source.kind == "train" else self.state.folder

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms of the limits that are set now, also from earlier sessions."""
        return self.state.alarms.of(self._request.sets)

    @property
    def uncalled(self) -> list[Event]:
        """Those of these alarms at whose beginning the user's command has not run."""
        own = {limit_of(alarm.check) for alarm in self.alarms}
        return [event for event in self.state.uncalled if limit_of(event.check) in own]

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
        steps = self.source.look(final=final)
        # Measuring a step of a trace takes seconds, so each is saved by itself.
        # A step of `train` is one line, cheaper than a save: many share one.
        together = _LINES if self.source.kind == "train" else 1
        batch = list(islice(steps, together))
        while batch:
            yield from self._record(batch)
            batch = list(islice(steps, together))
        if self.source.changed != self._changed:
            self._grew = time.monotonic()
            self._changed = self.source.changed

    def _record(self, steps: Sequence[CompleteStep]) -> list[StepReport]:
        """Record several steps with one save."""
        reports: list[StepReport] = []
        for complete in steps:
            step = complete.step
            is_again = step in self.state.reported
            if is_again and complete.record is not None:
                # All lines of a `train` run are read when watching starts, and lines do not grow.
                self.history.add(step, complete.record)
                continue
            record, checks = self._measure(complete)
            # A kill may come between any two writes, and must leave nothing to repeat.
            # So alarms are recorded first, then the line, then the step, and reported after that.
            events = self.state.update_alarms(step, checks)
            self.history.add(step, record)
            self.state.add_step(step, record, complete.shards)
            reports.append(StepReport(step, record, events, is_again))
        if reports:
            self.state.save()
        return reports

    def _measure(self, complete: CompleteStep) -> tuple[Record, list[Check]]:
        """The line of a step, and its checks."""
        traces = complete.traces
        if complete.record is not None:
            trace = traces[0] if traces else None
            return complete.record, self._checks.of_record(complete.record, trace)
        record, checks = self._checks.of_traces(complete.step, traces)
        framework = self._request.framework
        if framework:
            readings = dialects.readings(traces, [framework]).by_framework
            record[AS] = {name: dialects.values_by_name(lines) for name, lines in readings.items()}
        return record, checks

    def has_reached(self, step: int | None) -> bool:
        """Whether a step, or a later one, has been reported, in this session or an earlier one."""
        return step is not None and max(self.state.reported, default=-1) >= step

    def is_done(self, until_step: int | None, idle: float | None) -> bool:
        """Whether `until_step` is complete, the run is over, or nothing new has come for `idle`
        seconds.
        """
        if self.has_reached(until_step) or self.source.is_over:
            return True
        return idle is not None and self.idle > idle

    def unmeasured(self) -> list[str]:
        """The limits that could not be measured at any step; empty if there was no step."""
        if not self.state.reported:
            return []
        return [limit.name for limit in self.state.unmeasured(self._request.sets)]


def _trace_in(run: Path) -> Path:
    """The folder of the trace: the run itself, or a folder in it."""
    return run if (run / "manifest.json").is_file() else run / "trace"


def _training(run: Path, request: MeasureRequest) -> GrowingTraining:
    """A training run; a `UsageError` for what only traces can be asked for."""
    if request.algorithm is not None:
        raise UsageError(
            "--algorithm is for traces: a training run reports what its own blocks. Leave it out."
        )
    if request.framework:
        raise UsageError(
            "--as is for traces: for a training run, `train --as` logs it at every step. "
            "Leave it out."
        )
    return GrowingTraining(run)


def _algorithm_to_run(recorded: str, say: Callable[[str], None]) -> str:
    """The algorithm that a trace names; the usual one if it names none, or a file, whose code only
    the user may start.
    """
    if not recorded:
        return USUAL_ALGORITHM
    if names_file(recorded):
        say(
            f"The trace names the mask {recorded}. To run that file, add: "
            f"{quoted('--algorithm', recorded)}"
        )
        return USUAL_ALGORITHM
    return recorded
