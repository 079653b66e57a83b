"""Means over tokens with their error over prompts, and the profile of the gap along an axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.metrics.estimate import Estimate, grouped_ratio, standard_error
from mismatch_cli.metrics.hashing import GROUPS


@dataclass(frozen=True)
class Mean:
    """A mean, and its standard error from deleting one group of prompts at a time."""

    value: float
    error: float
    count: int
    groups: int = 0  # of prompts, that the error is from

    def z_from(self, value: float) -> float:
        """How many standard errors the mean is above a value."""
        return as_normal((self.value - value) / self.error, self.groups) if self.error > 0 else 0.0

    def times(self, other: Mean) -> float:
        """This mean over another one."""
        return self.value / other.value if other.value > 0 else float("inf")

    def z_of_log_ratio(self, other: Mean) -> float:
        """How many standard errors the log of the ratio of the two means is from 0."""
        if min(self.value, other.value) <= 0:
            return 0.0
        error = np.hypot(self.error / self.value, other.error / other.value)
        t = float(np.log(self.value / other.value) / error) if error > 0 else 0.0
        return as_normal(t, min(self.groups, other.groups))


def as_normal(t: float, groups: int) -> float:
    """The standard normal deviate that is as improbable as Student's t with groups − 1 degrees (Wallace, 1959)."""
    degrees = max(groups - 1, 1)
    return float(np.sign(t) * np.sqrt(degrees * np.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3))


def mean_over_prompts(value_N: np.ndarray, group_N: np.ndarray) -> Mean:
    """The mean of tokens (or of anything with a prompt group), its error from the groups; few groups: infinite."""
    sum_G = np.bincount(group_N, weights=value_N, minlength=GROUPS)
    count_G = np.bincount(group_N, minlength=GROUPS)
    there = count_G > 0
    total, count = float(sum_G.sum()), int(count_G.sum())
    if not count:
        return Mean(float("nan"), float("inf"), 0)
    value = total / count
    if there.sum() < _FEWEST_GROUPS:
        return Mean(value, float("inf"), count)
    without_G = (total - sum_G[there]) / np.maximum(count - count_G[there], 1)
    return Mean(value, standard_error(without_G), count, int(there.sum()))


_FEWEST_GROUPS = 4


def estimate_over_prompts(value_N: np.ndarray, group_N: np.ndarray, prompt_id_N: np.ndarray) -> Estimate:
    """The mean of what is positive, with the interval that every report has."""
    sum_G = np.bincount(group_N, weights=value_N, minlength=GROUPS)
    count_G = np.bincount(group_N, minlength=GROUPS)
    return grouped_ratio(sum_G, count_G, len(np.unique(prompt_id_N)))


def slope_over_prompts(x_N: np.ndarray, y_N: np.ndarray, group_N: np.ndarray) -> tuple[float, float]:
    """The least-squares slope of y on x through the origin, and its standard error over groups of prompts."""
    xy_G = np.bincount(group_N, weights=x_N * y_N, minlength=GROUPS)
    xx_G = np.bincount(group_N, weights=x_N * x_N, minlength=GROUPS)
    there = xx_G > 0
    if there.sum() < _FEWEST_GROUPS:
        return float("nan"), float("inf")
    without_G = (xy_G.sum() - xy_G[there]) / np.maximum(xx_G.sum() - xx_G[there], 1e-300)
    return float(xy_G.sum() / xx_G.sum()), standard_error(without_G)


def share_surely_above(chosen_N: np.ndarray, weight_N: np.ndarray, group_N: np.ndarray, least: float) -> bool:
    """Whether the chosen tokens' share of all weight is above `least` by two standard errors over groups of prompts."""
    chosen_G = np.bincount(group_N, weights=np.where(chosen_N, weight_N, 0.0), minlength=GROUPS)
    weight_G = np.bincount(group_N, weights=weight_N, minlength=GROUPS)
    there = weight_G > 0
    if there.sum() < _FEWEST_GROUPS:
        return False
    share = chosen_G.sum() / weight_G.sum()
    without_G = (chosen_G.sum() - chosen_G[there]) / np.maximum(weight_G.sum() - weight_G[there], 1e-300)
    return bool(share - 2 * standard_error(without_G) > least)
