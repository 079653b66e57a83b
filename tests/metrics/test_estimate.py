"""Values that are none, Student's t, and the factor above the floor."""

from __future__ import annotations

import pytest

from mismatch_cli.metrics.estimate import (
    BELOW_RESOLUTION,
    point,
    student_t,
    times_floor,
)

INF, NAN = float("inf"), float("nan")


def test_values_that_json_cannot_hold() -> None:
    assert point(NAN).to_dict() == {"value": None, "low": None, "high": None, "note": "not measured"}
    assert point(INF).value is None and "float" in point(INF).note


@pytest.mark.parametrize(
    ("value", "floor", "answer"),
    [
        (6.0, 2.0, 3.0),
        (1.0, 9e-8, BELOW_RESOLUTION),
        (1.0, 0.0, BELOW_RESOLUTION),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_times_floor(value, floor, answer) -> None:
    assert times_floor(value, floor) == answer


@pytest.mark.parametrize(("degrees", "quantile"), [(4, 2.7764), (9, 2.2622), (15, 2.1314), (31, 2.0395)])
def test_student_t_against_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=3e-3)
