"""Everything counted about algorithms on one set of tokens: accumulators updated together, and
their result.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from mismatch_cli.base.arrays import Segments
from mismatch_cli.base.hashing import prompt_groups
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.approximation import ApproximationQuality
from mismatch_cli.metrics.clipping.bad_updates import BadUpdates
from mismatch_cli.metrics.clipping.blocked_rows import (
    AlgorithmRow,
    BlockedAtPositions,
    BlockedInBin,
    BlockedInSteps,
    BySign,
    ClippingNumbers,
    EqualThreshold,
    JudgedCounts,
    LostUpdate,
    SameStrictness,
)
from mismatch_cli.metrics.clipping.breakdown import BlockedCells, JudgedSample
from mismatch_cli.metrics.clipping.masked_slice import SIGNS, MaskedSlice, Needs, apply_masks
from mismatch_cli.metrics.clipping.overlap import Overlap
from mismatch_cli.metrics.clipping.sweeps import FAMILIES, Sweeps
from mismatch_cli.metrics.clipping.theory import Theory
from mismatch_cli.metrics.clipping.token_table import TokensBySign, TokenTable
from mismatch_cli.metrics.estimate import (
    OVERFLOW,
    POSITIVE,
    SHARE,
    Estimate,
    Scale,
    grouped_ratio,
    grouped_share,
)
from mismatch_cli.metrics.pairs import VERSIONS
from mismatch_cli.metrics.population import DistinctPrompts
from mismatch_cli.metrics.profiles import POSITION_BINS, bin_bounds
from mismatch_cli.metrics.step_sums import StepSums
from mismatch_cli.metrics.sums import GroupSums
from mismatch_cli.metrics.volatility import MU_EDGES
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Rule
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.rules.joint_batches import BatchValues
from mismatch_cli.rules.policies import TRAINER_ROLLOUT

_COUNTS = (
    "tokens", "positive", "negative", "zero_advantage", "masked", "not_measured", "out_of_support",
    "responses",
)  # fmt: skip
_MOST_STRETCHES = 64  # of steps, for the columns of every algorithm
_SUBSETS = ("all", *SIGNS)  # of the judged tokens
_MEANS = ("blocked_rare", "mu_blocked", "mu_kept", "entropy_blocked", "entropy_kept")
RARE = 0.1  # μ below which a token is rare: the α of arXiv 2602.04879, figures 6 and 7
_NO_ADVANTAGES = Estimate(None, note="no advantages in the trace")
_SHARES = (
    *(f"blocked_{subset}" for subset in _SUBSETS),
    *(f"lost_{subset}" for subset in (*_SUBSETS, "masked", "capped")),
    "touched",
    "blocked_rare",
    "mu_blocked",
    "mu_kept",
)
_SCALES: dict[str, Scale] = {
    **dict.fromkeys(_SHARES, SHARE),
    "entropy_blocked": POSITIVE,
    "entropy_kept": POSITIVE,
}


@dataclass(frozen=True)
class Question:
    """What to compute: which algorithms, on which columns, and whether to include the theory's
    bounds.
    """

    algorithms: tuple[Algorithm, ...]
    needs: Needs
    theory: bool = False
    # By the first pass of rules on whole batches
    batch_values: Mapping[Rule, BatchValues] = field(default_factory=dict)


class ClippingSummary(Accumulator):
    """What every algorithm blocks, in memory that grows with algorithms and distinct tokens, not
    with tokens.

    Counts are exact in any order. Float sums are formed slice by slice; summaries of shards, merged
    in shard order, give the same bits for any number of workers.
    """

    # Besides those that the algorithms need
    READS = (*VERSIONS, "reward", "loss_mask", "logp_trainer", "entropy_trainer")
    SETTINGS = ("question", "columns")

    def __init__(self, question: Question) -> None:
        number = len(question.algorithms)
        needs = question.needs
        self.columns = sums_dtype(number)
        self.question = question
        self.counts = Counter(dict.fromkeys(_COUNTS, 0))
        self.responses_read = 0  # including those left out
        self.lacking: Counter[str] = Counter()  # responses left out for lack of a column
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

    def update(self, batch: TokenBatch, trace: int = 0) -> None:
        """Add the responses of a batch; leave them out if it lacks a column that the question
        needs.
        """
        self.responses_read += batch.num_responses
        question = self.question
        missing = question.needs.first_missing_in(batch)
        if missing:
            self.lacking[missing] += batch.num_responses
        if missing or not batch.num_responses:
            return
        slices = apply_masks(
            batch, question.needs, question.algorithms, question.batch_values, trace
        )
        sums_SM = np.concatenate([self._update_slice(cases) for cases in slices])
        group_S = prompt_groups(batch.prompt_id_S)
        self.sums.update(group_S, sums_SM)
        self.steps.update(batch.step_S, group_S, sums_SM)
        judged_S = sums_SM.view(self.columns)["judged"].any(axis=(1, 2))
        self.prompts.update(batch.prompt_id_S[judged_S])

    def _update_slice(self, cases: list[MaskedSlice]) -> np.ndarray:
        """Add a slice to the accumulators of tokens; returns its sums over each response."""
        self._count(cases)
        for judged in cases:
            self.cells.update(judged)
            self.tokens.update(judged)
            self.overlap.update(judged)
            self.bad_updates.update(judged)
            self.sweeps.update(judged)
            self.sample.update(judged)
        self.approximation.update(cases)
        if self.theory is not None:
            self.theory.update(cases[0])
        return np.sum([clipping_sums(judged) for judged in cases], axis=0)

    def _count(self, cases: list[MaskedSlice]) -> None:
        # Without advantages a slice comes once per sign, with the same tokens
        gaps, judged_N = cases[0].gaps, cases[0].judged_N
        tokens = int(np.count_nonzero(judged_N))
        self.counts["tokens"] += tokens
        self.counts["zero_advantage"] += len(gaps.logq_N) - tokens
        self.counts["masked"] += gaps.num_masked
        self.counts["not_measured"] += gaps.num_not_measured
        if gaps.out_of_support_N is not None:
            self.counts["out_of_support"] += int(np.count_nonzero(gaps.out_of_support_N))
        self.counts["responses"] += int(np.count_nonzero(gaps.responses.sum(judged_N)))
        for judged in cases:
            self.counts["positive"] += int(np.count_nonzero(judged.positive_N))
            self.counts["negative"] += int(np.count_nonzero(judged.negative_N))

    def result(self, blocked_tokens: int) -> ClippingNumbers:
        """The numbers with their intervals, and the most frequently blocked tokens."""
        prompts = self.prompts.result()
        advantages = self.question.needs.advantages
        indices = range(len(self.question.algorithms))
        rows = [self._algorithm_row(index, blocked_tokens) for index in indices]
        names = [row.name for row in rows]
        equivalents: list[EqualThreshold] = []
        if advantages:
            for index, row in enumerate(rows):
                equivalents += self._equivalents(index, row)
        return ClippingNumbers(
            counts=JudgedCounts(
                **self.counts,
                prompts=prompts,
                prompts_exact=prompts < self.prompts.size,
                steps=len(self.bad_updates.steps.sums),
                lacking=dict(self.lacking),
            ),
            algorithms=rows,
            same_mask=self.overlap.alike(names),
            overlap=self.overlap.result(names, prompts),
            bad_updates=self.bad_updates.result(prompts, advantages=advantages),
            sweeps=self.sweeps.result(prompts),
            equivalents=equivalents,
            approximation=self.approximation.result(prompts),
            theory=self.theory.result(prompts) if self.theory else None,
        )

    def _algorithm_row(self, index: int, blocked_tokens: int) -> AlgorithmRow:
        algorithm = self.question.algorithms[index]
        estimates = self._estimates(index)
        blocked_when, weight = algorithm.formulas
        blocked = [estimates[f"blocked_{subset}"] for subset in _SUBSETS]
        lost = [estimates[f"lost_{subset}"] for subset in (*_SUBSETS, "masked", "capped")]
        return AlgorithmRow(
            name=algorithm.name,
            anchor=algorithm.anchor,
            blocked_when=blocked_when,
            weight=weight,
            source=algorithm.source,
            weighs_by_ratio=algorithm.weighs_by_ratio,
            blocked=BySign(*blocked),
            lost=LostUpdate(*lost),
            responses_touched=estimates["touched"],
            **{name: estimates[name] for name in _MEANS},
            by_mu=self._by_mu(index),
            by_position=self._by_position(index),
            by_step=self._by_step(index),
            blocked_tokens=TokensBySign(
                positive=self.tokens.result(index, SIGNS.index("positive"), blocked_tokens),
                negative=self.tokens.result(index, SIGNS.index("negative"), blocked_tokens),
            ),
        )

    def _by_mu(self, index: int) -> list[BlockedInBin]:
        counts_22GB = self.cells.by_mu[[0, 1 + index]]
        rows = []
        for b, (low, high) in enumerate(pairwise((0.0, *MU_EDGES, 1.0))):
            rows.append(BlockedInBin(low, high, *self._in_bin(counts_22GB[..., b])))
        return rows

    def _by_position(self, index: int) -> list[BlockedAtPositions]:
        counts_22GB = self.cells.by_position[[0, 1 + index]]
        rows = []
        for b in range(POSITION_BINS):
            if counts_22GB[0, :, :, b].any():
                first, last = bin_bounds(b, self.cells.longest)
                rows.append(BlockedAtPositions(first, last, *self._in_bin(counts_22GB[..., b])))
        return rows

    def _by_step(self, index: int) -> list[BlockedInSteps]:
        prompts = self.prompts.result()
        rows = []
        for first, last, sums_GM in self.steps:
            sums_G = sums_GM.view(self.columns)[:, 0]
            own_G = sums_G["algorithms"][:, index]
            tokens, blocked = self._in_bin(np.stack([sums_G["judged"].T, own_G["blocked"].T]))
            means = {
                name: grouped_ratio(total_G, count_G, prompts, _SCALES[name])
                for name, (total_G, count_G) in _means(sums_G, own_G).items()
            }
            rows.append(BlockedInSteps(first, last, tokens, blocked, **means))
        return rows

    def _in_bin(self, counts_22G: np.ndarray) -> tuple[int, BySign]:
        """How many tokens of a bin are judged and which share is blocked, from the counts of
        judged and blocked ones by the sign of A and prompt group.
        """
        prompts = self.prompts.result()
        judged_2G, blocked_2G = counts_22G
        of_positive = grouped_share(blocked_2G[0], judged_2G[0], prompts)
        of_negative = grouped_share(blocked_2G[1], judged_2G[1], prompts)
        # Without advantages every token was judged once per sign, and counts once
        if not self.question.needs.advantages:
            return int(judged_2G[0].sum()), BySign(_NO_ADVANTAGES, of_positive, of_negative)
        of_all = grouped_share(blocked_2G.sum(axis=0), judged_2G.sum(axis=0), prompts)
        return int(judged_2G.sum()), BySign(of_all, of_positive, of_negative)

    def _estimates(self, index: int) -> dict[str, Estimate]:
        algorithm = self.question.algorithms[index]

        def values(totals_xM: np.ndarray) -> dict[str, np.ndarray]:
            return _evaluate(totals_xM.view(self.columns)[..., 0], index, algorithm)

        estimates = self.sums.result(values, self.prompts.result(), _SCALES)
        if not self.question.needs.advantages:
            over_both = ("blocked_all", "lost_all", "lost_masked", "lost_capped", "touched")
            return estimates | dict.fromkeys(over_both, _NO_ADVANTAGES)
        if not algorithm.weighs_by_ratio:
            return estimates | {"lost_capped": Estimate(None, note="the weight is not r")}
        if not np.isfinite(self.sums.sums_GM).all():
            for name, estimate in estimates.items():
                if name.startswith("lost") and estimate.value is None:
                    estimates[name] = Estimate(None, note=f"a ratio is {OVERFLOW}")
        return estimates

    def _equivalents(self, index: int, row: AlgorithmRow) -> list[EqualThreshold]:
        """For a published one-sided mask on trainer/rollout: each other family's threshold that
        blocks as much.
        """
        # If nothing is blocked, every high enough threshold blocks as little
        blocks_nothing = not self.cells.by_mu[1 + index].any()
        if blocks_nothing or not self._own_family(index):
            return []
        return [
            EqualThreshold(row.name, row.blocked.all, family, threshold)
            for family, threshold in self._as_strict(index).items()
        ]

    def same_strictness(self, index: int) -> SameStrictness | None:
        """Each family's threshold that blocks as many tokens as an algorithm; None if there is
        nothing to match.
        """
        algorithm = self.question.algorithms[index]
        blocks_nothing = not self.cells.by_mu[1 + index].any()
        if blocks_nothing or not self.question.needs.advantages:
            return None
        settings = "; ".join(mask.settings for mask in algorithm.masks if mask.settings)
        return SameStrictness(
            algorithm.name, settings, self._own_family(index), self._as_strict(index)
        )

    def _own_family(self, index: int) -> str | None:
        """The family of an algorithm with a single mask on trainer/rollout."""
        masks = self.question.algorithms[index].masks
        if len(masks) != 1 or masks[0].ratio != TRAINER_ROLLOUT:
            return None
        for family in self.sweeps.families:
            if FAMILIES[family] == masks[0].region:
                return family
        return None

    def _as_strict(self, index: int) -> dict[str, Estimate]:
        """The threshold of each family but the algorithm's own that blocks as many tokens."""
        blocked_G = self.cells.by_mu[1 + index].sum(axis=(0, 2))
        prompts = self.prompts.result()
        thresholds = {}
        for family in self.sweeps.families:
            if family != self._own_family(index):
                thresholds[family] = self.sweeps.threshold_for(family, blocked_G, prompts)
        return thresholds


