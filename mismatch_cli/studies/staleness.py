"""What trust regions block by how many updates old the weights are that sample: the dose of
section 4.2 of the DPPO paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.studies.run_settings import SEPARATOR, settings_of_runs
from mismatch_cli.studies.runs import TrainingRun
from mismatch_cli.studies.seeds import Difference, Seeded, difference, over_seeds

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
class Response:
    """An algorithm in one setting, at several doses, lowest first."""

    name: str
    doses: tuple[Dose, ...]

    def to_json(self) -> dict[str, Any]:
        return {"algorithm": self.name, "doses": [_to_json(dose) for dose in self.doses]}


def responses(runs: Sequence[TrainingRun]) -> list[Response]:
    """Every algorithm that was trained with several staleness values; the runs are over common
    steps.

    Counted are the steps at which the engine of every such run is as far behind as it should be: a
    run begins with its first weights, which are not that old yet.
    """
    ages = {age_of(run) for run in runs}
    if len(ages) < 2:
        return []
    first = max(_first_step(run) for run in runs)
    late = [_from(run, first) for run in runs]
    groups: dict[str, dict[int, list[TrainingRun]]] = {}
    for run, setting in zip(late, settings_of_runs(list(map(_without, late))), strict=True):
        name = SEPARATOR.join(filter(None, (run.algorithm, setting)))
        if run.mean(SHARES[0]) is not None:
            groups.setdefault(name, {}).setdefault(age_of(run), []).append(run)
    return [Response(name, _doses(by_age)) for name, by_age in groups.items() if len(by_age) > 1]


def age_of(run: TrainingRun) -> int:
    """How many updates old the weights are with which its engine samples."""
    updates = run.config.get(KEY)
    return updates if isinstance(updates, int) else 0


def _doses(by_age: dict[int, list[TrainingRun]]) -> tuple[Dose, ...]:
    lowest = _by_seed(by_age[min(by_age)])
    doses = []
    for age in sorted(by_age):
        runs = by_age[age]
        blocked = {key: over_seeds(run.mean(key) for run in runs) for key in SHARES}
        more = None if age == min(by_age) else difference(_by_seed(runs), lowest)
        doses.append(Dose(age, len(runs), blocked, more))
    return tuple(doses)


def _by_seed(runs: Sequence[TrainingRun]) -> Seeded:
    shares = ((run.seed, run.mean(SHARES[0])) for run in runs)
    return [(seed, share) for seed, share in shares if share is not None]


def _first_step(run: TrainingRun) -> float:
    """The first step that was sampled with weights as old as they should be; infinity if none
    was.
    """
    if not age_of(run):
        return -np.inf
    ready_N = run.step_N[run.series("updates") >= age_of(run)]
    return float(ready_N.min()) + 1 if len(ready_N) else np.inf


def _from(run: TrainingRun, first: float) -> TrainingRun:
    rows = zip(run.records, run.step_N, strict=True)
    return replace(run, records=[record for record, step in rows if step >= first])


def _without(run: TrainingRun) -> TrainingRun:
    """The run without its dose, which is no part of the name of its algorithm."""
    return replace(run, config={key: value for key, value in run.config.items() if key != KEY})


def _to_json(dose: Dose) -> dict[str, Any]:
    shares = {key: estimate.to_dict() for key, estimate in dose.blocked.items()}
    more = {}
    if dose.more is not None:
        more = {"more": dose.more.estimate.to_dict(), "paired_seeds": dose.more.pairs}
    return {KEY: dose.updates, "seeds": dose.seeds, **shares, **more}
