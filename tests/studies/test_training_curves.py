"""Means, bands and smoothing checked against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.studies.runs import TrainingRun
from mismatch_cli.studies.training import (
    ONE_SEED,
    Curve,
    TrainingAnalysis,
    curve_of,
    envelope,
    over_seeds,
    smoothed,
    t_quantile,
    thinned,
)


def run_of(values: list[float | None], first: int = 1) -> TrainingRun:
    return TrainingRun(
        "x", "x", 0, [{"step": first + i, "reward": value} for i, value in enumerate(values)]
    )


def plain(value_N: np.ndarray) -> Curve:
    nothing = np.full(len(value_N), np.nan)
    return Curve(np.arange(len(value_N)), value_N, nothing, nothing)


def test_one_seed_has_no_band() -> None:
    curve = curve_of([run_of([0.1, None, 0.3])], "reward")
    np.testing.assert_array_equal(curve.value_N, [0.1, np.nan, 0.3])
    assert np.isnan(curve.low_N).all() and np.isnan(curve.high_N).all()
    assert curve_of([run_of([0.1, None, 0.3])], "reward", gaps=False).step_N.tolist() == [1, 3]


def test_the_band_goes_from_the_lowest_to_the_highest_seed() -> None:
    two = curve_of([run_of([1.0, 2.0, 5.0]), run_of([3.0, 4.0])], "reward")
    np.testing.assert_array_equal(two.value_N, [2, 3, 5])
    np.testing.assert_array_equal(two.low_N, [1, 2, np.nan])
    np.testing.assert_array_equal(two.high_N, [3, 4, np.nan])
    three = curve_of([run_of([1.0]), run_of([2.0]), run_of([6.0])], "reward")
    assert (three.low_N[0], three.value_N[0], three.high_N[0]) == (1, 3, 6)


def test_an_interval_over_seeds_is_student_s() -> None:
    found = over_seeds([1.0, 2.0, None, 6.0])
    half = 4.3027 * np.std([1, 2, 6], ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(
        [found.value, found.low, found.high], [3, 3 - half, 3 + half], rtol=1e-3
    )
    assert over_seeds([0.5]) == Estimate(0.5, note=ONE_SEED) and over_seeds([None]) == Estimate(
        None, note=ONE_SEED
    )


def test_an_algorithm_is_above_another_if_their_intervals_separate() -> None:
    ends = {
        "good": (0.90, 0.92, 0.91),
        "near": (0.90, 0.86, 0.91),
        "bad": (0.2, 0.22, 0.21),
        "alone": (0.1,),
    }
    runs = [
        TrainingRun(f"{name}-{seed}", name, seed, [{"step": 1, "reward": end}])
        for name, values in ends.items()
        for seed, end in enumerate(values)
    ]
    study = TrainingAnalysis(runs)
    assert {name: study.above(name) for name in ends} == {
        "good": ["bad"],
        "near": ["bad"],
        "bad": [],
        "alone": [],
    }
    first, *_, last = study.to_json()["algorithms"]
    assert (first["algorithm"], first["seeds"], first["above"]) == ("good", 3, ["bad"])
    assert last["final_reward"] == {"value": 0.1, "low": None, "high": None, "note": ONE_SEED}


def test_steps_are_matched_by_number() -> None:
    curve = curve_of([run_of([1.0, 2.0]), run_of([4.0, 8.0], first=2)], "reward")
    assert curve.step_N.tolist() == [1, 2, 3]
    assert curve.value_N.tolist() == [1, 3, 8]


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.706), (2, 4.303), (8, 2.306), (9, 2.262), (30, 2.042)]
)
def test_quantiles_of_student(degrees: int, t: float) -> None:
    assert t_quantile(degrees) == pytest.approx(t, rel=2e-3)


def test_smoothing_keeps_constants_and_gaps_and_narrows_noise() -> None:
    constant = np.full(300, 0.7)
    constant[100:110] = np.nan
    smooth = smoothed(plain(constant)).value_N
    np.testing.assert_allclose(smooth, constant[3:-3])  # σ is 3 points
    noise = np.random.default_rng(0).normal(size=2000)
    assert smoothed(plain(noise)).value_N.std() == pytest.approx(
        (2 * np.sqrt(np.pi) * 20) ** -0.5, rel=0.25
    )


def test_the_gaussian_has_the_stated_width() -> None:
    impulse = np.zeros(1001)
    impulse[500] = 1
    smooth = smoothed(plain(impulse))
    weight_N, place_N = smooth.value_N, smooth.step_N - 500
    assert np.sqrt((weight_N * place_N**2).sum() / weight_N.sum()) == pytest.approx(10.01, rel=0.01)


def test_long_curves_become_small_pictures_without_losing_extremes() -> None:
    value_N = np.random.default_rng(0).normal(size=3500)
    steps, values = envelope(plain(value_N), 160)
    assert len(steps) == 320
    assert (values.min(), values.max()) == (value_N.min(), value_N.max())
    assert (np.diff(steps) >= 0).all()
    thin = thinned(plain(value_N), 250)
    assert len(thin.step_N) <= 250
    assert thin.step_N[-1] == 3499


def test_only_long_curves_are_smoothed() -> None:
    assert [plain(np.ones(count)).is_long for count in (1, 100, 101)] == [False, False, True]
    assert not plain(np.full(500, np.nan)).is_long
    # Together with other curves of the same run
    assert plain(np.where(np.arange(101) % 2, 1.0, np.nan)).is_long
