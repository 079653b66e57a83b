"""The pairs of policies to compare: the reference takes the role of μ, the current one that of
π.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mismatch_cli.rules.batch import TokenBatch
    from mismatch_cli.trace.reader import Trace


@dataclass(frozen=True)
class Pair:
    """Two log-probability columns of a `TokenBatch`, and their top-K columns if there are any."""

    name: str
    label: str
    reference: str
    current: str
    topk_reference: str | None = None
    topk_current: str | None = None

    def measured_in(self, batch: TokenBatch) -> bool:
        return (
            getattr(batch, self.reference) is not None and getattr(batch, self.current) is not None
        )

    def topk_measured_in(self, batch: TokenBatch) -> bool:
        if batch.topk_ids_TK is None or not self.topk_reference or not self.topk_current:
            return False
        return (
            getattr(batch, self.topk_reference) is not None
            and getattr(batch, self.topk_current) is not None
        )


_ROLLOUT, _TRAINER, _RECOMPUTED = "logp_rollout_T", "logp_trainer_T", "logp_recomputed_T"
_TOPK_ROLLOUT, _TOPK_TRAINER = "topk_logp_rollout_TK", "topk_logp_trainer_TK"
_TOPK_RECOMPUTED = "topk_logp_recomputed_TK"

PAIRS = {
    pair.name: pair
    for pair in (
        Pair(
            "mismatch",
            "recomputed / rollout, equal weights",
            _ROLLOUT,
            _RECOMPUTED,
            _TOPK_ROLLOUT,
            _TOPK_RECOMPUTED,
        ),
        Pair("total", "trainer / rollout", _ROLLOUT, _TRAINER, _TOPK_ROLLOUT, _TOPK_TRAINER),
        # The rollout sampled the tokens, not the reference: the KL estimators show what a step
        # changed on them. The top-K ids are the rollout's.
        Pair(
            "staleness",
            "trainer / recomputed, optimiser steps",
            _RECOMPUTED,
            _TRAINER,
            _TOPK_RECOMPUTED,
            _TOPK_TRAINER,
        ),
        Pair(
            "floor", "trainer repeated / trainer, equal weights", _TRAINER, "logp_trainer_repeat_T"
        ),
    )
}


VERSIONS = ("version_rollout", "version_trainer")  # if equal, log π also serves as recomputed
# The columns of a trace from which pairs are made, besides those that every trace has.
PAIR_COLUMNS = (*VERSIONS, "loss_mask", "logp_trainer", "logp_recomputed", "logp_trainer_repeat")


def pairs_in(traces: Sequence[Trace]) -> list[str]:
    """The pairs that traces have together, the most informative first: mismatch if any response has
    it.

    At equal weights there is one gap; otherwise mismatch (of the responses with equal weights or a
    recomputed log-prob), staleness, and both together.
    """
    recomputed = any("logp_recomputed" in trace.columns() for trace in traces)
    equal = [_equal_weights(trace) for trace in traces]
    if all(everywhere for everywhere, _ in equal):
        return ["mismatch"]
    pairs = []
    if recomputed or any(anywhere for _, anywhere in equal):
        pairs.append("mismatch")
    if recomputed:
        pairs.append("staleness")
    return [*pairs, "total"]


def weights_are_equal(traces: Sequence[Trace]) -> bool:
    """Whether the trainer scored every response at the weights that sampled it."""
    return all(everywhere for everywhere, _ in map(_equal_weights, traces))


def _equal_weights(trace: Trace) -> tuple[bool, bool]:
    """Whether every scored response was scored at the weights that sampled it, and whether any
    was.
    """
    import pyarrow.compute as pc

    everywhere, anywhere = True, False
    undecided = []
    # The footers of shards have the range of each column, which mostly tells without reading rows.
    for path in trace.shards:
        footer = trace.footers[path]
        if not footer.columns.issuperset(VERSIONS):  # an unscored shard has no trainer version
            continue
        equal = [_equal_by(ranges) for ranges in footer.ranges]
        if None in equal:
            undecided.append(path)
        else:
            everywhere = everywhere and all(equal)
            anywhere = anywhere or any(equal)
    for table in trace.tables(VERSIONS, undecided):
        equal_S = pc.equal(*(table.column(name) for name in VERSIONS))
        everywhere = everywhere and pc.all(equal_S).as_py()
        anywhere = anywhere or pc.any(equal_S).as_py()
    return everywhere, anywhere


def _equal_by(ranges: Mapping[str, tuple[int, int]]) -> bool | None:
    """Whether both versions are equal in all rows of these ranges, or in none; None if only the
    rows can tell.
    """
    rollout, trainer = map(ranges.get, VERSIONS)
    if rollout is None or trainer is None:
        return None
    if rollout[1] < trainer[0] or trainer[1] < rollout[0]:
        return False
    if rollout[0] == rollout[1] == trainer[0] == trainer[1]:
        return True
    return None
