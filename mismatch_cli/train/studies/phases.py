"""How long the phases of a step take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_cli.train.studies.runs import TrainingRun

# Of a step, what learning takes: evaluations, traces and checkpoints are left out
LEARNING_PHASES = ("sample", "grade", "recompute", "update", "sync")
PHASES = (*LEARNING_PHASES, "evaluate")
OTHER = "other"
_RECOMPUTE = "recompute"
# Of a step: anything shorter, such as a skipped recomputation, is not a separate phase
_LEAST = 0.005


@dataclass(frozen=True)
class StepTime:
    """Mean seconds of a step by phase, in chronological order; empty where none were recorded."""

    by_phase: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.by_phase.values())

    def of(self, phase: str) -> float:
        """The seconds of a phase, 0 if it takes none."""
        return self.by_phase.get(phase, 0.0)

    def share(self, phase: str) -> float:
        """Of the whole step."""
        return self.of(phase) / self.seconds


def step_time(run: TrainingRun) -> StepTime:
    """The time of the phases that have a share of a step."""
    steps = [
        record["seconds"] for record in run.records if isinstance(record.get("seconds"), Mapping)
    ]
    recorded = sorted({key for seconds in steps for key in seconds}, key=_place)
    totals = {key: float(np.nansum(run.series("seconds", key))) for key in recorded}
    by_phase: dict[str, float] = {}
    for key, total in totals.items():
        phase = key if key in PHASES and total > _LEAST * sum(totals.values()) else OTHER
        by_phase[phase] = by_phase.get(phase, 0.0) + total / len(steps)
    taken = {phase: seconds for phase, seconds in by_phase.items() if seconds > 0}
    return StepTime({phase: taken[phase] for phase in sorted(taken, key=_place)})


def timed(runs: Iterable[TrainingRun]) -> list[tuple[TrainingRun, StepTime]]:
    """The runs that recorded times, with them."""
    times = ((run, step_time(run)) for run in runs)
    return [(run, time) for run, time in times if time.by_phase]


def mean_time(runs: Sequence[TrainingRun]) -> StepTime:
    """The mean over the runs that recorded times."""
    times = [time for _, time in timed(runs)]
    return StepTime({phase: _mean(times, phase) for phase in phases_of(times)})


def _mean(times: Sequence[StepTime], phase: str) -> float:
    return sum(time.of(phase) for time in times) / len(times)


def recomputing(runs: Iterable[TrainingRun]) -> list[float]:
    """The share of a step that recomputing log-probabilities takes, in each run that does it."""
    return [time.share(_RECOMPUTE) for _, time in timed(runs) if time.of(_RECOMPUTE)]


def phases_of(times: Iterable[StepTime]) -> list[str]:
    """Every phase that takes time in any of them, in chronological order."""
    return sorted({phase for time in times for phase in time.by_phase}, key=_place)


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
