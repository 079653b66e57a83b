"""The phases of a step: means by hand, and what is too short to be one."""

from __future__ import annotations

from typing import Any

import pytest

from mismatch_cli.train.studies.phases import (
    StepTime,
    mean_time,
    phases_of,
    recomputing,
    step_time,
    timed,
)
from mismatch_cli.train.studies.runs import TrainingRun
from tests.train.training_runs import run_of


def run_with(*seconds: Any) -> TrainingRun:
    """A run with these times of its steps."""
    run = run_of([0.5] * len(seconds))
    for record, of_step in zip(run.records, seconds, strict=True):
        record["seconds"] = of_step
    return run


def test_the_time_of_a_step_by_hand() -> None:
    # 800 s in all, of which a phase needs more than 4
    time = step_time(
        run_with(
            {"sample": 300.0, "update": 200.0, "recompute": 0.0, "evaluate": 4.0, "record": 8.0},
            {"sample": 100.0, "update": 150.0, "sync": 5.0, "grade": 3.0, "checkpoint": 30.0},
            None,
            [1.0],
        )
    )
    assert list(time.by_phase) == ["sample", "update", "sync", "other"]
    assert time.by_phase == {"sample": 200, "update": 175, "sync": 2.5, "other": 22.5}
    assert time.seconds == 400 and time.of("recompute") == 0
    assert time.share("sample") == 0.5


def test_a_run_without_times_has_none() -> None:
    without = run_with(None, {})
    assert step_time(without) == StepTime({}) and step_time(without).seconds == 0
    with_times = run_with({"update": 3.0})
    assert timed([without, with_times]) == [(with_times, StepTime({"update": 3.0}))]
    assert mean_time([without]) == StepTime({})


def test_means_over_runs_count_a_phase_that_one_lacks_as_0() -> None:
    runs = [
        run_with({"update": 3.0, "recompute": 1.0, "checkpoint": 2.0}),
        run_with({"sample": 4.0, "update": 5.0}),
        run_with(None),
    ]
    time = mean_time(runs)
    assert list(time.by_phase) == ["sample", "recompute", "update", "other"]
    assert time.by_phase == {"sample": 2.0, "recompute": 0.5, "update": 4.0, "other": 1.0}
    assert phases_of([]) == []
    assert recomputing(runs) == [pytest.approx(1 / 6)]
