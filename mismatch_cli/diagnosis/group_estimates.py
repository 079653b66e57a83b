"""Means and slopes over tokens, with their errors over groups of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.estimate import Estimate, grouped_ratio, standard_error


@dataclass(frozen=True)
class Mean:
    """A mean, and its standard error from deleting one group of prompts at a time."""

    value: float
    error: float
    count: int
    groups: int = 0  # of prompts, from which the error comes

    def z_from(self, value: float) -> float:
        """By how many standard errors the mean is above a value."""
        if not self.error > 0:
            return 0.0
        return as_normal((self.value - value) / self.error, self.groups)

    def times(self, other: Mean) -> float:
        """This mean over another one."""
        return self.value / other.value if other.value > 0 else float("inf")

    def z_of_log_ratio(self, other: Mean) -> float:
        """By how many standard errors the log ratio of the two means is above 0."""
        if min(self.value, other.value) <= 0:
            return 0.0
        error = np.hypot(self.error / self.value, other.error / other.value)
        if not error > 0:
            return 0.0
        t = float(np.log(self.value / other.value) / error)
        return as_normal(t, min(self.groups, other.groups))


def as_normal(t: float, groups: int) -> float:
    """The standard normal deviate that is as improbable as Student's t with groups − 1 degrees
    (Wallace, 1959).
    """
    degrees = max(groups - 1, 1)
    deviate = np.sign(t) * np.sqrt(degrees * np.log1p(t * t / degrees))
    return float(deviate * (8 * degrees + 1) / (8 * degrees + 3))


def mean_over_prompts(value_N: np.ndarray, group_N: np.ndarray) -> Mean:
    """The mean over tokens (or anything with a prompt group), with its error over groups,
    infinite for too few.
    """
    if not len(group_N):
        return Mean(float("nan"), float("inf"), 0)
    value, error, groups = _ratio(*_sums_by_group(group_N, value_N, None))
    return Mean(value, error, len(group_N), groups)


_FEWEST_GROUPS = 4


def _sums_by_group(group_N: np.ndarray, *weights: np.ndarray | None) -> list[np.ndarray]:
    """Sums of weights by prompt group; None means 1 each."""
    return [np.bincount(group_N, weights=weight_N, minlength=GROUPS) for weight_N in weights]


def _ratio(above_G: np.ndarray, below_G: np.ndarray) -> tuple[float, float, int]:
    """Σ above / Σ below, its standard error, and the number of groups; for too few groups
    infinity and 0.
    """
    above, below = above_G.sum(), below_G.sum()
    value = float(above / below) if below else float("nan")
    present_G = below_G > 0
    if present_G.sum() < _FEWEST_GROUPS:
        return value, float("inf"), 0
    without_G = (above - above_G[present_G]) / np.maximum(below - below_G[present_G], 1e-300)
    return value, standard_error(without_G), int(present_G.sum())


def estimate_over_prompts(
    value_N: np.ndarray, group_N: np.ndarray, prompt_id_N: np.ndarray
) -> Estimate:
    """The mean of positive values, with the interval used in all reports."""
    sum_G, count_G = _sums_by_group(group_N, value_N, None)
    return grouped_ratio(sum_G, count_G, len(np.unique(prompt_id_N)))


def slope_over_prompts(
    x_N: np.ndarray, y_N: np.ndarray, group_N: np.ndarray
) -> tuple[float, float]:
    """The least-squares slope of y on x through the origin, and its standard error over groups
    of prompts: infinite for too few.
    """
    slope, error, _ = _ratio(*_sums_by_group(group_N, x_N * y_N, x_N * x_N))
    return slope, error


def is_share_above(
    chosen_N: np.ndarray, weight_N: np.ndarray, group_N: np.ndarray, least: float
) -> bool:
    """Whether the chosen tokens' share of all weight is above `least` by two standard errors
    over groups of prompts.
    """
    chosen_weight_N = np.where(chosen_N, weight_N, 0.0)
    share, error, _ = _ratio(*_sums_by_group(group_N, chosen_weight_N, weight_N))
    return share - 2 * error > least
