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
        """A term by its key in `THEORY`."""
        term: Estimate | float | None = getattr(self, key)
        return term


class Theory(Accumulator):
    """Per-response sums in float64, over responses with a reward; the largest TV, KL, length and
    |reward| of the sample.
    """

    LARGEST = (
        *("tv_max", "tv_full_max", "kl_max", "kl_full_max"),
        *("xi", "weight_log_max", "longest"),
    )

    def __init__(self) -> None:
        self.sums, self.weights = GroupSums(4), SequenceWeights()
        self.tv_max = self.tv_full_max = self.xi = self.weight_log_max = -np.inf
        self.kl_max = self.kl_full_max = -np.inf
        self.longest = 0

    def update(self, judged: MaskedSlice) -> None:
        gaps, reward_S = judged.gaps, judged.reward_S.astype(np.float64)
        graded_S = ~np.isnan(reward_S) & (gaps.responses.length_S > 0)
        if not graded_S.any():
            return
        d_N = gaps.logp_N.astype(np.float64) - gaps.logq_N
        with np.errstate(over="ignore"):
            less_1_N = np.expm1(d_N)
            d_S, sum_S, abs_S = (gaps.responses.sum(x) for x in (d_N, less_1_N, np.abs(less_1_N)))
            rows_SM = np.stack(
                [np.ones_like(d_S), reward_S * sum_S, reward_S * np.expm1(d_S), abs_S], axis=1
            )
        group_S = gaps.group_S[graded_S]
        self.sums.update(group_S, rows_SM[graded_S])
        self.weights.update(group_S, d_S[graded_S])
        counted_N = gaps.per_token(graded_S)
        compared = judged.policies.compare(TRAINER_ROLLOUT)
        tv_U, kl_U = np.abs(judged.difference_N[counted_N]), compared.binary_kl_T[counted_N]
        self.tv_max = max(self.tv_max, float(tv_U.max(initial=-np.inf)))
        self.kl_max = max(self.kl_max, float(kl_U.max(initial=-np.inf)))
        self.tv_full_max = _largest(self.tv_full_max, gaps.column("tv_full_T"), counted_N)
        self.kl_full_max = _largest(self.kl_full_max, gaps.column("kl_full_T"), counted_N)
        self.xi = max(self.xi, float(np.abs(reward_S[graded_S]).max()))
        self.weight_log_max = max(self.weight_log_max, float(d_S[graded_S].max()))
        self.longest = max(self.longest, int(gaps.responses.length_S[graded_S].max()))

    def result(self, prompts: int) -> TheoryTerms | None:
        """The bounds and their terms; None if no response has a reward."""
        if not self.longest:
            return None
        estimates = self.sums.result(self._evaluate, prompts, {"tv_sum": POSITIVE}) | {
            "ess": self.weights.result(prompts)["ess_sequence"],
        }
        tv_max, tv_max_of = _of_all(self.tv_full_max, self.tv_max, "TV")
        kl_max, kl_max_of = _of_all(self.kl_full_max, self.kl_max, "KL")
        # Rounding of float32 may put the KL below 0
        tv_of_kl = min(1.0, sqrt(max(kl_max, 0.0) / 2))
        surrogate = estimates["surrogate"].value
        if surrogate is not None:
            estimates["quadratic_bound"] = quadratic = self._quadratic(surrogate, tv_max)
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
        responses, surrogate, difference, abs_less_1 = np.moveaxis(totals_xM, -1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            surrogate, difference, abs_less_1 = (
                x / responses for x in (surrogate, difference, abs_less_1)
            )
        return {
            "surrogate": surrogate,
            "correction": surrogate - difference,
            "difference": difference,
            "linear_bound": surrogate - 2 * self.xi * abs_less_1,
            "tv_sum": abs_less_1 / 2,
        }


def _largest(so_far: float, value_N: np.ndarray | None, counted_N: np.ndarray) -> float:
    """The largest of a column; NaN from the first token on that lacks it."""
    value_U = np.array([np.nan]) if value_N is None else value_N[counted_N]
    return float(np.maximum(so_far, value_U.max(initial=-np.inf)))


def _of_all(full: float, binary: float, what: str) -> tuple[float, str]:
    """The largest divergence of full distributions, else of sampled tokens against the rest."""
    if np.isnan(full):
        return binary, f"binary {what} of the sampled tokens, which can only be smaller"
    return full, f"full {what}"


def _higher(bound: Estimate, other: Estimate) -> Estimate:
    """The higher of two lower bounds, which holds if both do."""
    values = [each for each in (bound, other) if each.value is not None]
    return max(values, key=lambda each: each.value or 0.0)
