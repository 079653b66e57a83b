"""Everything that is counted about the algorithms on one set of tokens: the accumulators, updated together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.approximation import ApproximationQuality
from mismatch_cli.metrics.clipping.bad_updates import BadUpdates
from mismatch_cli.metrics.clipping.breakdown import BlockedCells, JudgedSample, StepSums
from mismatch_cli.metrics.clipping.masked import Masked, Needs, apply_masks
from mismatch_cli.metrics.clipping.overlap import Overlap
from mismatch_cli.metrics.clipping.sums import SHARED, response_sums, width
from mismatch_cli.metrics.clipping.sweeps import Sweeps
from mismatch_cli.metrics.clipping.theory import Theory
from mismatch_cli.metrics.clipping.token_table import TokenTable
from mismatch_cli.metrics.hashing import prompt_groups
from mismatch_cli.metrics.population import DistinctPrompts
from mismatch_cli.metrics.sums import GroupSums

_COUNTS = (
    "tokens", "positive", "negative", "zero_advantage", "masked", "not_measured", "out_of_support", "responses",
)  # fmt: skip
_MOST_STRETCHES = 64  # of steps, for the columns of every algorithm


@dataclass(frozen=True)
class Question:
    """What is asked of a trace: which algorithms, on which columns, and whether the theory's bounds too."""

    algorithms: tuple[Algorithm, ...]
    needs: Needs
    theory: bool = False


class ClippingSummary(Accumulator):
    """What every algorithm blocks, in memory that grows with algorithms and distinct tokens, not with tokens.

    Counts are exact in any order. Float sums are formed slice by slice; summaries of shards merged in shard order give
    the bits of every other run that does so, whatever the number of workers.
    """

    SETTINGS = ("question",)

    def __init__(self, question: Question) -> None:
        number, needs = len(question.algorithms), question.needs
        self.question = question
        self.counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self.seen = 0  # responses, also those left out
        self.lacking: dict[str, int] = {}  # responses left out for want of a column
        self.prompts = DistinctPrompts()
        self.sums = GroupSums(width(question.algorithms))
        self.steps = StepSums(width(question.algorithms), _MOST_STRETCHES)
        self.cells = BlockedCells(number)
        self.tokens = TokenTable(number)
        self.overlap = Overlap(number)
        self.bad_updates = BadUpdates()
        self.sweeps = Sweeps(needs.top_k)
        self.approximation = ApproximationQuality(needs.top_k, needs.full)
        self.sample = JudgedSample()
        self.theory = Theory() if question.theory else None

    def update(self, batch: TokenBatch) -> None:
        """Add the responses of a batch; where it lacks a column that the question needs they are left out."""
        self.seen += batch.num_responses
        if missing := self.question.needs.missing_in(batch):
            self.lacking[missing] = self.lacking.get(missing, 0) + batch.num_responses
        if missing or not batch.num_responses:
            return
        slices = apply_masks(batch, self.question.needs, self.question.algorithms)
        sums_SM = np.concatenate([self._update_slice(cases) for cases in slices])
        group_S = prompt_groups(batch.prompt_id_S.numpy())
        self.sums.update(group_S, sums_SM)
        self.steps.update(batch.step_S.numpy(), group_S, sums_SM)
        touched_S = sums_SM[:, : SHARED.index("negative") + 1].any(axis=1)
        self.prompts.update(batch.prompt_id_S.numpy()[touched_S])

    def _update_slice(self, cases: list[Masked]) -> np.ndarray:
        self._count(cases)
        for judged in cases:
            for part in (self.cells, self.tokens, self.overlap, self.bad_updates, self.sweeps, self.sample):
                part.update(judged)
        self.approximation.update(cases)
        if self.theory is not None:
            self.theory.update(cases[0])
        return np.sum([response_sums(judged) for judged in cases], axis=0)

    def _count(self, cases: list[Masked]) -> None:
        gaps, counts = cases[0].gaps, self.counts
        judged = int(np.count_nonzero(cases[0].judged_N))
        counts["tokens"] += judged
        counts["positive"] += sum(int(np.count_nonzero(case.positive_N)) for case in cases)
        counts["negative"] += sum(int(np.count_nonzero(case.negative_N)) for case in cases)
        counts["zero_advantage"] += len(gaps.logq_N) - judged
        counts["masked"] += gaps.num_masked
        counts["not_measured"] += gaps.num_not_measured
        counts["responses"] += int(np.count_nonzero(gaps.responses.sum(cases[0].judged_N)))
        if gaps.out_of_support_N is not None:
            counts["out_of_support"] += int(np.count_nonzero(gaps.out_of_support_N))
