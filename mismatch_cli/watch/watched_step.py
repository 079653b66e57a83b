"""One step of a watched run: its numbers under the names of metrics.jsonl, and the limits
checked on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.limits.judge import agreement_of, pair_for
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
        cls, sets: Sequence[LimitSet], baseline: Sequence[Path], algorithm: Algorithm | None
    ) -> StepChecks:
        """The checks, with the traces of the baseline measured."""
        traces = [Trace.open(path) for path in baseline]
        measured = PooledMetrics(traces, frameworks_of(sets)) if traces else None
        return cls(sets, measured, algorithm)

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
        if trace is None:
            return self._checks(RecordedStep(record))
        return self._checks(PooledMetrics([trace], frameworks_of(self.sets)))

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
        gap: Mapping[str, Any] = self._record.get(PAIRS_OF_STEP.get(pair, ""), {})
        for name, metric in OF_STEP.items():
            if metric == limit.metric and gap.get(name) is not None:
                agreement = agreement_of(metric)
                return MeasuredMetric(gap[name], pair=pair, agreement=agreement)
        return MeasuredMetric(
            pair=pair or limit.pair,
            why="metrics.jsonl does not have it; train --trace-every N keeps traces that do",
        )


class _Unscored:
    """Responses without a trainer's log π, for limits to look up: they find nothing."""

    def find(self, limit: Limit) -> MeasuredMetric:
        return MeasuredMetric(
            pair=limit.pair or "mismatch", why="the responses have no trainer log-probabilities"
        )


def record_of(step: int, result: MismatchResult) -> dict[str, Any]:
    """A step's line from its result, as `train` writes it; at equal weights there is one gap."""
    values = {name: _values(pair.metrics) for name, pair in result.pairs.items()}
    main = result.main
    record: dict[str, Any] = {
        "step": step,
        "responses": main.counts.responses + result.about.unscored_responses,
        "tokens": main.counts.tokens,
    }
    # Numbers of responses are the same in every pair: they do not depend on what was compared.
    for name, key in _RESPONSES.items():
        record[name] = values[main.pair][key]
    for pair, name in PAIRS_OF_STEP.items():
        record[name] = gap_record(values[pair]) if pair in values else {}
    return record


def _values(metrics: Mapping[str, Estimate]) -> dict[str, float | None]:
    return {key: estimate.value for key, estimate in metrics.items()}


def _unscored(step: int, traces: Sequence[Trace]) -> dict[str, Any]:
    """A step's line from traces without a trainer's log π: it has no gaps."""
    responses = tokens = 0
    rewards: list[np.ndarray] = []
    for trace in traces:
        for batch in trace.batches(("reward",)):
            responses += batch.num_responses
            tokens += int(batch.offset_S1[-1])
            if batch.reward_S is not None:
                rewards.append(batch.reward_S)
    reward_S = np.concatenate(rewards) if rewards else np.zeros(0)
    reward_S = reward_S[np.isfinite(reward_S)]
    return {
        "step": step,
        "responses": responses,
        "tokens": tokens,
        "reward": float(reward_S.mean()) if len(reward_S) else None,
        "length": tokens / responses if responses else None,
        "mismatch": {},
        "current": {},
    }
