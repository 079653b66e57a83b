"""What trust regions block by how many updates old the weights are that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.train.studies.run_settings import SEPARATOR, settings_of_runs
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.seeds import Difference, Seeded, difference, over_seeds, seeded

KEY = "staleness"
# Of the tokens with A ≠ 0, A > 0 and A < 0
SHARES = ("blocked", "blocked_positive", "blocked_negative")


class Dose(NamedTuple):
    """The runs of an algorithm that sample with weights of the same age."""

    updates: int  # how old, in optimiser steps
    seeds: int
    blocked: dict[str, Estimate]  # by `SHARES`: means over steps, then over seeds
    more: Difference | None  # `blocked` than at the lowest dose, paired by seed; None for that


@dataclass(frozen=True)
class DoseResponse:
    """An algorithm in one setting, at several doses, lowest first."""

    name: str
    doses: tuple[Dose, ...]

    def to_json(self) -> dict[str, Any]:
        return {"algorithm": self.name, "doses": list(map(_to_json, self.doses))}


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
    lowest = min(by_age)
    base, doses = _by_seed(by_age[lowest]), []
    for age, runs in sorted(by_age.items()):
        blocked = {key: over_seeds(map(methodcaller("mean", key), runs)) for key in SHARES}
        more = None if age == lowest else difference(_by_seed(runs), base)
        doses.append(Dose(age, len(runs), blocked, more))
    return tuple(doses)


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
    return float(ready_N.min()) + 1 if len(ready_N) else np.inf


def _from(run: TrainingRun, first: float) -> TrainingRun:
    kept = compress(run.records, run.step_N >= first)
    return replace(run, records=list(kept))


def _without(run: TrainingRun) -> TrainingRun:
    """The run at no dose: its setting is named without it."""
    return replace(run, config=dict(run.config) | {KEY: 0})


def _to_json(dose: Dose) -> dict[str, Any]:
    row: dict[str, Any] = {KEY: dose.updates, "seeds": dose.seeds}
    for key, estimate in dose.blocked.items():
        row[key] = estimate.to_dict()
    if dose.more is not None:
        row |= {"more": dose.more.estimate.to_dict(), "paired_seeds": dose.more.pairs}
    return row
