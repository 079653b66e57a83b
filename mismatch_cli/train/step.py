"""One step of training as the trace records it: a table of its responses, and the metrics
computed from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
from mismatch_cli.rules.batch import Rollout, TokenBatch
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
        prompt_S = np.array([encoded.problem.prompt_id for encoded in self.posed], dtype=np.int64)
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
    has_top_k = _any_measured(use.update.topk_logp for use in step.uses)
    columns: dict[str, Any] = defaultdict(list)
    routes = []
    for use in step.uses:
        for place, row in enumerate(use.minibatch.rows):
            cells = _cells(step, use, place, row)
            if has_top_k:
                cells |= _top_k_cells(step, use, place, row)
            for name, cell in cells.items():
                columns[name].append(cell)
            # The engine chose its experts at the weights that sampled, so only these compare.
            routes.append(use.update.routes[place] if use.version == step.version else None)
    for name in ("logp_recomputed", "logp_average"):
        if not _any_measured([columns[name]]):
            del columns[name]
    if _any_measured(use.update.routes for use in step.uses):
        columns |= route_columns(routes)
    return rows_to_table(columns)


def _any_measured(columns: Iterable[Sequence[Any]]) -> bool:
    return any(value is not None for value in chain.from_iterable(columns))


def _cells(step: Step, use: UsedMinibatch, place: int, row: int) -> dict[str, Any]:
    """The cells of a response, which has this place in the minibatch and this row in the step."""
    rollout = step.rollouts[row]
    sampled_T = _loss_mask(rollout)
    reward = float(step.reward_S[row])
    logp_average_T = None
    if use.update.logp_average is not None:
        logp_average_T = _where_sampled(rollout, use.update.logp_average[place])
    return {
        "step": step.number,
        "epoch": use.minibatch.epoch,
        "minibatch": use.minibatch.number,
        "prompt_id": step.posed[row].problem.prompt_id,
        "sample_index": step.sample_index[row],
        "version_rollout": step.version,
        "version_trainer": use.version,
        "prompt_ids": rollout.prompt_ids,
        "response_ids": rollout.response_ids,
        "loss_mask": sampled_T,
        "logp_rollout": rollout.logp_rollout_T,
        "logp_trainer": use.update.logp[place],
        "logp_recomputed": _logp_recomputed(step, use, place, row),
        "logp_average": logp_average_T,
        "entropy_trainer": use.update.entropy[place],
        "reward": None if np.isnan(reward) else reward,
        "advantage": np.where(sampled_T, step.advantage_S[row], 0),
        "finish_reason": rollout.finish_reason,
    }


def _logp_recomputed(step: Step, use: UsedMinibatch, place: int, row: int) -> np.ndarray | None:
    """log π at the weights that sampled: that of the update, if it was made at these."""
    if use.version == step.version:
        return use.update.logp[place]
    if step.recomputed is None:
        return None
    return _where_sampled(step.rollouts[row], step.recomputed[row].logp_T)


def _top_k_cells(step: Step, use: UsedMinibatch, place: int, row: int) -> dict[str, Any]:
    """The cells of a response at the engine's top K, which the algorithm needs."""
    rollout = step.rollouts[row]
    cells = {
        "topk_ids": rollout.topk_ids_TK,
        "topk_logp_rollout": rollout.topk_logp_rollout_TK,
        "topk_logp_trainer": use.update.topk_logp[place],
    }
    if step.recomputed is not None:
        logp_TK = step.recomputed[row].logp_at_topk_TK
        cells["topk_logp_recomputed"] = _where_sampled(rollout, logp_TK)
    return cells


def _loss_mask(rollout: Rollout) -> np.ndarray:
    """Which tokens the engine sampled, bool."""
    if rollout.sampled_T is not None:
        return rollout.sampled_T
    return np.ones(len(rollout.response_ids), dtype=bool)


def _where_sampled(rollout: Rollout, values_T: np.ndarray | None) -> np.ndarray | None:
    """The trainer's values `_T` or `_TK`; NaN for the tokens of an environment, which count
    nowhere.
    """
    sampled_T = rollout.sampled_T
    if values_T is None or sampled_T is None:
        return values_T
    sampled_T = sampled_T if values_T.ndim == 1 else sampled_T[:, None]
    return np.where(sampled_T, values_T, np.float32(np.nan))


@dataclass(frozen=True)
class StepResponses:
    """Some responses of a step: what its line and its trace need of them."""

    table: pa.Table  # a row per use of a response
    reward_S: np.ndarray
    length_S: np.ndarray  # tokens that the model wrote
    turns_S: np.ndarray
    truncated_S: np.ndarray
    bounds_U3: Bounds


