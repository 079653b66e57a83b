"""The seconds of a step by phase, as means over the steps of a run; evaluations are spread over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mismatch_cli.studies.runs import TrainingRun

PHASES = ("sample", "grade", "recompute", "update", "sync", "evaluate")
OTHER = "other"
_LEAST = 0.005  # of a step: what takes less has no phase of its own, recomputing that was skipped among it


def seconds_by_phase(run: TrainingRun) -> dict[str, float]:
    """Mean seconds of each phase that takes any part of a step, in the order in which they follow each other."""
    steps = [record["seconds"] for record in run.records if isinstance(record.get("seconds"), Mapping)]
    recorded = sorted({key for seconds in steps for key in seconds}, key=_place)
    totals = {key: float(np.nansum(run.series("seconds", key))) for key in recorded}
    found: dict[str, float] = {}
    for key, total in totals.items():
        phase = key if key in PHASES and total > _LEAST * sum(totals.values()) else OTHER
        found[phase] = found.get(phase, 0.0) + total / len(steps)
    return {phase: found[phase] for phase in phases_of([found]) if found[phase] > 0}


def mean_by_phase(runs: Sequence[TrainingRun]) -> dict[str, float]:
    """The mean over the runs that recorded times."""
    found = [seconds for run in runs if (seconds := seconds_by_phase(run))]
    return {phase: sum(row.get(phase, 0.0) for row in found) / len(found) for phase in phases_of(found)}


def phases_of(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """Every phase that takes time in one of the runs, in the order in which they follow each other."""
    return sorted({phase for row in rows for phase in row}, key=_place)


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
