"""What trust regions block by how many updates old the weights are that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import methodcaller

import numpy as np

from mismatch_cli.base.json_form import left_out_if_none
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.train.studies.run_settings import SEPARATOR, settings_of_runs
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.seeds import Seeded, difference, over_seeds, seeded

KEY = "staleness"
SHARES = ("blocked", "blocked_positive", "blocked_negative")


@dataclass(frozen=True)
class Dose:
    """The runs of an algorithm that sample with weights of the same age; shares are means over
    steps, then over seeds.
    """

    staleness: int  # how old, in optimiser steps
    seeds: int
    blocked: Estimate  # of the tokens with A ≠ 0
    blocked_positive: Estimate  # of those with A > 0
    blocked_negative: Estimate  # of those with A < 0
    # `blocked` than at the lowest dose, and the seeds that are paired; None for the lowest
    more: Estimate | None = left_out_if_none()
    paired_seeds: int | None = left_out_if_none()


@dataclass(frozen=True)
class DoseResponse:
    """An algorithm in one setting, at several doses, lowest first."""

    algorithm: str
    doses: tuple[Dose, ...]


def dose_responses(runs: Sequence[TrainingRun]) -> list[DoseResponse]:
    """Every algorithm that was trained with several staleness values; the runs are over common
    steps.

    Counted are the steps at which the engine of every such run is as far behind as it should be: a
    run begins with its first weights, which are not that old yet.
    """
    if len(set(map(age_of, runs))) < 2:
        return []
    first = max(map(_first_step, runs))
    groups: dict[str, dict[int, list[TrainingRun]]] = {}
    for run, setting in zip(runs, settings_of_runs(list(map(_without, runs))), strict=True):
        late = _from(run, first)
        if late.mean(SHARES[0]) is not None:
            name = SEPARATOR.join(filter(None, (run.algorithm, setting)))
            groups.setdefault(name, {}).setdefault(age_of(run), []).append(late)
    return [DoseResponse(name, _doses(ages)) for name, ages in groups.items() if len(ages) > 1]


def age_of(run: TrainingRun) -> int:
    """How many updates old the weights are with which its engine samples."""
    updates = run.config.get(KEY)
    return updates if isinstance(updates, int) else 0


def _doses(by_age: dict[int, list[TrainingRun]]) -> tuple[Dose, ...]:
    """The doses of an algorithm, each compared with the lowest."""
    (lowest, fresh), *older = sorted(by_age.items())
    doses = [Dose(lowest, len(fresh), *_shares(fresh))]
    for age, runs in older:
        more, pairs = difference(_by_seed(runs), _by_seed(fresh))
        doses.append(Dose(age, len(runs), *_shares(runs), more, pairs))
    return tuple(doses)


def _shares(runs: Sequence[TrainingRun]) -> tuple[Estimate, Estimate, Estimate]:
    blocked, positive, negative = SHARES
    return _share(runs, blocked), _share(runs, positive), _share(runs, negative)


def _share(runs: Sequence[TrainingRun], key: str) -> Estimate:
    return over_seeds(map(methodcaller("mean", key), runs))


def _by_seed(runs: Sequence[TrainingRun]) -> Seeded:
    """The share of each run with its seed."""
    return seeded(runs, map(methodcaller("mean", SHARES[0]), runs))


def _first_step(run: TrainingRun) -> float:
    """The first step that was sampled with weights as old as they should be; infinity if none
    was.
    """
    if not age_of(run):
        return -np.inf
    ready_N = run.step_N[run.series("updates") >= age_of(run)]
    # `updates` counts up to the end of a step, so the step after it is the first one.
    return float(ready_N.min(initial=np.inf)) + 1


def _from(run: TrainingRun, first: float) -> TrainingRun:
    """The run from a step on."""
    return replace(run, records=list(compress(run.records, run.step_N >= first)))


def _without(run: TrainingRun) -> TrainingRun:
    """The run with staleness 0, so that its setting is named without the dose."""
    return replace(run, config=dict(run.config) | {KEY: 0})
