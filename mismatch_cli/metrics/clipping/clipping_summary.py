"""Everything counted about algorithms on one set of tokens: accumulators updated together, and
their result.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
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
_WHICH = ("all", *SIGNS)
_MEANS = ("blocked_rare", "mu_blocked", "mu_kept", "entropy_blocked", "entropy_kept")
RARE = 0.1  # μ below which a token is rare: the α of arXiv 2602.04879, figures 6 and 7
_NO_ADVANTAGES = Estimate(None, note="no advantages in the trace")
_SCALES: dict[str, Scale] = {
    **dict.fromkeys((f"{kind}_{which}" for kind in ("blocked", "lost") for which in _WHICH), SHARE),
    **dict.fromkeys(("lost_masked", "lost_capped", "touched", "mu_blocked", "mu_kept"), SHARE),
    "blocked_rare": SHARE,
    **dict.fromkeys(("entropy_blocked", "entropy_kept"), POSITIVE),
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
        number, needs = len(question.algorithms), question.needs
        self.columns = sums_dtype(number)
        self.question = question
        self.counts = Counter(dict.fromkeys(_COUNTS, 0))
        self.responses_read = 0  # responses, including those left out
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
        if missing := self.question.needs.first_missing_in(batch):
            self.lacking[missing] += batch.num_responses
        if missing or not batch.num_responses:
            return
        slices = apply_masks(
            batch, self.question.needs, self.question.algorithms, self.question.batch_values, trace
        )
        sums_SM = np.concatenate([self._update_slice(cases) for cases in slices])
        group_S = prompt_groups(batch.prompt_id_S)
        self.sums.update(group_S, sums_SM)
        self.steps.update(batch.step_S, group_S, sums_SM)
        judged_S = sums_SM.view(self.columns)["judged"].any(axis=(1, 2))
        self.prompts.update(batch.prompt_id_S[judged_S])

    def _update_slice(self, cases: list[MaskedSlice]) -> np.ndarray:
        self._count(cases)
        for judged in cases:
            for part in (
                self.cells,
                self.tokens,
                self.overlap,
                self.bad_updates,
                self.sweeps,
                self.sample,
            ):
                part.update(judged)
        self.approximation.update(cases)
        if self.theory is not None:
            self.theory.update(cases[0])
        return np.sum([response_sums(judged) for judged in cases], axis=0)

    def _count(self, cases: list[MaskedSlice]) -> None:
        gaps, judged = cases[0].gaps, int(np.count_nonzero(cases[0].judged_N))
        self.counts.update(
            {
                "tokens": judged,
                "positive": sum(int(np.count_nonzero(case.positive_N)) for case in cases),
                "negative": sum(int(np.count_nonzero(case.negative_N)) for case in cases),
                "zero_advantage": len(gaps.logq_N) - judged,
                "masked": gaps.num_masked,
                "not_measured": gaps.num_not_measured,
                "out_of_support": 0
                if gaps.out_of_support_N is None
                else int(np.count_nonzero(gaps.out_of_support_N)),
                "responses": int(np.count_nonzero(gaps.responses.sum(cases[0].judged_N))),
            }
        )

    def result(self, blocked_tokens: int) -> ClippingNumbers:
        """The numbers with their intervals, and the most frequently blocked tokens."""
        prompts, advantages = self.prompts.result(), self.question.needs.advantages
        places = range(len(self.question.algorithms))
        rows = [self._algorithm(place, blocked_tokens) for place in places]
        names = [row.name for row in rows]
        equivalents = [self._equivalents(*pair) for pair in enumerate(rows) if advantages]
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
            equivalents=list(chain.from_iterable(equivalents)),
            approximation=self.approximation.result(prompts),
            theory=self.theory.result(prompts) if self.theory else None,
        )

    def _algorithm(self, place: int, blocked_tokens: int) -> AlgorithmRow:
        algorithm, estimates = self.question.algorithms[place], self._estimates(place)
        blocked_when, weight = algorithm.formulas
        blocked = [estimates[f"blocked_{which}"] for which in _WHICH]
        lost = [estimates[f"lost_{which}"] for which in (*_WHICH, "masked", "capped")]
        positive, negative = (
            self.tokens.result(place, sign, blocked_tokens) for sign in range(len(SIGNS))
        )
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
            by_mu=self._by_mu(place),
            by_position=self._by_position(place),
            by_step=self._by_step(place),
            blocked_tokens=TokensBySign(positive, negative),
        )

    def _by_mu(self, place: int) -> list[BlockedInBin]:
        counts_22GB = self.cells.by_mu[[0, 1 + place]]
        return [
            BlockedInBin(*ends, *self._in_bin(counts_22GB[..., b]))
            for b, ends in enumerate(pairwise((0.0, *MU_EDGES, 1.0)))
        ]

    def _by_position(self, place: int) -> list[BlockedAtPositions]:
        counts_22GB = self.cells.by_position[[0, 1 + place]]
        return [
            BlockedAtPositions(
                *bin_bounds(b, self.cells.longest), *self._in_bin(counts_22GB[..., b])
            )
            for b in range(POSITION_BINS)
            if counts_22GB[0, :, :, b].any()
        ]

    def _by_step(self, place: int) -> list[BlockedInSteps]:
        prompts, rows = self.prompts.result(), []
        for first, last, sums_GM in self.steps:
            sums_G = sums_GM.view(self.columns)[:, 0]
            own_G = sums_G["of"][:, place]
            tokens, blocked = self._in_bin(np.stack([sums_G["judged"].T, own_G["blocked"].T]))
            means = {
                name: grouped_ratio(part_G, count_G, prompts, _SCALES[name])
                for name, (part_G, count_G) in _means(sums_G, own_G).items()
            }
            rows.append(BlockedInSteps(first, last, tokens, blocked, **means))
        return rows

    def _in_bin(self, counts_22G: np.ndarray) -> tuple[int, BySign]:
        """How many tokens of a bin are judged and which share is blocked, from the counts of
        judged and blocked ones by the sign of A and prompt group.
        """
        prompts, advantages = self.prompts.result(), self.question.needs.advantages
        judged_2G, blocked_2G = counts_22G
        of_all = _NO_ADVANTAGES
        if advantages:
            of_all = grouped_share(blocked_2G.sum(axis=0), judged_2G.sum(axis=0), prompts)
        of_signs = (
            grouped_share(*pair, prompts) for pair in zip(blocked_2G, judged_2G, strict=True)
        )
        # Otherwise every token was judged once per sign
        tokens = judged_2G.sum() if advantages else judged_2G[0].sum()
        return int(tokens), BySign(of_all, *of_signs)

    def _estimates(self, place: int) -> dict[str, Estimate]:
        algorithm = self.question.algorithms[place]

        def values(totals_xM: np.ndarray) -> dict[str, np.ndarray]:
            return _evaluate(totals_xM.view(self.columns)[..., 0], place, algorithm)

        found = self.sums.result(values, self.prompts.result(), _SCALES)
        if not self.question.needs.advantages:
            over_both = ("blocked_all", "lost_all", "lost_masked", "lost_capped", "touched")
            return found | dict.fromkeys(over_both, _NO_ADVANTAGES)
        if not algorithm.weighs_by_ratio:
            return found | {"lost_capped": Estimate(None, note="the weight is not r")}
        if not np.isfinite(self.sums.sums_GM).all():
            infinite = Estimate(None, note=f"a ratio is {OVERFLOW}")
            lost = [name for name in found if name.startswith("lost") and found[name].value is None]
            found |= dict.fromkeys(lost, infinite)
        return found

    def _equivalents(self, place: int, row: AlgorithmRow) -> list[EqualThreshold]:
        """For a published one-sided mask on trainer/rollout: each other family's threshold that
        blocks as much.
        """
        own_family = self._own_family(place)
        if not own_family or not self.cells.by_mu[1 + place].any():
            return []  # if nothing is blocked, every high enough threshold blocks as little
        return [
            EqualThreshold(row.name, row.blocked.all, family, threshold)
            for family, threshold in self._as_strict(place).items()
        ]

    def same_strictness(self, place: int) -> SameStrictness | None:
        """Each family's threshold that blocks as many tokens as an algorithm; None if there is
        nothing to match.
        """
        algorithm = self.question.algorithms[place]
        if not self.question.needs.advantages or not self.cells.by_mu[1 + place].any():
            return None
        settings = "; ".join(mask.settings for mask in algorithm.masks if mask.settings)
        return SameStrictness(
            algorithm.name, settings, self._own_family(place), self._as_strict(place)
        )

    def _own_family(self, place: int) -> str | None:
        """The family of an algorithm with a single mask on trainer/rollout."""
        masks = self.question.algorithms[place].masks
        regions = [mask.region for mask in masks if mask.ratio == TRAINER_ROLLOUT]
        if len(masks) != 1:
            return None
        return next((name for name in self.sweeps.sums if FAMILIES.get(name) in regions), None)

    def _as_strict(self, place: int) -> dict[str, Estimate]:
        """By family but the algorithm's own."""
        blocked_G, prompts = self.cells.by_mu[1 + place].sum(axis=(0, 2)), self.prompts.result()
        families = [name for name in self.sweeps.sums if name in FAMILIES]
        return {
            name: self.sweeps.threshold_for(name, blocked_G, prompts)
            for name in families
            if name != self._own_family(place)
        }


