"""The numbers of training runs by their keys in the table `TRAINING`, as means over runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.train.studies.learning_speed import AREA, SECONDS, STEPS, mean_of
from mismatch_cli.train.studies.phases import step_time
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.seeds import over_seeds

GAP = ("mismatch", "abs_dp_mean")  # of a step
_Number = Callable[[TrainingRun], float | None]

_SPEEDS = {measure.key: measure for measure in (AREA, STEPS, SECONDS)}
_MEANS = (
    "bad_over_negative", "bad_over_tokens", "blocked", "blocked_positive", "blocked_rare",
    "blocked_negative", "mu_blocked", "entropy_blocked",
)  # fmt: skip


def _first_gap(run: TrainingRun) -> float | None:
    return run.ends(*GAP)[0]


def _last_gap(run: TrainingRun) -> float | None:
    return run.ends(*GAP)[1]


def _first_entropy(run: TrainingRun) -> float | None:
    return run.ends("entropy")[0]


def _last_entropy(run: TrainingRun) -> float | None:
    return run.ends("entropy")[1]


def _turns(run: TrainingRun) -> float | None:
    """The mean number of turns; None where every response has one turn."""
    turns = run.last("turns")
    return None if turns == 1 else turns


def _seconds(run: TrainingRun) -> float | None:
    return step_time(run).seconds or None


# What is compared between runs
_OVER_COMMON_STEPS: Mapping[str, _Number] = {
    "reward": methodcaller("last", "reward"),
    "best": attrgetter("best_reward"),
    "eval_accuracy": attrgetter("final_accuracy"),
    "accuracy_before": attrgetter("accuracy_before"),
    "abs_dp_first": _first_gap,
    "abs_dp_last": _last_gap,
    **{key: methodcaller("mean", key) for key in _MEANS},
}
# How a trainer and its engine are
_OVER_ALL_STEPS: Mapping[str, _Number] = {
    "updates": methodcaller("highest", "updates"),
    "first_entropy": _first_entropy,
    "entropy": _last_entropy,
    "k3": methodcaller("last", "current", "k3"),
    "ratio_p01": methodcaller("last", "current", "ratio_p01"),
    "ratio_p99": methodcaller("last", "current", "ratio_p99"),
    "grad_norm": methodcaller("median", "grad_norm"),
    "length": methodcaller("last", "length"),
    "turns": _turns,
    "truncated": methodcaller("last", "truncated"),
    "back_offs": methodcaller("highest", "back_offs"),
    "weights_changed": methodcaller("last", "rounding", "weights_changed"),
    "rounding_gap": methodcaller("last", "rounding", "abs_dp_mean"),
    "groups_all_right": methodcaller("mean", "groups_all_right"),
    "groups_all_wrong": methodcaller("mean", "groups_all_wrong"),
    "seconds": _seconds,
}


@dataclass(frozen=True)
class RunGroup:
    """Runs whose numbers are averaged: the seeds of an algorithm in its setting, or one run."""

    name: str
    setting: str
    whole: Sequence[TrainingRun]
    runs: Sequence[TrainingRun]  # the same over the steps that all runs of their task share
    reward_to_reach: float | None = None

    @property
    def run(self) -> TrainingRun:
        """The first run, which is the only one of a group of one."""
        return self.whole[0]

    def number(self, key: str) -> Estimate:
        """The mean over the runs that have the number, with its interval over seeds."""
        if key in _SPEEDS:
            return mean_of(_SPEEDS[key], self.runs, self.reward_to_reach)
        return over_seeds(self._values(key))

    def runs_with(self, key: str) -> int:
        """How many of the runs have a number, of those that are not about speed."""
        return sum(value is not None for value in self._values(key))

    def _values(self, key: str) -> Iterable[float | None]:
        if key in _OVER_COMMON_STEPS:
            return map(_OVER_COMMON_STEPS[key], self.runs)
        return map(_OVER_ALL_STEPS[key], self.whole)
