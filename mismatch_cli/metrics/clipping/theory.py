"""The paper's bounds on the improvement of a policy, from sampled responses and their rewards.

J(π) − J(μ) = L′ − Δ holds exactly for every set of responses (arXiv 2602.04879 eq. 5 and 6); the
bounds (eq. 7 and 8) need the largest divergence over *all* states, which no sample contains. The
composite bound (App. B.3) is the higher of the two. Pinsker's inequality TV² ≤ KL / 2 gives the
quadratic one by KL, which is at most as high.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from mismatch_cli.base.json_form import left_out_if_none
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.estimate import EXTREME, POSITIVE, Estimate, finite_or_none
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.sums import GroupSums, SequenceWeights
from mismatch_cli.rules.policies import TRAINER_ROLLOUT


@dataclass(frozen=True, kw_only=True)
class TheoryTerms:
    """The terms of the bounds over responses, in rewards where `THEORY` names no other unit.

    The bounds that need the surrogate are absent without it.
    """

    surrogate: Estimate
    correction: Estimate
    difference: Estimate
    linear_bound: Estimate
    tv_sum: Estimate
    ess: Estimate
    quadratic_bound: Estimate | None = left_out_if_none()
    pinsker_bound: Estimate | None = left_out_if_none()
    composite_bound: Estimate | None = left_out_if_none()
    xi: float
    longest: int  # tokens
    tv_max: float
    tv_max_of: str  # which TV
    kl_max: float | None  # nats; None if infinite
    kl_max_of: str
    tv_of_kl: float
    weight_max: float | None  # None if larger than a float can hold

    def term(self, key: str) -> Estimate | float | None:
        """The term with this key in `THEORY`."""
        term: Estimate | float | None = getattr(self, key)
        return term


class Theory(Accumulator):
    """Per-response sums in float64, over responses with a reward; the largest TV, KL, length and
    |reward| of the sample.
    """

    LARGEST = (
        "tv_max",
        "tv_full_max",
        "kl_max",
        "kl_full_max",
        "xi",
        "weight_log_max",
        "longest",
    )

    def __init__(self) -> None:
        # Σ over graded responses: 1, R Σ(r − 1), R (Πr − 1), Σ|r − 1|
        self.sums = GroupSums(4)
        self.weights = SequenceWeights()
        self.tv_max = self.tv_full_max = self.xi = self.weight_log_max = -np.inf
        self.kl_max = self.kl_full_max = -np.inf
        self.longest = 0

    def update(self, judged: MaskedSlice) -> None:
        reward_S = judged.reward_S.astype(np.float64)
        length_S = judged.gaps.responses.length_S
        graded_S = ~np.isnan(reward_S) & (length_S > 0)
        if not graded_S.any():
            return
        self._add_sums(judged.gaps, reward_S, graded_S)
        self._raise_divergences(judged, judged.gaps.per_token(graded_S))
        self.xi = max(self.xi, float(np.abs(reward_S[graded_S]).max()))
        self.longest = max(self.longest, int(length_S[graded_S].max()))

    def _add_sums(self, gaps: TokenGaps, reward_S: np.ndarray, graded_S: np.ndarray) -> None:
        d_N = gaps.logp_N.astype(np.float64) - gaps.logq_N
        with np.errstate(over="ignore"):
            less_1_N = np.expm1(d_N)
            d_S = gaps.responses.sum(d_N)
            less_1_S = gaps.responses.sum(less_1_N)
            abs_less_1_S = gaps.responses.sum(np.abs(less_1_N))
            surrogate_S = _earned(reward_S, less_1_S)
            difference_S = _earned(reward_S, np.expm1(d_S))
            rows_SM = np.stack([np.ones_like(d_S), surrogate_S, difference_S, abs_less_1_S], axis=1)
        group_S = gaps.group_S[graded_S]
        self.sums.update(group_S, rows_SM[graded_S])
        self.weights.update(group_S, d_S[graded_S])
        self.weight_log_max = max(self.weight_log_max, float(d_S[graded_S].max()))

    def _raise_divergences(self, judged: MaskedSlice, graded_N: np.ndarray) -> None:
        tv_U = np.abs(judged.difference_N[graded_N])
        kl_U = judged.policies.compare(TRAINER_ROLLOUT).binary_kl_T[graded_N]
        self.tv_max = max(self.tv_max, float(tv_U.max(initial=-np.inf)))
        self.kl_max = max(self.kl_max, float(kl_U.max(initial=-np.inf)))
        self.tv_full_max = _largest(self.tv_full_max, judged.gaps.column("tv_full_T"), graded_N)
        self.kl_full_max = _largest(self.kl_full_max, judged.gaps.column("kl_full_T"), graded_N)

    def result(self, prompts: int) -> TheoryTerms | None:
        """The bounds and their terms; None if no response has a reward."""
        if not self.longest:
            return None
        estimates = self.sums.result(self._evaluate, prompts, {"tv_sum": POSITIVE})
        estimates["ess"] = self.weights.result(prompts)["ess_sequence"]
        tv_max, tv_max_of = _of_all(self.tv_full_max, self.tv_max, "TV")
        kl_max, kl_max_of = _of_all(self.kl_full_max, self.kl_max, "KL")
        # Rounding of float32 may put the KL below 0
        tv_of_kl = min(1.0, sqrt(max(kl_max, 0.0) / 2))
        surrogate = estimates["surrogate"].value
        if surrogate is not None:
            quadratic = self._quadratic(surrogate, tv_max)
            estimates["quadratic_bound"] = quadratic
            estimates["pinsker_bound"] = self._quadratic(surrogate, tv_of_kl)
            estimates["composite_bound"] = _higher(quadratic, estimates["linear_bound"])
        with np.errstate(over="ignore"):
            largest = float(np.exp(self.weight_log_max))
        return TheoryTerms(
            **estimates,
            xi=self.xi,
            longest=self.longest,
            tv_max=tv_max,
            tv_max_of=tv_max_of,
            kl_max=finite_or_none(kl_max),
            kl_max_of=kl_max_of,
            tv_of_kl=tv_of_kl,
            weight_max=finite_or_none(largest),
        )

    def _quadratic(self, surrogate: float, tv_max: float) -> Estimate:
        """L′ − 2 ξ T(T − 1) D_max², where no TV of a state exceeds D_max."""
        penalty = 2 * self.xi * self.longest * (self.longest - 1) * tv_max**2
        return Estimate(surrogate - penalty, note=EXTREME)

    def _evaluate(self, totals_xM: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            means = totals_xM[..., 1:] / totals_xM[..., :1]
        surrogate, difference, abs_less_1 = np.moveaxis(means, -1, 0)
        return {
            "surrogate": surrogate,
            "correction": surrogate - difference,
            "difference": difference,
            "linear_bound": surrogate - 2 * self.xi * abs_less_1,
            "tv_sum": abs_less_1 / 2,
        }


def _earned(reward_S: np.ndarray, factor_S: np.ndarray) -> np.ndarray:
    """R × a factor: 0 without a reward, though the factor be too large for a float."""
    return np.multiply(reward_S, factor_S, out=np.zeros_like(factor_S), where=reward_S != 0)


def _largest(so_far: float, value_N: np.ndarray | None, graded_N: np.ndarray) -> float:
    """The largest of a column; NaN from the first token on that lacks it."""
    if value_N is None:
        return float("nan")
    # np.maximum keeps NaN, unlike max()
    return float(np.maximum(so_far, value_N[graded_N].max(initial=-np.inf)))


def _of_all(full: float, binary: float, divergence: str) -> tuple[float, str]:
    """The largest divergence of full distributions, else of sampled tokens against the rest."""
    if np.isnan(full):
        return binary, f"binary {divergence} of the sampled tokens, which can only be smaller"
    return full, f"full {divergence}"


def _higher(bound: Estimate, other: Estimate) -> Estimate:
    """The higher of two lower bounds, of which one has a value; it holds if both do."""
    if bound.value is None:
        return other
    if other.value is None:
        return bound
    return other if other.value > bound.value else bound
