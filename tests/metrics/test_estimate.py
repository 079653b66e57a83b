"""Missing values, Student's t, and the factor above the floor."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.estimate import (
    BELOW_RESOLUTION,
    effective_groups,
    point_estimate,
    student_t,
    times_floor,
    without_groups,
)

INF, NAN = float("inf"), float("nan")


def test_values_that_json_cannot_hold() -> None:
    assert vars(point_estimate(NAN)) == {
        "value": None,
        "low": None,
        "high": None,
        "note": "not measured",
    }
    assert point_estimate(INF).value is None and "float" in point_estimate(INF).note


@pytest.mark.parametrize(
    ("value", "floor", "answer"),
    [
        (6.0, 2.0, 3.0),
        (6.0, -2.0, -3.0),
        (1.0, 1e-7, 1 / 1e-7),
        (1.0, 9e-8, BELOW_RESOLUTION),
        (1.0, 0.0, BELOW_RESOLUTION),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_times_floor(value, floor, answer) -> None:
    assert times_floor(value, floor) == answer


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(4, 2.7764), (9, 2.2622), (15, 2.1314), (31, 2.0395)]
)
def test_student_t_against_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=3e-3)


def test_student_t_has_three_terms_of_its_expansion() -> None:
    """At 100 degrees the fourth is below 2e-8."""
    assert student_t(100) == pytest.approx(1.9839715185, abs=3e-8)


def test_without_groups_leaves_out_one_at_a_time() -> None:
    part, whole = np.array([[1.0, 2.0], [3.0, 6.0]]), np.array([[2.0, 2.0], [2.0, 0.0]])
    value, without = without_groups(np.true_divide, part, whole)
    assert value.tolist() == [1.0, 4.0] and without.tolist() == [[1.5, INF], [0.5, 1.0]]


@pytest.mark.parametrize("groups", [1, 3, 40])
def test_equal_groups_decide_together_and_one_alone(groups: int) -> None:
    equal_G = np.full(groups, -0.5)
    assert effective_groups(equal_G) == pytest.approx(groups)
    assert effective_groups(np.append(equal_G, 1e6)) == pytest.approx(1, abs=1e-3)
    assert effective_groups(np.zeros(groups)) == 0
