"""One step of a run that is watched: its numbers in the words of metrics.jsonl, and the limits checked on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.update_table import OF_STEP, of_step, updates_of_step
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.gate import Check, Findable, Found, Measurement, check_limits, frameworks_of
from mismatch_cli.studies.limits import Limit, LimitSet
from mismatch_cli.trace.reader import Trace

_PAIRS = {"mismatch": "mismatch", "total": "current"}  # as limits call them, and as a line of metrics.jsonl does
_RESPONSES = {
    "reward": "reward_mean", "length": "length_mean", "truncated": "truncated_share", "entropy": "entropy_mean",
}  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """What is asked of each step: limits, those relative to a baseline beside it, and what an algorithm would block."""

    sets: Sequence[LimitSet] = ()
    baseline: Measurement | None = None
    algorithm: Algorithm | None = None

    @classmethod
    def of(cls, sets: Sequence[LimitSet], baseline: Sequence[Trace], algorithm: Algorithm | None) -> Judge:
        """With the baseline measured."""
        return cls(sets, Measurement(baseline, frameworks_of(sets)) if baseline else None, algorithm)

    def of_traces(self, step: int, traces: Sequence[Trace]) -> tuple[dict[str, Any], list[Check]]:
        """The line and the checks of a step from the traces that hold it."""
        try:
            measured = Measurement(traces, frameworks_of(self.sets))
        except MismatchError:  # nobody has scored it; what is damaged is refused below too
            return _unscored(step, traces), self._checks(_Unscored())
        record = record_of(step, measured.summary) | self._blocked(traces)
        return record, self._checks(measured)

    def of_record(self, record: Mapping[str, Any], trace: Trace | None) -> list[Check]:
        """The checks of a step of `train`: from its trace where one was kept, else from its line."""
        if not self.sets:
            return []
        measured = RecordedStep(record) if trace is None else Measurement([trace], frameworks_of(self.sets))
        return self._checks(measured)

    def _checks(self, measured: Findable) -> list[Check]:
        return check_limits(self.sets, measured, self.baseline)

    def _blocked(self, traces: Sequence[Trace]) -> dict[str, float | None]:
        """Nothing where the algorithm needs what these traces lack."""
        if self.algorithm is None:
            return {}
        try:
            return updates_of_step(analyse_clipping(traces, [self.algorithm]).result)
        except MismatchError:
            return {}


class RecordedStep:
    """A line of metrics.jsonl, as limits ask it."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def find(self, limit: Limit) -> Found:
        """The value of a metric that the line holds; it has no interval and no noise."""
        there = [pair for pair, name in _PAIRS.items() if self._record.get(name)]
        pair = limit.pair or next(iter(there), "")
        name = next((ours for ours, key in OF_STEP.items() if key == limit.metric), "")
        value = self._record.get(_PAIRS.get(pair, ""), {}).get(name)
        if value is None:
            return Found(pair=pair, why="metrics.jsonl does not hold it; train --trace-every N keeps steps that do")
        return Found(value, pair=pair)


class _Unscored:
    """Responses without log π of a trainer."""

    def find(self, limit: Limit) -> Found:
        return Found(pair=limit.pair or "mismatch", why="the responses have no log-probabilities of a trainer")


def record_of(step: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a step from its summary, as `train` writes one; at equal weights there is one gap."""
    values = {name: _values(pair["metrics"]) for name, pair in summary["pairs"].items()}
    first = next(iter(summary["pairs"].values()))
    about = _values(first["metrics"])
    return {
        "step": step,
        "responses": first["counts"]["responses"] + summary["about"]["unscored_responses"],
        "tokens": first["counts"]["tokens"],
        **{name: about[key] for name, key in _RESPONSES.items()},
        **{name: of_step(values[pair]) if pair in values else {} for pair, name in _PAIRS.items()},
    }


def _values(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    return {key: found["value"] for key, found in metrics.items()}


def _unscored(step: int, traces: Sequence[Trace]) -> dict[str, Any]:
    batches = [batch for trace in traces for batch in trace.batches(("reward",))]
    rewards = [batch.reward_S for batch in batches if batch.reward_S is not None]
    reward_S = np.concatenate(rewards) if rewards else np.zeros(0)
    reward_S = reward_S[np.isfinite(reward_S)]
    responses, tokens = sum(b.num_responses for b in batches), sum(int(b.offset_S1[-1]) for b in batches)
    return {
        "step": step,
        "responses": responses,
        "tokens": tokens,
        "reward": float(reward_S.mean()) if len(reward_S) else None,
        "length": tokens / responses if responses else None,
        "mismatch": {},
        "current": {},
    }
