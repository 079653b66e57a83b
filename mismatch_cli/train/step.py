"""One step of training as the trace records it: a table of its responses, and the metrics
computed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.frameworks.dialects import dashboard
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.clipping.masked_slice import Needs, add_to_first_pass
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.route_flips import RouteFlips
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.metrics.update_table import gap_record, update_record
from mismatch_cli.models.scoring.trainer import ResponseScores
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.first_pass import FirstPass
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.trace.reader import table_to_batch
from mismatch_cli.trace.routes import route_columns
from mismatch_cli.trace.training_folder import AS
from mismatch_cli.trace.writer import rows_to_table
from mismatch_cli.train.bounds import Bounds, FullReference, in_line, no_bounds
from mismatch_cli.train.learner import Update
from mismatch_cli.train.task import EncodedProblem


@dataclass
class Step:
    """The sampled responses, their rewards, and the trainer's log π before each update."""

    number: int
    version: int  # optimiser steps that led to the weights that sampled
    posed: list[EncodedProblem]  # one per response
    sample_index: list[int]
    rollouts: list[Rollout]
    reward_S: np.ndarray
    advantage_S: np.ndarray
    recomputed: list[ResponseScores] | None = None  # by the weights that sampled
    references: dict[int, FullReference] = field(default_factory=dict)  # of few responses, by row
    uses: list[UsedMinibatch] = field(default_factory=list)
    # Of all sampled groups, if dynamic sampling replaced some
    sampled: dict[str, Any] | None = None

    @property
    def hash_S(self) -> np.ndarray:
        """A uint64 per response, from its step, problem and number."""
        prompt_S = np.array([posed.problem.prompt_id for posed in self.posed], dtype=np.int64)
        index_S = np.array(self.sample_index, dtype=np.int64)
        return hash_keys(np.full_like(prompt_S, self.number), prompt_S, index_S)

    @property
    def first_logp(self) -> list[np.ndarray]:
        """log π of the first minibatch at the weights that sampled, _T each."""
        first = self.uses[0]
        if first.version == self.version or self.recomputed is None:
            return first.update.logp
        return [self.recomputed[row].logp_T for row in first.minibatch.rows]


@dataclass(frozen=True)
class Minibatch:
    """The responses of one update, by their place in the step."""

    epoch: int
    number: int
    rows: list[int]


@dataclass(frozen=True)
class UsedMinibatch:
    """A minibatch, and what its update measured."""

    minibatch: Minibatch
    version: int  # optimiser steps that led to the weights before this update
    update: Update


def step_table(step: Step) -> pa.Table:
    """One row per response and use, in the columns of a trace."""
    rows = [(use, place, row) for use in step.uses for place, row in enumerate(use.minibatch.rows)]
    equal = [use.version == step.version for use, _, _ in rows]
    columns: dict[str, Any] = {
        "step": [step.number] * len(rows),
        "epoch": [use.minibatch.epoch for use, _, _ in rows],
        "minibatch": [use.minibatch.number for use, _, _ in rows],
        "prompt_id": [step.posed[row].problem.prompt_id for _, _, row in rows],
        "sample_index": [step.sample_index[row] for _, _, row in rows],
        "version_rollout": [step.version] * len(rows),
        "version_trainer": [use.version for use, _, _ in rows],
        "prompt_ids": [step.rollouts[row].prompt_ids for _, _, row in rows],
        "response_ids": [step.rollouts[row].response_ids for _, _, row in rows],
        "loss_mask": [_sampled_T(step.rollouts[row]) for _, _, row in rows],
        "logp_rollout": [step.rollouts[row].logp_rollout_T for _, _, row in rows],
        "logp_trainer": [use.update.logp[place] for use, place, _ in rows],
        "entropy_trainer": [use.update.entropy[place] for use, place, _ in rows],
        "reward": [
            None if np.isnan(step.reward_S[row]) else float(step.reward_S[row])
            for _, _, row in rows
        ],
        "advantage": [
            np.where(_sampled_T(step.rollouts[row]), step.advantage_S[row], 0) for _, _, row in rows
        ],
        "finish_reason": [step.rollouts[row].finish_reason for _, _, row in rows],
    }
    if step.recomputed is not None or any(equal):
        known = step.recomputed
        columns["logp_recomputed"] = [
            use.update.logp[place]
            if same
            else None
            if known is None
            else _measured(step, row, known[row].logp_T)
            for (use, place, row), same in zip(rows, equal, strict=True)
        ]
    if any(use.update.logp_average is not None for use in step.uses):
        columns["logp_average"] = [
            None
            if use.update.logp_average is None
            else _measured(step, row, use.update.logp_average[place])
            for use, place, row in rows
        ]
    # The algorithm needs the top K
    if any(use.update.topk_logp[place] is not None for use, place, _ in rows):
        columns |= {
            "topk_ids": [step.rollouts[row].topk_ids_TK for _, _, row in rows],
            "topk_logp_rollout": [step.rollouts[row].topk_logp_rollout_TK for _, _, row in rows],
            "topk_logp_trainer": [use.update.topk_logp[place] for use, place, _ in rows],
        }
        if step.recomputed is not None:
            known_at = [scores.logp_at_topk_TK for scores in step.recomputed]
            columns["topk_logp_recomputed"] = [
                _measured(step, row, known_at[row]) for _, _, row in rows
            ]
    if any(found is not None for use in step.uses for found in use.update.routes):
        columns |= route_columns(
            [
                use.update.routes[place] if same else None
                for (use, place, _), same in zip(rows, equal, strict=True)
            ]
        )
    return rows_to_table(columns)


