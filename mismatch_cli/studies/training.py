"""The numbers of a run as a whole: ends, extremes and means over its steps, and means over the seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mismatch_cli.metrics.update_table import FIRST, LAST
from mismatch_cli.studies.curves import Curve, curve_of
from mismatch_cli.studies.runs import TrainingRun
from mismatch_cli.studies.study import Study

Spread = tuple[float | None, float | None, float | None]  # mean over seeds, lowest, highest


def mean_of(value_N: np.ndarray) -> float | None:
    """The mean of what was measured."""
    finite_N = value_N[np.isfinite(value_N)]
    return float(finite_N.mean()) if len(finite_N) else None


def median_of(value_N: np.ndarray) -> float | None:
    finite_N = value_N[np.isfinite(value_N)]
    return float(np.median(finite_N)) if len(finite_N) else None


def first(run: TrainingRun, *keys: str) -> float | None:
    return mean_of(run.series(*keys)[run.step_N > 0][:FIRST])  # step 0 is an evaluation before the first


def last(run: TrainingRun, *keys: str) -> float | None:
    return mean_of(run.series(*keys)[-LAST:])


def over_steps(run: TrainingRun, *keys: str) -> float | None:
    return mean_of(run.series(*keys))


def best_reward(run: TrainingRun) -> float | None:
    """The highest mean of as many successive steps as the final reward is a mean of."""
    reward_N = run.series("reward")
    reward_N = reward_N[np.isfinite(reward_N)]
    if not len(reward_N):
        return None
    width = min(LAST, len(reward_N))
    return float(np.convolve(reward_N, np.full(width, 1 / width), "valid").max())


def final_accuracy(run: TrainingRun) -> float | None:
    """Of the last evaluation; the one before training does not count."""
    found_N = run.series("eval_accuracy")[run.step_N > 0]
    found_N = found_N[np.isfinite(found_N)]
    return float(found_N[-1]) if len(found_N) else None


def accuracy_before(run: TrainingRun) -> float | None:
    """Of the evaluation before the first step."""
    found_N = run.series("eval_accuracy")[run.step_N == 0]
    return mean_of(found_N)


def highest(run: TrainingRun, *keys: str) -> float | None:
    """Of a number that counts up over the run."""
    found_N = run.series(*keys)
    found_N = found_N[np.isfinite(found_N)]
    return float(found_N.max()) if len(found_N) else None


def last_step(run: TrainingRun) -> int:
    return int(run.step_N.max()) if run.records else 0


def planned_steps(run: TrainingRun) -> int | None:
    """How many steps it was to have; None where its settings are not known."""
    planned = run.config.get("steps")
    return planned if isinstance(planned, int) else None


def partial(run: TrainingRun) -> dict[str, Any] | None:
    """What a run has of its steps, where it has not all: it goes on, was ended early, or its file lost lines."""
    done, planned = last_step(run), planned_steps(run)
    missing = sorted(set(range(1, done + 1)) - {int(step) for step in run.step_N})
    if not missing and (planned is None or done >= planned):
        return None
    return {"steps": done, "planned_steps": planned, "missing_steps": missing}


def spread(values: Sequence[float | None]) -> Spread:
    """The mean over seeds with the lowest and highest; one seed has no range."""
    found = [value for value in values if value is not None]
    if not found:
        return None, None, None
    mean = float(np.mean(found))
    return (mean, min(found), max(found)) if len(found) > 1 else (mean, None, None)


@dataclass(frozen=True)
class TrainingAnalysis(Study):
    """One or several runs; the seeds of an algorithm become one curve."""

    STUDY, FORMAT = "training", "mismatch-cli training"

    runs: Sequence[TrainingRun]
    subject: str = ""  # who was trained on what, in one line

    @classmethod
    def of(cls, runs: Sequence[TrainingRun]) -> TrainingAnalysis:
        """The runs, with a subject line from their configurations."""
        algorithms = by_algorithm(runs)
        seeds = max((len(of) for of in algorithms.values()), default=0)
        parts = list(algorithms) if len(algorithms) == 1 else []
        parts += [_found(runs, "model"), _found(runs, "dataset"), f"{seeds} seeds" if seeds > 1 else ""]
        parts += [f"{policy} {_found(runs, key)}" for policy, key in _DTYPES if _found(runs, key)]
        return cls(runs, " · ".join(part for part in parts if part))

    @cached_property
    def algorithms(self) -> dict[str, list[TrainingRun]]:
        """The runs of each algorithm, in the order in which they were named."""
        return by_algorithm(self.runs)

    def to_json(self) -> dict[str, Any]:
        """What summary.json holds: the settings and ends of each run; its steps are in metrics.jsonl."""
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            "runs": [
                {
                    "name": run.name,
                    "algorithm": run.algorithm,
                    "seed": run.seed,
                    "steps": last_step(run),
                    "partial": partial(run),
                    "final_reward": last(run, "reward"),
                    "best_reward": best_reward(run),
                    "accuracy_before": accuracy_before(run),
                    "final_accuracy": final_accuracy(run),
                    "abs_dp_mean_first": first(run, "mismatch", "abs_dp_mean"),
                    "abs_dp_mean_last": last(run, "mismatch", "abs_dp_mean"),
                    "bad_over_tokens": over_steps(run, "bad_over_tokens"),
                    "bad_over_negative": over_steps(run, "bad_over_negative"),
                    "blocked": over_steps(run, "blocked"),
                    "config": dict(run.config),
                }
                for run in self.runs
            ],
        }

    def curves(self, *keys: str, gaps: bool = True) -> dict[str, Curve]:
        """The curve of each algorithm for which the number was recorded."""
        curves = {name: curve_of(runs, *keys, gaps=gaps) for name, runs in self.algorithms.items()}
        return {name: curve for name, curve in curves.items() if curve.has_values}

    def has(self, *keys: str) -> bool:
        return any(np.isfinite(run.series(*keys)).any() for run in self.runs)


_DTYPES = (("trainer", "trainer_dtype"), ("rollout", "rollout_dtype"))


def by_algorithm(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """The runs of each algorithm, in the order in which they were named."""
    found: dict[str, list[TrainingRun]] = {}
    for run in runs:
        found.setdefault(run.algorithm, []).append(run)
    return found


def _short(name: str) -> str:
    """A model or data set without the folders in which it lies; `owner/name` of the hub stays."""
    return name if name.count("/") < 2 else name.rsplit("/", 1)[-1]


def _found(runs: Sequence[TrainingRun], key: str) -> str:
    """The setting of the runs, or the different ones that they have."""
    return ", ".join(dict.fromkeys(_short(str(run.config[key])) for run in runs if run.config.get(key)))


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
