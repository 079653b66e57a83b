"""The first half of a recording: sample, check, grade, and rename each shard in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.batch import Rollout
from mismatch_cli.engines import Engine, Request
from mismatch_cli.errors import MismatchError, first_line
from mismatch_cli.recording.seeds import sample_seed
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
    decode: Callable[[list[int]], str],
    *,
    folder: Path,
    samples_per_prompt: int,
    seed: int,
    on_finished: Callable[[int], None],
) -> None:
    """Sample all responses of a shard, check and grade them, and write it."""
    keys = [(i, sample) for i in range(len(plan.problems)) for sample in range(samples_per_prompt)]
    requests = [Request(plan.prompt_ids[i], sample_seed(seed, plan.problems[i].prompt_id, s)) for i, s in keys]
    rollouts = _sample(engine, requests, on_finished)
    problems = [plan.problems[i] for i, _ in keys]
    for problem, rollout in zip(problems, rollouts, strict=True):
        _check(problem, rollout)
    columns = _columns(problems, [sample for _, sample in keys], rollouts)
    timeouts_before = grader.timeouts
    columns |= _grades(problems, rollouts, grader, decode)
    table = rows_to_table(columns)
    write_shard(plan.path(folder), with_counts(table, grading_timeouts=grader.timeouts - timeouts_before))


def _sample(engine: Engine, requests: Sequence[Request], on_finished: Callable[[int], None]) -> list[Rollout]:
    try:
        return engine.sample(requests, on_finished)
    except MismatchError:
        raise
    except Exception as error:  # a foreign library can fail in any way: out of memory, a lost worker
        raise MismatchError(
            f"The rollout engine failed while sampling ({type(error).__name__}: {first_line(error)}). "
            "What was sampled before is kept: go on with --resume. --debug shows where it failed."
        ) from error


def _check(problem: Problem, rollout: Rollout) -> None:
    """Refuse what no sampler can have drawn: everything after this would be computed from it."""
    logp_T = rollout.logp_rollout_T
    bad_T = ~np.isfinite(logp_T) | (logp_T > 0)
    if bad_T.any():
        position = int(bad_T.argmax())
        raise MismatchError(
            f"The engine reported log μ = {logp_T[position]:g} for token {position} of a response to prompt "
            f"{problem.prompt_id}. A sampled token has a finite log-probability of at most 0: "
            "try another --rollout-dtype, or report it to the engine's authors."
        )
    # A certain token has rank 1; exactly 0.0 elsewhere is a placeholder for "not computed".
    placeholder_T = (logp_T == 0) & (rollout.rank_rollout_T > 1)
    if placeholder_T.any():
        position = int(placeholder_T.argmax())
        raise MismatchError(
            f"The engine reported log μ = 0.0 (certain) for token {position} of a response to prompt "
            f"{problem.prompt_id}, but rank {rollout.rank_rollout_T[position]}: a placeholder for a missing value. "
            "Switch off what skips the computation (speculative decoding, a sampler plug-in)."
        )


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


def _grades(
    problems: Sequence[Problem], rollouts: Sequence[Rollout], grader: Grader, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Rewards, and the advantages that follow; null for the problems without an answer."""
    if all(p.answer is None for p in problems):
        return {}
    rewards = [
        np.nan if p.answer is None else grader.grade(decode(r.response_ids), p.answer, r.finish_reason)
        for p, r in zip(problems, rollouts, strict=True)
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
