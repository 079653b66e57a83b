"""The seconds of a step by phase, as means over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from mismatch_cli.report.training.runs import TrainingRun

PHASES = ("sample", "grade", "recompute", "update", "sync", "record")
OTHER = "other"


def seconds_by_phase(run: TrainingRun) -> dict[str, float]:
    """Mean seconds of each phase that took any time, in the order in which they follow each other."""
    steps = [record["seconds"] for record in run.records if isinstance(record.get("seconds"), Mapping)]
    recorded = dict.fromkeys(key for seconds in steps for key in seconds)
    totals: dict[str, float] = {}
    for key in sorted(recorded, key=_place):
        phase = key if key in PHASES else OTHER
        totals[phase] = totals.get(phase, 0.0) + float(np.nansum(run.series("seconds", key)))
    return {phase: total / len(steps) for phase, total in totals.items() if total > 0}


def phases_of(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """Every phase that takes time in one of the runs, in the order in which they follow each other."""
    return sorted({phase for row in rows for phase in row}, key=_place)


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
