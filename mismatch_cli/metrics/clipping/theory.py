"""The paper's bounds on the improvement of a policy, from sampled responses and their rewards.

J(π) − J(μ) = L′ − Δ holds exactly for every set of responses (arXiv 2602.04879 eq. 5 and 6); the
bounds (eq. 7 and 8) need the largest divergence over *all* states, which no sample contains.
"""

from typing import Any

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked import Masked
from mismatch_cli.metrics.estimate import EXTREME, POSITIVE, Estimate
from mismatch_cli.metrics.sums import GroupSums, SequenceWeights


class Theory(Accumulator):
    """Per-response sums in float64, over responses with a reward; the largest TV, length and
    |reward| of the sample.
    """

    LARGEST = ("tv_max", "tv_full_max", "xi", "weight_log_max", "longest")

    def __init__(self) -> None:
        self.sums, self.weights = GroupSums(4), SequenceWeights()
        self.tv_max = self.tv_full_max = self.xi = self.weight_log_max = -np.inf
        self.longest = 0

    def update(self, judged: Masked) -> None:
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
        self.tv_max = max(
            self.tv_max, float(np.abs(judged.difference_N[counted_N]).max(initial=-np.inf))
        )
        full_N = gaps.column("tv_full_T")
        # NaN: not measured, and it stays so
        full_U = np.array([np.nan]) if full_N is None else full_N[counted_N]
        self.tv_full_max = float(np.maximum(self.tv_full_max, full_U.max(initial=-np.inf)))
        self.xi = max(self.xi, float(np.abs(reward_S[graded_S]).max()))
        self.weight_log_max = max(self.weight_log_max, float(d_S[graded_S].max()))
        self.longest = max(self.longest, int(gaps.responses.length_S[graded_S].max()))

    def result(self, prompts: int) -> dict[str, Any] | None:
        """The bounds and their terms; None if no response has a reward."""
        if not self.longest:
            return None
        estimates = self.sums.result(self._evaluate, prompts, {"tv_sum": POSITIVE}) | {
            "ess": self.weights.result(prompts)["ess_sequence"],
        }
        full = not np.isnan(self.tv_full_max)
        tv_max = self.tv_full_max if full else self.tv_max
        surrogate = estimates["surrogate"].value
        if surrogate is not None:
            penalty = 2 * self.xi * self.longest * (self.longest - 1) * tv_max**2
            estimates["quadratic_bound"] = Estimate(surrogate - penalty, note=EXTREME)
        with np.errstate(over="ignore"):
            largest = float(np.exp(self.weight_log_max))
        return {name: estimate.to_dict() for name, estimate in estimates.items()} | {
            "xi": self.xi,
            "longest": self.longest,
            "tv_max": tv_max,
            "tv_max_of": "full TV"
            if full
            else "binary TV of the sampled tokens, which can only be smaller",
            "weight_max": largest if np.isfinite(largest) else None,
        }

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