def sums_dtype(algorithms: int) -> np.dtype:
    """M float64 numbers: over all judged tokens, then for each algorithm over the tokens that it
    blocks. `rare` counts those with A > 0 and μ < RARE.
    """
    means: list[Any] = [("mu", float), ("entropy", float), ("entropy_n", float)]
    per_algorithm = [
        ("blocked", float, 2),
        ("rare", float),
        ("lost", float, 2),
        ("capped", float, 2),
        ("touched", float),
        *means,
    ]
    shared = [
        ("judged", float, 2),
        ("rare", float),
        ("update", float, 2),
        ("advantage", float, 2),
        ("responses", float),
        *means,
    ]
    return np.dtype([*shared, ("algorithms", per_algorithm, (algorithms,))])


def clipping_sums(judged: MaskedSlice) -> np.ndarray:
    """The sums over each response, [S, M] in float64, laid out as `sums_dtype`."""
    sums_S = np.zeros(judged.num_responses, sums_dtype(len(judged.algorithms)))
    responses, negative_N = judged.gaps.responses, judged.negative_N
    sums_S["responses"] = responses.sum(judged.judged_N) > 0
    sums_S["mu"] = responses.sum(judged.gaps.q_N * judged.judged_N)
    if judged.entropy_N is not None:
        measured_N = judged.judged_N & ~np.isnan(judged.entropy_N)
        _fill_entropy(sums_S, responses, judged.entropy_N, measured_N)
    judged_S2 = np.stack([responses.sum(judged.positive_N), responses.sum(negative_N)], axis=1)
    sums_S["judged"] = judged_S2
    sums_S["update"] = _by_sign(responses, judged_S2, negative_N, judged.update_N)
    sums_S["advantage"] = _by_sign(responses, judged_S2, negative_N, judged.abs_advantage_N)
    for index, algorithm in enumerate(judged.algorithms):
        _fill_algorithm(sums_S["algorithms"][:, index], judged, algorithm, judged.blocked[index])
    _count_rare(sums_S, judged)
    return sums_S.view(np.float64).reshape(judged.num_responses, -1)


