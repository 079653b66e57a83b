"""The numbers of a run as a whole: ends, extremes and means over its steps, and means over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mismatch_cli.metrics.update_table import FIRST, LAST
from mismatch_cli.studies.runs import TrainingRun

FORMAT = "mismatch-cli training"
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


def summary_json(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """What summary.json holds: the settings and ends of each run; its steps are in metrics.jsonl."""
    return {
        "format": FORMAT,
        "version": 1,
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
            for run in runs
        ],
    }


def spread(values: Sequence[float | None]) -> Spread:
    """The mean over seeds with the lowest and highest; one seed has no range."""
    found = [value for value in values if value is not None]
    if not found:
        return None, None, None
    mean = float(np.mean(found))
    return (mean, min(found), max(found)) if len(found) > 1 else (mean, None, None)
