"""The steps that training runs share: only over them are their numbers comparable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from mismatch_cli.metrics.update_table import LAST
from mismatch_cli.train.studies.runs import EVALUATION, TrainingRun

_OF_EVALUATION = EVALUATION - {"step"}


Series = tuple[np.ndarray, np.ndarray]  # steps, and a value at each


def aligned(series: Sequence[Series], step_N: np.ndarray) -> np.ndarray:
    """The values of several series at these ascending steps, [series, N]; NaN where one has
    none.
    """
    value_RN = np.full((len(series), len(step_N)), np.nan)
    for row_N, (own_step, value) in zip(value_RN, series, strict=True):
        is_shared = np.isin(own_step, step_N)
        row_N[np.searchsorted(step_N, own_step[is_shared])] = value[is_shared]
    return value_RN


@dataclass(frozen=True)
class CommonSteps:
    """The steps that are on record in all runs of one task, with a reward in each run that has
    any.
    """

    runs: Sequence[TrainingRun]  # whole

    @cached_property
    def step_N(self) -> np.ndarray:
        """The numbers of these steps, ascending."""
        return _shared(_with(run, "reward") for run in self.runs)

    @property
    def window_N(self) -> np.ndarray:
        """The numbers of the steps of the final reward: the last ones."""
        return self.step_N[-LAST:]

    @property
    def is_whole(self) -> bool:
        """Whether no run has a step that another one lacks."""
        return all(len(np.unique(_with(run, "reward"))) == len(self.step_N) for run in self.runs)

    @property
    def is_final(self) -> bool:
        """Whether the window is the end of every run, and not all of it."""
        return self.is_whole and len(self.step_N) > LAST

    @property
    def shortest(self) -> list[TrainingRun]:
        """Runs that end at the last common step, where others continue."""
        last = self.step_N.max(initial=-1)
        ended = [run for run in self.runs if run.last_step == last]
        return ended if len(ended) < len(self.runs) else []

    @cached_property
    def restricted(self) -> list[TrainingRun]:
        """The runs over these steps, with the evaluations that all evaluated runs have."""
        if len(self.runs) == 1:
            return list(self.runs)
        evaluations = filter(len, map(_evaluations, self.runs))
        evaluated_N = np.append(_shared(evaluations), 0)  # before training
        return [_restricted(run, self.step_N, evaluated_N) for run in self.runs]


def in_words(step_N: np.ndarray) -> str:
    """`steps 1 to 7`, `step 1`."""
    if len(step_N) == 1:
        return f"step {step_N[0]:.0f}"
    return f"steps {step_N[0]:.0f} to {step_N[-1]:.0f}"


def _with(run: TrainingRun, key: str) -> np.ndarray:
    """The steps of a run that have a value; all of them if none has."""
    has_N = run.is_step_N & np.isfinite(run.series(key))
    return run.step_N[has_N if has_N.any() else run.is_step_N]


def _evaluations(run: TrainingRun) -> np.ndarray:
    """The steps after which a run was evaluated."""
    return run.step_N[np.isfinite(run.series("eval_accuracy")) & (run.step_N > 0)]


def _shared(steps: Iterable[np.ndarray]) -> np.ndarray:
    """The numbers that all have, ascending; empty without any."""
    every = list(steps)
    if not every:
        return np.zeros(0)
    # Intersected with itself, the first one is sorted and unique even if it is the only one.
    return reduce(np.intersect1d, every, every[0])


def _restricted(run: TrainingRun, step_N: np.ndarray, evaluated_N: np.ndarray) -> TrainingRun:
    """The run with these steps, and with an evaluation only after those that all runs have."""
    keep_N = ~run.is_step_N | np.isin(run.step_N, step_N)
    evaluated = set(evaluated_N.tolist())
    records = []
    for record, step, keep in zip(run.records, run.step_N.tolist(), keep_N, strict=True):
        if not keep:
            continue
        # Its place does not tell its number any longer.
        record = record | {"step": step}
        if step not in evaluated:
            for key in _OF_EVALUATION:
                record.pop(key, None)
        records.append(record)
    return replace(run, records=records)