def mean_reward(reward_S: np.ndarray) -> float:
    """The mean over the graded responses; a `MismatchError` if there are none."""
    graded_S = reward_S[~np.isnan(reward_S)]
    if not len(graded_S):
        raise MismatchError(
            f"--reward graded none of {len(reward_S)} responses: it returned None for each. "
            "Return a number for some."
        )
    return float(graded_S.mean())


def step_responses(step: Step) -> StepResponses:
    """The line's and the trace's data for the responses of this rank."""
    length_S = np.array([r.num_sampled for r in step.rollouts])
    turns_S = np.array([r.num_turns for r in step.rollouts])
    truncated_S = np.array([r.finish_reason == "length" for r in step.rollouts])
    bounds_U3 = np.concatenate([no_bounds(), *(use.update.bounds for use in step.uses)])
    return StepResponses(step_table(step), step.reward_S, length_S, turns_S, truncated_S, bounds_U3)


def join_responses(parts: Sequence[StepResponses]) -> StepResponses:
    """The responses of all ranks, in their order."""
    if len(parts) == 1:
        return parts[0]
    tables = [part.table for part in parts if len(part.table)]
    table = pa.concat_tables(tables, promote_options="default")
    arrays = []
    for name in ("reward_S", "length_S", "turns_S", "truncated_S", "bounds_U3"):
        arrays.append(np.concatenate([getattr(part, name) for part in parts]))
    return StepResponses(table.combine_chunks(), *arrays)


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
    last = step.uses[-1]
    record: dict[str, Any] = {
        "step": step.number,
        "updates": last.version + int(last.update.stepped),
        "reward": mean_reward(responses.reward_S),
        "length": float(np.mean(responses.length_S)),
        "turns": float(np.mean(responses.turns_S)),
        "truncated": float(np.mean(responses.truncated_S)),
        "grad_norm": _mean_grad_norm(step),
    }
    record |= _gaps(batch, responses.table, routers)
    record |= _rare_facts(step, responses)
    if framework:
        record[AS] = {framework: dashboard(batch, framework)}
    groups_GS = responses.reward_S.reshape(-1, max(step.sample_index) + 1)
    return record | _groups(groups_GS) | _blocked(batch, algorithm)


def _gaps(batch: TokenBatch, table: pa.Table, routers: Mapping[str, Any]) -> dict[str, Any]:
    """The gaps between the policies, the entropy, and what routers did, if a model has any."""
    mismatch = MismatchSummary(PAIRS["mismatch"])
    current = MismatchSummary(PAIRS["total"])
    routing = RouteFlips()
    mismatch.update(batch, routing)
    current.update(batch)
    routing.update_responses(table, batch.prompt_id_S)
    estimates = current.estimates()
    gaps: dict[str, Any] = {
        "mismatch": _gap(mismatch, mismatch.estimates()),
        "current": _gap(current, estimates),
        "entropy": estimates["entropy_mean"].value,
    }
    routed = routing.result(0, routers)
    if routed is not None:
        gaps["routing"] = {key: estimate.value for key, estimate in routed.metrics.items()}
    return gaps


def _mean_grad_norm(step: Step) -> float | None:
    norms = [use.update.grad_norm for use in step.uses if use.update.stepped]
    return float(np.mean(norms)) if norms else None


def _gap(summary: MismatchSummary, estimates: Mapping[str, Estimate]) -> dict[str, float | None]:
    """The gap of a pair of policies; empty without a counted token."""
    if not summary.exact.counts.tokens:
        return {}
    return gap_record({key: estimate.value for key, estimate in estimates.items()})


def _rare_facts(step: Step, responses: StepResponses) -> dict[str, Any]:
    """Facts that only some steps have."""
    facts: dict[str, Any] = {}
    unjudged = int(np.isnan(responses.reward_S).sum())
    if unjudged:
        facts["unjudged"] = unjudged
    if step.sampled is not None:
        facts["sampled"] = step.sampled
    if len(responses.bounds_U3):
        facts["bounds"] = in_line(responses.bounds_U3)
    return facts


def _groups(reward_GS: np.ndarray) -> dict[str, float]:
    """Shares of groups that teach nothing: all responses to a problem earned 1, or all earned 0."""
    all_right = (reward_GS == 1).all(axis=1).mean()
    all_wrong = (reward_GS == 0).all(axis=1).mean()
    return {"groups_all_right": float(all_right), "groups_all_wrong": float(all_wrong)}


def _blocked(batch: TokenBatch, algorithm: Algorithm) -> dict[str, float | None]:
    """What the run's own algorithm blocks, and bad updates."""
    needs = Needs.of([algorithm])
    first_pass = FirstPass(algorithm.batch_masks)
    if first_pass.rules:
        add_to_first_pass(first_pass, batch, needs, 0)
    summary = ClippingSummary(Question((algorithm,), needs, batch_values=first_pass.settle()))
    summary.update(batch)
    return update_record(summary.result(blocked_tokens=0))
