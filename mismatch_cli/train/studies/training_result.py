"""The result of training runs as docs/json/training.md describes it; estimates are over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_cli.base.json_form import left_out_if_none
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.studies.watch_state import WatchResult
from mismatch_cli.train.studies.common_steps import CommonSteps
from mismatch_cli.train.studies.learning_speed import ClaimResult
from mismatch_cli.train.studies.runs import PartialRun, SetAccuracy, TrainingRun
from mismatch_cli.train.studies.staleness import DoseResponse


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The settings of a run, and its values over the common steps; None where not measured."""

    name: str
    algorithm: str
    seed: int | None
    setting: str
    steps: int
    partial: PartialRun | None  # None for a run with all its steps
    final_reward: float | None
    best_reward: float | None
    accuracy_before: float | None
    final_accuracy: float | None
    accuracy_by_set: Mapping[str, SetAccuracy]
    abs_dp_mean_first: float | None
    abs_dp_mean_last: float | None
    bad_over_tokens: float | None
    bad_over_negative: float | None
    blocked: float | None
    config: Mapping[str, Any]

    @classmethod
    def of(cls, whole: TrainingRun, run: TrainingRun, setting: str) -> RunResult:
        """The result of a whole run; `run` is the same over the common steps."""
        first, last = run.ends("mismatch", "abs_dp_mean")
        return cls(
            name=whole.name,
            algorithm=whole.algorithm,
            seed=whole.seed,
            setting=setting,
            steps=whole.steps,
            partial=whole.partial,
            final_reward=run.last("reward"),
            best_reward=run.best_reward,
            accuracy_before=run.accuracy_before,
            final_accuracy=run.final_accuracy,
            accuracy_by_set=run.accuracy_by_set,
            abs_dp_mean_first=first,
            abs_dp_mean_last=last,
            bad_over_tokens=run.mean("bad_over_tokens"),
            bad_over_negative=run.mean("bad_over_negative"),
            blocked=run.mean("blocked"),
            config=dict(whole.config),
        )


@dataclass(frozen=True, kw_only=True)
class ComparedSteps:
    """The common steps of the runs of one task; None where there are none."""

    runs: Sequence[str]
    steps: int
    first_step: int | None
    last_step: int | None
    reward_from: int | None  # the first step of the final reward
    partial: bool  # whether runs have others

    @classmethod
    def of(cls, common: CommonSteps) -> ComparedSteps:
        steps = common.step_N.astype(int).tolist()
        window = common.window_N.astype(int).tolist()
        return cls(
            runs=[run.name for run in common.runs],
            steps=len(steps),
            first_step=steps[0] if steps else None,
            last_step=steps[-1] if steps else None,
            reward_from=window[0] if window else None,
            partial=not common.is_whole,
        )


@dataclass(frozen=True)
class Lead:
    """How much higher the final reward of an algorithm is than that of another."""

    algorithm: str  # the other
    by: Estimate
    paired_seeds: int  # 0 where the runs are not paired


@dataclass(frozen=True, kw_only=True)
class AlgorithmResult:
    """The final reward of an algorithm beside its rivals'."""

    algorithm: str
    seeds: int
    final_reward: Estimate
    above: Sequence[str]  # rivals than which it is clearly higher, best first
    higher_than: Sequence[Lead]  # every rival


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Everything that is said of training runs; their steps are in metrics.jsonl."""

    runs: Sequence[RunResult]
    compared_over: Sequence[ComparedSteps]
    algorithms: Sequence[AlgorithmResult]
    claims: Sequence[ClaimResult]
    by_staleness: Sequence[DoseResponse] | None = left_out_if_none()
    watch: WatchResult | None = left_out_if_none()
