"""Everything that is counted about the algorithms on one set of tokens: accumulators updated together, and the JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.approximation import ApproximationQuality
from mismatch_cli.metrics.clipping.bad_updates import BadUpdates
from mismatch_cli.metrics.clipping.breakdown import BlockedCells, JudgedSample, StepSums
from mismatch_cli.metrics.clipping.masked import SIGNS, Masked, Needs, apply_masks
from mismatch_cli.metrics.clipping.overlap import Overlap
from mismatch_cli.metrics.clipping.sums import (
    NO_ADVANTAGES,
    SCALES,
    bin_row,
    evaluate,
    response_sums,
    step_row,
    sums_dtype,
)
from mismatch_cli.metrics.clipping.sweeps import FAMILIES, Sweeps
from mismatch_cli.metrics.clipping.theory import Theory
from mismatch_cli.metrics.clipping.token_table import TokenTable
from mismatch_cli.metrics.estimate import OVERFLOW, Estimate
from mismatch_cli.metrics.hashing import prompt_groups
from mismatch_cli.metrics.population import DistinctPrompts
from mismatch_cli.metrics.profiles import POSITION_BINS, bin_bounds
from mismatch_cli.metrics.sums import GroupSums
from mismatch_cli.metrics.volatility import MU_EDGES
from mismatch_cli.policies import TRAINER_ROLLOUT

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

    SETTINGS = ("question", "columns")

    def __init__(self, question: Question) -> None:
        number, needs = len(question.algorithms), question.needs
        self.columns = sums_dtype(number)
        self.question = question
        self.counts = Counter(dict.fromkeys(_COUNTS, 0))
        self.seen = 0  # responses, also those left out
        self.lacking: Counter[str] = Counter()  # responses left out for want of a column
        self.prompts = DistinctPrompts()
        self.sums = GroupSums(self.columns.itemsize // 8)
        self.steps = StepSums(_MOST_STRETCHES)
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
            self.lacking[missing] += batch.num_responses
        if missing or not batch.num_responses:
            return
        slices = apply_masks(batch, self.question.needs, self.question.algorithms)
        sums_SM = np.concatenate([self._update_slice(cases) for cases in slices])
        group_S = prompt_groups(batch.prompt_id_S.numpy())
        self.sums.update(group_S, sums_SM)
        self.steps.update(batch.step_S.numpy(), group_S, sums_SM)
        judged_S = sums_SM.view(self.columns)["judged"].any(axis=(1, 2))
        self.prompts.update(batch.prompt_id_S.numpy()[judged_S])

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
        gaps, judged = cases[0].gaps, int(np.count_nonzero(cases[0].judged_N))
        self.counts.update({
            "tokens": judged,
            "positive": sum(int(np.count_nonzero(case.positive_N)) for case in cases),
            "negative": sum(int(np.count_nonzero(case.negative_N)) for case in cases),
            "zero_advantage": len(gaps.logq_N) - judged,
            "masked": gaps.num_masked,
            "not_measured": gaps.num_not_measured,
            "out_of_support": 0 if gaps.out_of_support_N is None else int(np.count_nonzero(gaps.out_of_support_N)),
            "responses": int(np.count_nonzero(gaps.responses.sum(cases[0].judged_N))),
        })  # fmt: skip

    def result(self, blocked_tokens: int) -> dict[str, Any]:
        """The JSON of docs/clipstats.md, every number with its interval, and the most frequently blocked tokens."""
        prompts, advantages = self.prompts.result(), self.question.needs.advantages
        rows = [self._algorithm(place, blocked_tokens) for place in range(len(self.question.algorithms))]
        return {
            "counts": {
                **self.counts,
                "prompts": prompts,
                "prompts_exact": prompts < self.prompts.size,
                "steps": len(self.bad_updates.steps.sums),
                "lacking": dict(self.lacking),
            },
            "algorithms": rows,
            "overlap": self.overlap.result([row["name"] for row in rows], prompts),
            "bad_updates": self.bad_updates.result(prompts, advantages=advantages),
            "sweeps": self.sweeps.result(prompts),
            "equivalents": [found for pair in enumerate(rows) for found in self._equivalents(*pair) if advantages],
            "approximation": self.approximation.result(prompts),
            "theory": self.theory.result(prompts) if self.theory else None,
        }  # fmt: skip

    def _algorithm(self, place: int, blocked_tokens: int) -> dict[str, Any]:
        algorithm, cells = self.question.algorithms[place], self.cells
        prompts, advantages = self.prompts.result(), self.question.needs.advantages
        blocked_when, weight = algorithm.formulas
        found = {name: estimate.to_dict() for name, estimate in self._estimates(place).items()}
        bins_of = [0, 1 + place]
        return {
            "name": algorithm.name,
            "anchor": algorithm.anchor,
            "blocked_when": blocked_when,
            "weight": weight,
            "source": algorithm.source,
            "weighs_by_ratio": algorithm.weighs_by_ratio,
            "blocked": {name: found[f"blocked_{name}"] for name in ("all", *SIGNS)},
            "lost": {name: found[f"lost_{name}"] for name in ("all", *SIGNS, "masked", "capped")},
            "responses_touched": found["touched"],
            **{name: found[name] for name in ("mu_blocked", "mu_kept", "entropy_blocked", "entropy_kept")},
            "by_mu": [
                {"mu_low": low, "mu_high": high} | bin_row(cells.by_mu[bins_of, :, :, b], prompts, advantages)
                for b, (low, high) in enumerate(pairwise((0.0, *MU_EDGES, 1.0)))
            ],
            "by_position": [
                dict(zip(("first", "last"), bin_bounds(b), strict=True))
                | bin_row(cells.by_position[bins_of, :, :, b], prompts, advantages)
                for b in range(POSITION_BINS)
                if cells.by_position[0, :, :, b].any()
            ],
            "by_step": [
                {"first": first, "last": last} | step_row(sums_GM.view(self.columns)[:, 0], place, prompts, advantages)
                for first, last, sums_GM in self.steps
            ],
            "blocked_tokens": {
                name: self.tokens.result(place, sign, blocked_tokens) for sign, name in enumerate(SIGNS)
            },
        }

    def _estimates(self, place: int) -> dict[str, Estimate]:
        algorithm = self.question.algorithms[place]

        def values(totals_xM: np.ndarray) -> dict[str, np.ndarray]:
            return evaluate(totals_xM.view(self.columns)[..., 0], place, algorithm)

        found = self.sums.result(values, self.prompts.result(), SCALES)
        if not self.question.needs.advantages:
            names = ("blocked_all", "lost_all", "lost_masked", "lost_capped", "touched")
            return found | dict.fromkeys(names, NO_ADVANTAGES)
        if not algorithm.weighs_by_ratio:
            return found | {"lost_capped": Estimate(None, note="the weight is not r")}
        if not np.isfinite(self.sums.sums_GM).all():
            infinite = Estimate(None, note=f"a ratio is {OVERFLOW}")
            found |= {name: infinite for name, e in found.items() if name.startswith("lost") and e.value is None}
        return found

    def _equivalents(self, place: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Of a published one-sided mask on trainer/rollout: the threshold of each other family that blocks as much."""
        masks, blocked = self.question.algorithms[place].masks, int(self.cells.by_mu[1 + place].sum())
        families = {name: FAMILIES[name] for name in self.sweeps.counts if name in FAMILIES}
        regions = [mask.region for mask in masks if mask.ratio == TRAINER_ROLLOUT]
        if len(masks) != 1 or not set(regions) & set(FAMILIES.values()) or not blocked:
            return []  # where nothing is blocked, every high enough threshold blocks as little
        return [
            {"algorithm": row["name"], "blocked": row["blocked"]["all"], "family": family}
            | {"threshold": self.sweeps.threshold_for(family, blocked).to_dict()}
            for family, region in families.items()
            if region not in regions
        ]
