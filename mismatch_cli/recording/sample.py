"""The first half of a recording: sample, check, grade, and rename each shard in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.batch import Rollout
from mismatch_cli.engines import Engine, Request
from mismatch_cli.engines._sampling import sample_checked, sample_seed
from mismatch_cli.recording.full_divergence import Distributions
from mismatch_cli.tasks.advantages import group_mean_advantages
from mismatch_cli.tasks.grading import Grader
from mismatch_cli.tasks.prompts import Problem
from mismatch_cli.trace.writer import rows_to_table, shard_path, with_counts, write_shard


@dataclass(frozen=True)
class ShardPlan:
    """Fixed prompts for one shard: the unit of work, and of what a kill can lose."""

    index: int
    problems: list[Problem]
    prompt_ids: list[list[int]]

    def path(self, folder: Path) -> Path:
        return shard_path(folder, self.index)


def plan_shards(problems: list[Problem], prompt_ids: list[list[int]], prompts_per_shard: int) -> list[ShardPlan]:
    return [
        ShardPlan(index, problems[start : start + prompts_per_shard], prompt_ids[start : start + prompts_per_shard])
        for index, start in enumerate(range(0, len(problems), prompts_per_shard))
    ]


def sample_shard(
    plan: ShardPlan,
    engine: Engine,
    grader: Grader,
    *,
    folder: Path,
    samples_per_prompt: int,
    first_sample: int = 0,
    seed: int,
    on_finished: Callable[[int], None],
    distributions: Distributions | None = None,
    first_response: int = 0,
) -> None:
    """Sample all responses of a shard, check and grade them, and write it.

    `distributions` take what the run's first responses were drawn from; the shard's first is number `first_response`.
    """
    numbers = range(first_sample, first_sample + samples_per_prompt)
    keys = [(i, sample) for i in range(len(plan.problems)) for sample in numbers]
    requests = [Request(plan.prompt_ids[i], sample_seed(seed, plan.problems[i].prompt_id, s)) for i, s in keys]
    problems = [plan.problems[i] for i, _ in keys]
    with ExitStack() as files:
        sinks = files.enter_context(distributions.sinks(first_response, len(requests))) if distributions else []
        rollouts = sample_checked(engine, requests, [p.prompt_id for p in problems], on_finished, sinks)
    columns = _columns(problems, [sample for _, sample in keys], rollouts)
    timeouts_before = grader.timeouts
    columns |= _grades(problems, rollouts, grader)
    table = rows_to_table(columns)
    write_shard(plan.path(folder), with_counts(table, grading_timeouts=grader.timeouts - timeouts_before))


def _columns(problems: Sequence[Problem], samples: Sequence[int], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    count = len(rollouts)
    columns: dict[str, Any] = {
        **{name: np.zeros(count, dtype=np.int32) for name in ("step", "epoch", "minibatch", "version_rollout")},
        "prompt_id": [p.prompt_id for p in problems],
        "sample_index": samples,
        "finish_reason": [r.finish_reason for r in rollouts],
        "prompt_ids": [r.prompt_ids for r in rollouts],
        "response_ids": [r.response_ids for r in rollouts],
        "loss_mask": [np.ones(len(r.response_ids), dtype=bool) for r in rollouts],
        "logp_rollout": [r.logp_rollout_T for r in rollouts],
        "rank_rollout": [r.rank_rollout_T for r in rollouts],
    }
    if any(r.topk_ids_TK is not None for r in rollouts):
        columns["topk_ids"] = [r.topk_ids_TK for r in rollouts]
        columns["topk_logp_rollout"] = [r.topk_logp_rollout_TK for r in rollouts]
    return columns


def _grades(problems: Sequence[Problem], rollouts: Sequence[Rollout], grader: Grader) -> dict[str, Any]:
    """Rewards, and the advantages that follow; null for the problems that cannot be judged."""
    if not any(grader.can_grade(problem) for problem in problems):
        return {}
    rewards = [
        grader.reward(problem, rollout) if grader.can_grade(problem) else np.nan
        for problem, rollout in zip(problems, rollouts, strict=True)
    ]
    reward_S = np.array(rewards, dtype=np.float32)
    advantage_S = group_mean_advantages(reward_S, np.array([p.prompt_id for p in problems]))
    lengths = [len(r.response_ids) for r in rollouts]
    return {
        "reward": [None if np.isnan(reward) else reward for reward in reward_S],
        "advantage": [
            None if np.isnan(a) else np.full(n, a, dtype=np.float32) for n, a in zip(lengths, advantage_S, strict=True)
        ],
    }