def _sampled_T(rollout: Rollout) -> np.ndarray:
    """The loss mask, bool: which tokens the engine sampled."""
    return (
        np.ones(len(rollout.response_ids), dtype=bool)
        if rollout.sampled_T is None
        else rollout.sampled_T
    )


def _measured(step: Step, row: int, values_T: np.ndarray | None) -> np.ndarray | None:
    """The trainer's values; NaN for the tokens of an environment, which count nowhere."""
    sampled_T = step.rollouts[row].sampled_T
    if values_T is None or sampled_T is None:
        return values_T
    return np.where(sampled_T.reshape(-1, *[1] * (values_T.ndim - 1)), values_T, np.float32(np.nan))


@dataclass(frozen=True)
class StepResponses:
    """What the line and the trace of a step need of some of its responses."""

    table: pa.Table  # a row per use of a response
    reward_S: np.ndarray
    length_S: np.ndarray  # tokens that the model wrote
    turns_S: np.ndarray
    truncated_S: np.ndarray
    bounds_U3: Bounds


def mean_reward(reward_S: np.ndarray) -> float:
    """The mean over the graded responses; a `MismatchError` if there are none."""
    judged_S = reward_S[~np.isnan(reward_S)]
    if not len(judged_S):
        raise MismatchError(
            f"--reward graded none of {len(reward_S)} responses: it returned None for each. "
            "Return a number for some."
        )
    return float(judged_S.mean())


def step_responses(step: Step) -> StepResponses:
    """The line's and the trace's data for the responses of this rank."""
    length_S = np.array([r.num_sampled for r in step.rollouts])
    turns_S = np.array([r.num_turns for r in step.rollouts])
    truncated_S = np.array([r.finish_reason == "length" for r in step.rollouts])
    bounds_U3 = np.concatenate([no_bounds(), *(use.update.bounds for use in step.uses)])
    return StepResponses(step_table(step), step.reward_S, length_S, turns_S, truncated_S, bounds_U3)


def joined(parts: Sequence[StepResponses]) -> StepResponses:
    """The responses of all ranks, in their order."""
    if len(parts) == 1:
        return parts[0]
    table = pa.concat_tables(
        [part.table for part in parts if len(part.table)], promote_options="default"
    )
    columns = (
        [getattr(part, name) for part in parts]
        for name in ("reward_S", "length_S", "turns_S", "truncated_S", "bounds_U3")
    )
    return StepResponses(table.combine_chunks(), *map(np.concatenate, columns))


def step_record(
    step: Step,
    responses: StepResponses,
    algorithm: Algorithm,
    routers: Mapping[str, Any] = MappingProxyType({}),
    framework: str = "",
) -> dict[str, Any]:
    """The line of metrics.jsonl, without times, from the accumulators that measure every trace.

    `routers` are those of the trainer, as a manifest describes them. `framework` adds what that
    framework would show.
    """
    batch = table_to_batch(responses.table)
    pairs, routing = (
        {name: MismatchSummary(PAIRS[name]) for name in ("mismatch", "total")},
        RouteFlips(),
    )
    pairs["mismatch"].update(batch, routing)
    pairs["total"].update(batch)
    routing.update_responses(responses.table, batch.prompt_id_S)
    total = pairs["total"].estimates()
    norms = [use.update.grad_norm for use in step.uses if use.update.stepped]
    record: dict[str, Any] = {
        "step": step.number,
        "updates": step.uses[-1].version + int(step.uses[-1].update.stepped),
        "reward": mean_reward(responses.reward_S),
        "length": float(np.mean(responses.length_S)),
        "turns": float(np.mean(responses.turns_S)),
        "truncated": float(np.mean(responses.truncated_S)),
        "grad_norm": float(np.mean(norms)) if norms else None,
        "mismatch": _pick(pairs["mismatch"], pairs["mismatch"].estimates()),
        "current": _pick(pairs["total"], total),
        "entropy": total["entropy_mean"].value,
    }
    if routed := routing.result(0, routers):
        record["routing"] = {key: estimate.value for key, estimate in routed.metrics.items()}
    if unjudged := int(np.isnan(responses.reward_S).sum()):
        record["unjudged"] = unjudged
    if step.sampled is not None:
        record["sampled"] = step.sampled
    if len(responses.bounds_U3):
        record["bounds"] = in_line(responses.bounds_U3)
    if framework:
        record[AS] = {framework: dashboard(batch, framework)}
    return (
        record
        | _groups(responses.reward_S.reshape(-1, max(step.sample_index) + 1))
        | _blocked(batch, algorithm)
    )


def _groups(reward_GS: np.ndarray) -> dict[str, float]:
    """Shares of groups that teach nothing: all responses to a problem earned 1, or all earned 0."""
    right, wrong = ((reward_GS == earned).all(axis=1).mean() for earned in (1, 0))
    return {"groups_all_right": float(right), "groups_all_wrong": float(wrong)}


def _pick(summary: MismatchSummary, estimates: Mapping[str, Estimate]) -> dict[str, float | None]:
    return (
        gap_record({key: found.value for key, found in estimates.items()})
        if summary.exact.counts.tokens
        else {}
    )


def _blocked(batch: Any, algorithm: Algorithm) -> dict[str, float | None]:
    """What the run's own algorithm blocks, and bad updates."""
    needs = Needs.of([algorithm])
    gathering = FirstPass(algorithm.batch_masks)
    if gathering.rules:
        add_to_first_pass(gathering, batch, needs, 0)
    summary = ClippingSummary(Question((algorithm,), needs, batch_values=gathering.settle()))
    summary.update(batch)
    return update_record(summary.result(blocked_tokens=0))
