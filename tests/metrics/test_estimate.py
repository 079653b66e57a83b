"""Intervals, where there are none, and the factor above the floor."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.estimate import (
    BELOW_RESOLUTION,
    jackknife_interval,
    percentile_interval,
    point,
    student_t,
    times_floor,
)

INF, NAN = float("inf"), float("nan")


def test_percentiles() -> None:
    estimate = percentile_interval(50.0, np.arange(101.0), prompts=10)
    assert (estimate.value, estimate.low, estimate.high, estimate.note) == (50, 2.5, 97.5, None)


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    x = np.random.default_rng(0).normal(size=32)
    without = (x.sum() - x) / 31
    estimate = jackknife_interval(x.mean(), without, prompts=32)
    assert estimate.high - x.mean() == pytest.approx(2.0395 * x.std(ddof=1) / np.sqrt(32), rel=1e-4)


@pytest.mark.parametrize("interval", [percentile_interval, jackknife_interval])
def test_too_few_prompts_give_a_note(interval) -> None:
    estimate = interval(1.0, np.arange(32.0), 9)
    assert (estimate.value, estimate.low, estimate.high) == (1, None, None)
    assert "10 prompts" in estimate.note


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


@pytest.mark.parametrize(("degrees", "quantile"), [(9, 2.2622), (15, 2.1314), (31, 2.0395)])
def test_student_t_against_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=2e-3)


def test_a_jackknife_over_few_groups_gives_no_interval() -> None:
    assert jackknife_interval(1.0, np.linspace(0.9, 1.1, 9), prompts=64).low is None
    assert jackknife_interval(1.0, np.linspace(0.9, 1.1, 10), prompts=64).low is not None
