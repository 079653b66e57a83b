"""Some responses, judged by every algorithm: computed once for a slice of a batch, read by every
accumulator.

Suffixes: `_N` are the counted tokens of the slice, laid flat; `_S` its responses; `_U` some of the
tokens, by index in N. A token is *judged* if its advantage is not 0. If a trace has no advantages,
every token is judged twice, as if its advantage were +1 and −1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_

import numpy as np

from mismatch_cli.base.arrays import Segments
from mismatch_cli.metrics.gaps import TokenGaps, token_gaps
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.first_pass import FirstPass
from mismatch_cli.rules.algorithms.masks_and_factors import Mask, Rule
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.rules.joint_batches import Batches, BatchValues, RowKey
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies, TopKLogProbs
from mismatch_cli.rules.trust_regions import Decision, Threshold

SIGNS = ("positive", "negative")  # of the advantage: the rows of everything split by it


@dataclass(frozen=True)
class Needs:
    """The columns that judging all algorithms needs; a token that lacks one does not count for
    any of them.
    """

    advantages: bool
    recomputed: bool
    top_k: int
    topk_recomputed: bool = False
    full: bool = False  # not needed to judge, but read if recorded
    entropy: bool = False
    average: bool = False

    @classmethod
    def of(cls, algorithms: Sequence[Algorithm]) -> Needs:
        """What these algorithms need of tokens with an advantage."""
        return cls(
            advantages=True,
            recomputed=any(a.needs_recomputed for a in algorithms),
            top_k=max((a.needs_top_k for a in algorithms), default=0),
            topk_recomputed=any(a.needs_top_k and a.needs_recomputed for a in algorithms),
            entropy=any(a.needs_entropy for a in algorithms),
            average=any(a.needs_average for a in algorithms),
        )

    @property
    def columns(self) -> tuple[str, ...]:
        names = (
            (self.advantages, "advantage_T"),
            (self.recomputed, "logp_recomputed_T"),
            (self.top_k > 0, "topk_logp_rollout_TK"),
            (self.top_k > 0, "topk_logp_trainer_TK"),
            (self.topk_recomputed, "topk_logp_recomputed_TK"),
            (self.entropy, "entropy_trainer_T"),
            (self.average, "logp_average_T"),
        )
        return tuple(name for needed, name in names if needed)

    @property
    def trace_columns(self) -> list[str]:
        """The columns of a trace that hold these."""
        columns = [_without_shape(name) for name in self.columns]
        if self.top_k > 0:
            columns.append("topk_ids")
        return columns

    def first_missing_in(self, batch: TokenBatch) -> str:
        """The first column that a batch lacks, by its name in the trace; empty if it has all."""
        for name in ("logp_trainer_T", *self.columns):
            if getattr(batch, name) is None:
                return _without_shape(name)
        return ""


def _without_shape(name: str) -> str:
    """`advantage` for `advantage_T`: a trace has the columns of a batch without their shapes."""
    return name.rpartition("_")[0]


def apply_masks(
    batch: TokenBatch,
    needs: Needs,
    algorithms: Sequence[Algorithm],
    batch_values: Mapping[Rule, BatchValues],
    trace: int = 0,
) -> Iterator[list[MaskedSlice]]:
    """Slices of complete responses: one `MaskedSlice` each, or one per sign without advantages.

    `batch_values` is the result of the first pass over whole batches, without which a rule on
    batches raises a `FirstPassError` (`studies.clipping.collect_first_pass`); a batch belongs to
    one trace.
    """
    for gaps in token_gaps(batch, PAIRS["total"], required=needs.columns):
        batches = batches_of(gaps, trace).with_values(batch_values)
        policies = replace(policies_of(gaps, needs), batches=batches)
        if needs.advantages:
            advantages = [_column(gaps, "advantage_T")]
        else:
            # A mask may decide by the sign of A, so both are tried on every token
            advantages = [np.full(len(gaps.logq_N), sign, dtype=np.float32) for sign in (1, -1)]
        yield [MaskedSlice(gaps, policies, advantage_N, algorithms) for advantage_N in advantages]


def add_to_first_pass(first_pass: FirstPass, batch: TokenBatch, needs: Needs, trace: int) -> None:
    """Add a batch with advantages and all needed columns to the first pass of rules on batches."""
    for gaps in token_gaps(batch, PAIRS["total"], required=needs.columns):
        policies = replace(policies_of(gaps, needs), batches=batches_of(gaps, trace))
        first_pass.update(policies, _column(gaps, "advantage_T"))


def batches_of(gaps: TokenGaps, trace: int) -> Batches:
    """The optimiser step and trace of each response."""
    responses = slice(gaps.first, gaps.last)
    key = RowKey(*(getattr(gaps.batch, name)[responses] for name in RowKey._fields))
    return Batches.of_rows(key, gaps.places, trace)


def policies_of(gaps: TokenGaps, needs: Needs) -> Policies:
    """The policies of a slice, with the columns that are needed and no others."""
    topk = None
    if needs.top_k:
        names = ["response_ids_T", "topk_ids_TK", "topk_logp_rollout_TK", "topk_logp_trainer_TK"]
        if needs.topk_recomputed:
            names.append("topk_logp_recomputed_TK")
        topk = TopKLogProbs(*(_column(gaps, name) for name in names))
    recomputed = _column(gaps, "logp_recomputed_T") if needs.recomputed else None
    entropy = _column(gaps, "entropy_trainer_T") if needs.entropy else None
    average = _column(gaps, "logp_average_T") if needs.average else None
    return Policies(
        gaps.logq_N, gaps.logp_N, recomputed, gaps.offset_S1, topk, entropy, average=average
    )


def _column(gaps: TokenGaps, name: str) -> np.ndarray:
    column_N = gaps.column(name)
    assert column_N is not None  # checked by `Needs.first_missing_in`
    return column_N


class MaskedSlice:
    """Responses of a batch with each token's advantage, and what every algorithm decides about
    it.
    """

    def __init__(
        self,
        gaps: TokenGaps,
        policies: Policies,
        advantage_N: np.ndarray,
        algorithms: Sequence[Algorithm],
    ) -> None:
        self.gaps = gaps
        self.policies = policies
        self.advantage_N = advantage_N
        self.algorithms = algorithms
        self.positive_N, self.negative_N = advantage_N > 0, advantage_N < 0
        self.abs_advantage_N = np.abs(advantage_N)
        self._decisions: dict[Mask, Decision] = {}
        # Many algorithms differ in their weight alone. They block the same tokens, found once.
        distinct = dict.fromkeys(algorithm.masks for algorithm in algorithms)
        blocked = {masks: self._blocked_by(masks) for masks in distinct}
        self.blocked = [blocked[algorithm.masks] for algorithm in algorithms]  # _U of each one

    def _blocked_by(self, masks: Sequence[Mask]) -> np.ndarray:
        if not masks:
            return np.zeros(0, dtype=np.int64)
        keep_N = reduce(and_, [self._decide(mask).keep_T for mask in masks])
        return np.flatnonzero(~keep_N)

    def _decide(self, mask: Mask) -> Decision:
        if mask not in self._decisions:
            self._decisions[mask] = mask.decide(self.policies, self.advantage_N)
        return self._decisions[mask]

    def statistic(self, region: str, top_k: int) -> np.ndarray:
        """What a mask on trainer/rollout compares with its threshold; for a top-K mask, over
        `top_k` ranks.
        """
        partition: dict[str, Threshold] = {}
        if region.startswith("top-k"):
            partition = {"k": top_k, "replace_last": False}
        # The statistic is the same for all thresholds, so a decision with any of them has it
        for mask, decision in self._decisions.items():
            same_pair = mask.region == region and mask.ratio == TRAINER_ROLLOUT
            if same_pair and partition.items() <= mask.parameters.items():
                return decision.statistic_T
        return self._decide(Mask(region, chosen=tuple(partition.items()))).statistic_T

    @property
    def num_responses(self) -> int:
        return self.gaps.last - self.gaps.first

    @cached_property
    def judged_N(self) -> np.ndarray:
        return self.positive_N | self.negative_N

    @cached_property
    def blocked_by_N(self) -> np.ndarray:
        """Which algorithms block each token: one bit per algorithm, uint64."""
        bits_N = np.zeros(len(self.advantage_N), dtype=np.uint64)
        for bit, index_U in enumerate(self.blocked):
            bits_N[index_U] |= np.uint64(1 << bit)
        return bits_N

    @cached_property
    def ratio_N(self) -> np.ndarray:
        """r, float32."""
        return self.policies.compare(TRAINER_ROLLOUT).ratio_T

    @cached_property
    def difference_N(self) -> np.ndarray:
        """π − μ, float32."""
        return self.policies.compare(TRAINER_ROLLOUT).difference_T

    @cached_property
    def update_N(self) -> np.ndarray:
        """r·|A|, the weight of each token's update without mask and cap; 0 if A is, infinite if
        r is.
        """
        if self.judged_N.all():
            return np.multiply(self.ratio_N, self.abs_advantage_N, dtype=np.float64)
        update_N = np.zeros(len(self.ratio_N))
        return np.multiply(
            self.ratio_N, self.abs_advantage_N, out=update_N, where=self.judged_N, dtype=np.float64
        )

    @cached_property
    def entropy_N(self) -> np.ndarray | None:
        return self.gaps.column("entropy_trainer_T")

    @cached_property
    def group_N(self) -> np.ndarray:
        """The prompt group of each token."""
        return self.gaps.per_token(self.gaps.group_S)

    @cached_property
    def reward_S(self) -> np.ndarray:
        """Rewards; NaN for a response that was not graded."""
        reward_S = self.gaps.batch.reward_S
        if reward_S is None:
            return np.full(self.num_responses, np.nan)
        return reward_S[self.gaps.first : self.gaps.last]

    def sign(self, index_U: np.ndarray) -> np.ndarray:
        """The row of `SIGNS` for some judged tokens."""
        return self.negative_N[index_U].astype(np.int64)

    def responses_at(self, index_U: np.ndarray) -> Segments:
        """Some tokens, in order, cut by response."""
        return Segments(np.searchsorted(index_U, self.gaps.offset_S1))

    def add_by_group(self, totals_G: np.ndarray, values_N: np.ndarray) -> None:
        """Add a value of every token to the total of its prompt group, in place."""
        np.add.at(totals_G, self.gaps.group_S, self.gaps.responses.sum(values_N))
