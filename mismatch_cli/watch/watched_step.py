"""One step of a watched run: its numbers under the names of metrics.jsonl, and the limits
checked on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.limits.judge import pair_for
from mismatch_cli.limits.limit_sets import Limit, LimitSet
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.update_table import OF_STEP, PAIRS_OF_STEP, gap_record, update_record
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.gate import (
    Check,
    Findable,
    MeasuredMetric,
    PooledMetrics,
    check_limits,
    frameworks_of,
)
from mismatch_cli.studies.mismatch import MismatchResult
from mismatch_cli.trace.reader import Trace

_RESPONSES = {
    "reward": "reward_mean", "length": "length_mean", "truncated": "truncated_share",
    "entropy": "entropy_mean",
}  # fmt: skip


@dataclass(frozen=True)
class StepChecks:
    """What to check at each step: limits, with a baseline for relative ones, and what an
    algorithm would block.
    """

    sets: Sequence[LimitSet] = ()
    baseline: PooledMetrics | None = None
    algorithm: Algorithm | None = None

    @classmethod
    def of(
        cls, sets: Sequence[LimitSet], baseline: Sequence[Trace], algorithm: Algorithm | None
    ) -> StepChecks:
        """A judge with its baseline measured."""
        return cls(
            sets, PooledMetrics(baseline, frameworks_of(sets)) if baseline else None, algorithm
        )

    def of_traces(self, step: int, traces: Sequence[Trace]) -> tuple[dict[str, Any], list[Check]]:
        """The line and the checks of a step, from its traces."""
        try:
            measured = PooledMetrics(traces, frameworks_of(self.sets))
        except MismatchError:  # not scored; damaged traces are refused below as well
            return _unscored(step, traces), self._checks(_Unscored())
        record = record_of(step, measured.result) | self._blocked(traces)
        return record, self._checks(measured)

    def of_record(self, record: Mapping[str, Any], trace: Trace | None) -> list[Check]:
        """The checks of a step of `train`: from its trace if one was kept, else from its line."""
        if not self.sets:
            return []
        measured = (
            RecordedStep(record)
            if trace is None
            else PooledMetrics([trace], frameworks_of(self.sets))
        )
        return self._checks(measured)

    def _checks(self, measured: Findable) -> list[Check]:
        return check_limits(self.sets, measured, self.baseline)

    def _blocked(self, traces: Sequence[Trace]) -> dict[str, float | None]:
        """What the algorithm blocks; empty if these traces lack what it needs."""
        if self.algorithm is None:
            return {}
        try:
            return update_record(analyse_clipping(traces, [self.algorithm]).result)
        except MismatchError:
            return {}


class RecordedStep:
    """A line of metrics.jsonl, for limits to look up."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def find(self, limit: Limit) -> MeasuredMetric:
        """The value of a metric in the line, which has neither interval nor noise."""
        recorded = [pair for pair, name in PAIRS_OF_STEP.items() if self._record.get(name)]
        pair = pair_for(limit.pair, recorded)
        name = next((ours for ours, key in OF_STEP.items() if key == limit.metric), "")
        value = self._record.get(PAIRS_OF_STEP.get(pair, ""), {}).get(name)
        if value is None:
            return MeasuredMetric(
                pair=pair or limit.pair,
                why="metrics.jsonl does not have it; train --trace-every N keeps traces that do",
            )
        return MeasuredMetric(value, pair=pair)


class _Unscored:
    """Responses without a trainer's log π."""

    def find(self, limit: Limit) -> MeasuredMetric:
        return MeasuredMetric(
            pair=limit.pair or "mismatch", why="the responses have no trainer log-probabilities"
        )


def record_of(step: int, result: MismatchResult) -> dict[str, Any]:
    """A step's line from its result, as `train` writes it; at equal weights there is one gap."""
    values = {name: _values(pair.metrics) for name, pair in result.pairs.items()}
    counts, of_responses = result.main.counts, values[result.main.pair]
    return {
        "step": step,
        "responses": counts.responses + result.about.unscored_responses,
        "tokens": counts.tokens,
        **{name: of_responses[key] for name, key in _RESPONSES.items()},
        **{
            name: gap_record(values[pair]) if pair in values else {}
            for pair, name in PAIRS_OF_STEP.items()
        },
    }


def _values(metrics: Mapping[str, Estimate]) -> dict[str, float | None]:
    return {key: estimate.value for key, estimate in metrics.items()}


def _unscored(step: int, traces: Sequence[Trace]) -> dict[str, Any]:
    batches = [batch for trace in traces for batch in trace.batches(("reward",))]
    rewards = [batch.reward_S for batch in batches if batch.reward_S is not None]
    reward_S = np.concatenate(rewards) if rewards else np.zeros(0)
    reward_S = reward_S[np.isfinite(reward_S)]
    responses, tokens = (
        sum(b.num_responses for b in batches),
        sum(int(b.offset_S1[-1]) for b in batches),
    )
    return {
        "step": step,
        "responses": responses,
        "tokens": tokens,
        "reward": float(reward_S.mean()) if len(reward_S) else None,
        "length": tokens / responses if responses else None,
        "mismatch": {},
        "current": {},
    }