def _fill_entropy(
    sums_S: np.ndarray, responses: Segments, entropy_U: np.ndarray, measured_U: np.ndarray
) -> None:
    sums_S["entropy"] = responses.sum(np.where(measured_U, entropy_U, 0))
    sums_S["entropy_n"] = responses.sum(measured_U)


def _count_rare(sums_S: np.ndarray, judged: MaskedSlice) -> None:
    """Fill the numbers of tokens with A > 0 and μ < RARE: all, and those that each one blocks."""
    rare_N = judged.positive_N & (judged.gaps.q_N < RARE)
    sums_S["rare"] = judged.gaps.responses.sum(rare_N)
    for index, blocked_U in enumerate(judged.blocked):
        blocked = judged.responses_at(blocked_U)
        sums_S["algorithms"]["rare"][:, index] = blocked.sum(rare_N[blocked_U])


def _fill_algorithm(
    own_S: np.ndarray, judged: MaskedSlice, algorithm: Algorithm, blocked_U: np.ndarray
) -> None:
    """Fill the sums of one algorithm over the tokens that it blocks, and what its weight caps."""
    weight_N = judged.update_N if algorithm.weighs_by_ratio else judged.abs_advantage_N
    own_S["blocked"], own_S["lost"] = _sums_at(judged, blocked_U, weight_N[blocked_U])
    own_S["touched"] = own_S["blocked"].any(axis=1)
    blocked = judged.responses_at(blocked_U)
    own_S["mu"] = blocked.sum(judged.gaps.q_N[blocked_U])
    if judged.entropy_N is not None:
        entropy_U = judged.entropy_N[blocked_U]
        _fill_entropy(own_S, blocked, entropy_U, ~np.isnan(entropy_U))
    if algorithm.weighs_by_ratio and algorithm.weight[0].bounded:
        own_S["capped"] = _capped_S2(judged, algorithm.weight[0].bounds, blocked_U)


