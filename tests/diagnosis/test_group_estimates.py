"""Means and slopes over groups of prompts, with errors from leaving out one group at a time."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.diagnosis.group_estimates import (
    Mean,
    as_normal,
    estimate_over_prompts,
    is_share_above,
    mean_over_prompts,
    slope_over_prompts,
)
from mismatch_cli.metrics.estimate import grouped_ratio

GROUP_N = np.array([0, 0, 3, 3, 3, 7, 31, 31])
VALUE_N = np.array([1.0, 2.0, 4.0, 0.0, 3.0, 5.0, 1.0, 7.0])
WEIGHT_N = np.array([1.0, 3.0, 2.0, 2.0, 1.0, 4.0, 1.0, 5.0])


def left_out(above_N: np.ndarray, below_N: np.ndarray, group_N: np.ndarray) -> tuple[float, float]:
    """Σ above / Σ below, and its jackknife error."""
    values = []
    for group in np.unique(group_N):
        others_N = group_N != group
        values.append(above_N[others_N].sum() / below_N[others_N].sum())
    groups = len(values)
    error = ((groups - 1) / groups * ((values - np.mean(values)) ** 2).sum()) ** 0.5
    return above_N.sum() / below_N.sum(), error


def test_a_mean_has_the_error_of_its_groups():
    mean = mean_over_prompts(VALUE_N, GROUP_N)
    value, error = left_out(VALUE_N, np.ones(8), GROUP_N)
    assert (mean.value, mean.error) == pytest.approx((value, error))
    assert (mean.count, mean.groups) == (8, 4)
    three = mean_over_prompts(VALUE_N[:6], GROUP_N[:6])
    assert (three.value, three.error, three.groups) == (2.5, np.inf, 0)
    none = mean_over_prompts(VALUE_N[:0], GROUP_N[:0])
    assert np.isnan(none.value) and (none.error, none.count, none.groups) == (np.inf, 0, 0)
    assert Mean(1.0, 0.5, 3).groups == 0


def test_a_slope_has_the_error_of_its_groups():
    expected = left_out(WEIGHT_N * VALUE_N, WEIGHT_N**2, GROUP_N)
    assert slope_over_prompts(WEIGHT_N, VALUE_N, GROUP_N) == pytest.approx(expected)
    assert np.isnan(slope_over_prompts(np.zeros(8), VALUE_N, GROUP_N)[0])


def test_a_share_less_two_errors_is_compared_with_the_least_one():
    chosen_N = VALUE_N > 2
    share, error = left_out(WEIGHT_N * chosen_N, WEIGHT_N, GROUP_N)
    limit = share - 2 * error
    assert is_share_above(chosen_N, WEIGHT_N, GROUP_N, limit - 1e-9)
    assert not is_share_above(chosen_N, WEIGHT_N, GROUP_N, limit + 1e-9)
    assert not is_share_above(chosen_N, WEIGHT_N, GROUP_N, limit + 1.5 * error)


def test_an_estimate_counts_its_prompts_and_has_an_interval():
    prompt_id_N = np.array([5, 5, 6, 6, 9, 2, 3, 3])
    estimate = estimate_over_prompts(VALUE_N, GROUP_N, prompt_id_N)
    sum_G, count_G = np.zeros((2, GROUPS))
    np.add.at(sum_G, GROUP_N, VALUE_N)
    np.add.at(count_G, GROUP_N, 1.0)
    assert estimate == grouped_ratio(sum_G, count_G, prompts=5)
    assert estimate.value == pytest.approx(VALUE_N.mean())


@pytest.mark.parametrize(("t", "groups", "degrees"), [
    (2.0, 5, 4), (-3.0, 32, 31), (1.5, 2, 1), (1.5, 1, 1), (1.5, 0, 1), (0.0, 9, 8),
])  # fmt: skip
def test_a_deviate_of_student_becomes_a_normal_one(t, groups, degrees):
    """Wallace (1959), with one degree of freedom less than groups, but one at least."""
    deviate = (degrees * np.log(1 + t**2 / degrees)) ** 0.5 * (8 * degrees + 1) / (8 * degrees + 3)
    assert as_normal(t, groups) == pytest.approx(np.sign(t) * deviate)


def test_deviates_and_ratios_of_means():
    first, second = Mean(3.0, 0.5, 10, 6), Mean(2.0, 0.2, 10, 9)
    assert first.z_from(2.0) == as_normal(2.0, 6)
    assert Mean(3.0, 0.0, 10, 6).z_from(2.0) == 0.0 and Mean(3.0, np.nan, 10, 6).z_from(2.0) == 0.0
    assert first.times(second) == 1.5 and first.times(Mean(0.5, 0.1, 3)) == 6.0
    small = Mean(0.3, 0.05, 10, 6)
    assert small.z_of_log_ratio(Mean(0.2, 0.02, 10, 9)) == pytest.approx(
        first.z_of_log_ratio(second)
    )
    assert first.times(Mean(0.0, 0.1, 3)) == np.inf
    assert first.times(Mean(-1.0, 0.1, 3)) == np.inf
    t = np.log(1.5) / ((0.5 / 3) ** 2 + 0.1**2) ** 0.5
    assert first.z_of_log_ratio(second) == pytest.approx(as_normal(t, 6))
    assert second.z_of_log_ratio(first) == pytest.approx(as_normal(-t, 6))
    for other in (Mean(0.0, 0.2, 10, 9), Mean(-1.0, 0.2, 10, 9)):
        assert first.z_of_log_ratio(other) == other.z_of_log_ratio(first) == 0.0
    assert Mean(3.0, 0.0, 10, 6).z_of_log_ratio(Mean(2.0, 0.0, 10, 9)) == 0.0
