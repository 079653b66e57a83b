"""Which of two sets of weights an engine sampled with, from the log-probabilities of both."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mismatch_cli.metrics.estimate import standard_error, without_groups

_DEVIATIONS = 3.0  # standard errors that μ must be away from the middle before the test decides
# The mean gaps must also differ by a large enough part of the smaller one. The engine's weights are
# the trainer's, rounded, and all responses share that rounding: if the step is smaller, either
# weights can fit significantly better.
_PART = 0.25


class PairedTest(NamedTuple):
    """Mean |π − μ| over responses at two sets of weights, and which of the two μ is nearer to.

    `share`: the place of μ between π at the second weights (0) and π at the first (1).
    `deviations`: its distance from the middle in standard errors over responses.
    """

    first: float
    second: float
    share: float
    deviations: float
    decided: bool

    @property
    def first_fits(self) -> bool:
        return self.decided and self.first < self.second

    @property
    def second_fits(self) -> bool:
        return self.decided and self.second < self.first


def paired_test(
    logp_rollout: Sequence[np.ndarray],
    logp_first: Sequence[np.ndarray],
    logp_second: Sequence[np.ndarray],
) -> PairedTest:
    """Which weights an engine sampled with: share = Σ (μ − π₂)(π₁ − π₂) / Σ (π₁ − π₂)² over tokens.

    Least squares gives most weight to the tokens that the step moved most. Undecided if the two
    sets of weights are too close, or NaN.
    """
    responses = zip(logp_rollout, logp_first, logp_second, strict=True)
    sums = [_fit_sums(*logps) for logps in responses if len(logps[0])]
    if not sums:
        return PairedTest(0.0, 0.0, 0.5, 0.0, False)
    sums_S4 = np.array(sums)
    gap_first, gap_second = sums_S4[:, :2].mean(axis=0).tolist()
    share, without_S = without_groups(np.divide, sums_S4[:, 2], sums_S4[:, 3])
    error = standard_error(without_S) if len(sums) > 1 else np.inf
    with np.errstate(all="ignore"):
        deviations = float(np.nan_to_num((share - 0.5) / error, nan=0.0))
    # Decided only if the gaps and the share favour the same weights, both clearly.
    advantage = gap_second - gap_first
    large = abs(advantage) > _PART * min(gap_first, gap_second)
    decided = large and advantage * deviations > 0 and abs(deviations) > _DEVIATIONS
    return PairedTest(gap_first, gap_second, float(share), deviations, decided)


def _fit_sums(
    logp_rollout_T: np.ndarray, logp_first_T: np.ndarray, logp_second_T: np.ndarray
) -> tuple[np.floating, ...]:
    """One response: mean |π₁ − μ|, mean |π₂ − μ|, Σ (μ − π₂)(π₁ − π₂) and Σ (π₁ − π₂)²."""
    mu_T, first_T, second_T = map(np.exp, (logp_rollout_T, logp_first_T, logp_second_T))
    step_T = first_T - second_T
    gaps = np.abs(first_T - mu_T).mean(), np.abs(second_T - mu_T).mean()
    return *gaps, (mu_T - second_T) @ step_T, step_T @ step_T
