"""How long the phases of a step take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_cli.train.studies.runs import TrainingRun

# The phases that learning takes: evaluations, traces and checkpoints are left out.
LEARNING_PHASES = ("sample", "grade", "recompute", "update", "sync")
PHASES = (*LEARNING_PHASES, "evaluate")
OTHER = "other"
_RECOMPUTE = "recompute"
# Part of a step: anything shorter, such as a skipped recomputation, is not a separate phase.
_LEAST = 0.005


@dataclass(frozen=True)
class StepTime:
    """Mean seconds of a step by phase, in chronological order; empty where none were recorded."""

    by_phase: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return sum(self.by_phase.values())

    def of(self, phase: str) -> float:
        """The seconds of a phase, 0 if it takes none."""
        return self.by_phase.get(phase, 0.0)

    def share(self, phase: str) -> float:
        """The part of the step that a phase takes, from 0 to 1."""
        return self.of(phase) / self.seconds


def step_time(run: TrainingRun) -> StepTime:
    """The time of the phases that have a share of a step."""
    steps = []
    for record in run.records:
        seconds = record.get("seconds")
        if isinstance(seconds, Mapping):
            steps.append(seconds)
    names = sorted(set[str]().union(*steps), key=_place)
    totals = {name: float(np.nansum(run.series("seconds", name))) for name in names}
    whole = sum(totals.values())
    by_phase = dict.fromkeys((*PHASES, OTHER), 0.0)
    for name, total in totals.items():
        is_phase = name in PHASES and total > _LEAST * whole
        by_phase[name if is_phase else OTHER] += total / len(steps)
    return StepTime({phase: mean for phase, mean in by_phase.items() if mean > 0})


def timed(runs: Iterable[TrainingRun]) -> list[tuple[TrainingRun, StepTime]]:
    """The runs that recorded times, with them."""
    with_times = []
    for run in runs:
        time = step_time(run)
        if time.by_phase:
            with_times.append((run, time))
    return with_times


def mean_time(runs: Sequence[TrainingRun]) -> StepTime:
    """The mean over the runs that recorded times."""
    times = [time for _, time in timed(runs)]
    means = {}
    for phase in phases_of(times):
        means[phase] = sum(time.of(phase) for time in times) / len(times)
    return StepTime(means)


def recomputing(runs: Iterable[TrainingRun]) -> list[float]:
    """The share of a step that recomputing log-probabilities takes, in each run that does it."""
    shares = []
    for _, time in timed(runs):
        if time.of(_RECOMPUTE):
            shares.append(time.share(_RECOMPUTE))
    return shares


def phases_of(times: Iterable[StepTime]) -> list[str]:
    """Every phase that takes time in any of them, in chronological order."""
    return sorted(set[str]().union(*(time.by_phase for time in times)), key=_place)


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