def _capped_S2(
    judged: MaskedSlice, bounds: tuple[float, float], blocked_U: np.ndarray
) -> np.ndarray:
    """What a weight's bounds take from kept tokens, by the sign of A: Σ (r − weight)·|A|."""
    # A cap beyond float32 becomes ∞, which caps nothing
    with np.errstate(over="ignore"):
        low, high = map(np.float32, bounds)
    bounded_N = judged.judged_N & ((judged.ratio_N > high) | (judged.ratio_N < low))
    bounded_N[blocked_U] = False
    bounded_U = np.flatnonzero(bounded_N)
    ratio_U = judged.ratio_N[bounded_U].astype(np.float64)
    lost_U = (ratio_U - np.clip(ratio_U, low, high)) * judged.abs_advantage_N[bounded_U]
    _, capped_S2 = _sums_at(judged, bounded_U, lost_U)
    return capped_S2


def _sums_at(
    judged: MaskedSlice, index_U: np.ndarray, values_U: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Per response, the number of some judged tokens and the sum of a value over them, by sign
    of A: [S, 2] each.
    """
    responses, negative_U = judged.responses_at(index_U), judged.negative_N[index_U]
    negative_S = responses.sum(negative_U)
    count_S2 = np.stack([responses.length_S - negative_S, negative_S], axis=1)
    return count_S2, _by_sign(responses, count_S2, negative_U, values_U)


def _by_sign(
    responses: Segments, count_S2: np.ndarray, negative_U: np.ndarray, values_U: np.ndarray
) -> np.ndarray:
    """The sum of a value over each response's tokens, by the sign of A: [S, 2]; a token without
    a sign has value 0.
    """
    # One sum is enough where each response has one advantage for all its tokens, so one sign
    if not count_S2.all(axis=1).any():
        return np.where(count_S2 > 0, responses.sum(values_U)[:, None], 0)
    positive_S = responses.sum(np.where(negative_U, 0, values_U))
    negative_S = responses.sum(np.where(negative_U, values_U, 0))
    return np.stack([positive_S, negative_S], axis=1)


def _evaluate(sums: np.ndarray, index: int, algorithm: Algorithm) -> dict[str, np.ndarray]:
    """Every share and mean of the algorithm at `index`, on totals and without each group."""
    own = sums["algorithms"][..., index]
    total = sums["update"] if algorithm.weighs_by_ratio else sums["advantage"]
    total_of_both = total.sum(axis=-1)
    masked, capped = own["lost"].sum(axis=-1), own["capped"].sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        blocked = own["blocked"] / sums["judged"]
        lost = (own["lost"] + own["capped"]) / total
        values = {
            "blocked_all": own["blocked"].sum(axis=-1) / sums["judged"].sum(axis=-1),
            "lost_all": (masked + capped) / total_of_both,
            "lost_masked": masked / total_of_both,
            "lost_capped": capped / total_of_both,
            "touched": own["touched"] / sums["responses"],
        }
        for row, sign in enumerate(SIGNS):
            values[f"blocked_{sign}"] = blocked[..., row]
            values[f"lost_{sign}"] = lost[..., row]
        for name, (numerator, count) in _means(sums, own).items():
            values[name] = numerator / count
    return values


def _means(sums: np.ndarray, own: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums over blocked and over kept tokens, each with its number of tokens; of the rare ones, how
    many are blocked.
    """
    n = sums["judged"].sum(axis=-1)
    blocked_n = own["blocked"].sum(axis=-1)
    return {
        "blocked_rare": (own["rare"], sums["rare"]),
        "mu_blocked": (own["mu"], blocked_n),
        "mu_kept": (sums["mu"] - own["mu"], n - blocked_n),
        "entropy_blocked": (own["entropy"], own["entropy_n"]),
        "entropy_kept": (
            sums["entropy"] - own["entropy"],
            sums["entropy_n"] - own["entropy_n"],
        ),
    }