def sums_dtype(algorithms: int) -> np.dtype:
    """M float64 numbers: over all judged tokens, then `of` each algorithm over the tokens that
    it blocks. `rare` counts those with A > 0 and μ < RARE.
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
    return np.dtype([*shared, ("of", per_algorithm, (algorithms,))])


def response_sums(judged: MaskedSlice) -> np.ndarray:
    """[S, M] in float64, laid out as `sums_dtype`."""
    sums_S = np.zeros(judged.num_responses, sums_dtype(len(judged.algorithms)))
    total = judged.gaps.responses.sum
    sums_S["responses"] = total(judged.judged_N) > 0
    sums_S["mu"] = total(judged.gaps.q_N * judged.judged_N)
    if judged.entropy_N is not None:
        known_N = judged.judged_N & ~np.isnan(judged.entropy_N)
        sums_S["entropy"], sums_S["entropy_n"] = (
            total(np.where(known_N, judged.entropy_N, 0)),
            total(known_N),
        )
    judged_S2 = np.stack([total(judged.positive_N), total(judged.negative_N)], axis=1)
    sums_S["judged"] = judged_S2
    sums_S["update"] = _by_sign(
        judged.gaps.responses, judged_S2, judged.negative_N, judged.update_N
    )
    sums_S["advantage"] = _by_sign(
        judged.gaps.responses, judged_S2, judged.negative_N, judged.abs_advantage_N
    )
    for place, (algorithm, blocked_U) in enumerate(
        zip(judged.algorithms, judged.blocked, strict=True)
    ):
        _fill(sums_S["of"][:, place], judged, algorithm, blocked_U)
    _count_rare(sums_S, judged)
    return sums_S.view(np.float64).reshape(judged.num_responses, -1)


def _count_rare(sums_S: np.ndarray, judged: MaskedSlice) -> None:
    """Fill the numbers of tokens with A > 0 and μ < RARE: all, and those that each one blocks."""
    rare_N = judged.positive_N & (judged.gaps.q_N < RARE)
    sums_S["rare"] = judged.gaps.responses.sum(rare_N)
    for place, blocked_U in enumerate(judged.blocked):
        blocked = judged.responses_at(blocked_U)
        sums_S["of"]["rare"][:, place] = blocked.sum(rare_N[blocked_U])


def _fill(
    taken_S: np.ndarray, judged: MaskedSlice, algorithm: Algorithm, blocked_U: np.ndarray
) -> None:
    """Fill the sums of one algorithm; `capped` is what its weight's bounds take from kept
    tokens: (r − weight)·|A|.
    """
    weight_N = judged.update_N if algorithm.weighs_by_ratio else judged.abs_advantage_N
    taken_S["blocked"], taken_S["lost"] = _sums_at(judged, blocked_U, weight_N[blocked_U])
    taken_S["touched"] = taken_S["blocked"].any(axis=1)
    blocked = judged.responses_at(blocked_U)
    taken_S["mu"] = blocked.sum(judged.gaps.q_N[blocked_U])
    if judged.entropy_N is not None:
        entropy_U = judged.entropy_N[blocked_U]
        known_U = ~np.isnan(entropy_U)
        taken_S["entropy"], taken_S["entropy_n"] = (
            blocked.sum(np.where(known_U, entropy_U, 0)),
            blocked.sum(known_U),
        )
    if not algorithm.weighs_by_ratio or not algorithm.weight[0].bounded:
        return
    with np.errstate(over="ignore"):  # a cap beyond float32 caps nothing
        low, high = map(np.float32, algorithm.weight[0].bounds)
    bounded_N = judged.judged_N & ((judged.ratio_N > high) | (judged.ratio_N < low))
    bounded_N[blocked_U] = False
    index_U = np.flatnonzero(bounded_N)
    ratio_U = judged.ratio_N[index_U].astype(np.float64)
    lost_U = (ratio_U - np.clip(ratio_U, low, high)) * judged.abs_advantage_N[index_U]
    taken_S["capped"] = _sums_at(judged, index_U, lost_U)[1]


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
    if not count_S2.all(axis=1).any():  # each response has one sign only
        return np.where(count_S2 > 0, responses.sum(values_U)[:, None], 0)
    return np.stack(
        [responses.sum(np.where(negative_U == sign, values_U, 0)) for sign in (False, True)], axis=1
    )


def _evaluate(sums: np.ndarray, place: int, algorithm: Algorithm) -> dict[str, np.ndarray]:
    """Every share and mean of the algorithm at `place`, on totals and without each group."""
    taken, total = (
        sums["of"][..., place],
        sums["update" if algorithm.weighs_by_ratio else "advantage"],
    )
    n, blocked_n, everything = (
        pair.sum(axis=-1) for pair in (sums["judged"], taken["blocked"], total)
    )
    masked, capped = taken["lost"].sum(axis=-1), taken["capped"].sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        blocked, lost = taken["blocked"] / sums["judged"], (taken["lost"] + taken["capped"]) / total
        return {
            "blocked_all": blocked_n / n,
            **{f"blocked_{sign}": blocked[..., row] for row, sign in enumerate(SIGNS)},
            "lost_all": (masked + capped) / everything,
            **{f"lost_{sign}": lost[..., row] for row, sign in enumerate(SIGNS)},
            "lost_masked": masked / everything,
            "lost_capped": capped / everything,
            "touched": taken["touched"] / sums["responses"],
            **{name: part / count for name, (part, count) in _means(sums, taken).items()},
        }


def _means(sums: np.ndarray, taken: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums over blocked and over kept tokens, each with its number of tokens; of the rare ones, how
    many are blocked.
    """
    n, blocked_n = sums["judged"].sum(axis=-1), taken["blocked"].sum(axis=-1)
    return {
        "blocked_rare": (taken["rare"], sums["rare"]),
        "mu_blocked": (taken["mu"], blocked_n),
        "mu_kept": (sums["mu"] - taken["mu"], n - blocked_n),
        "entropy_blocked": (taken["entropy"], taken["entropy_n"]),
        "entropy_kept": (
            sums["entropy"] - taken["entropy"],
            sums["entropy_n"] - taken["entropy_n"],
        ),
    }
