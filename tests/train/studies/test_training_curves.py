"""Means, bands and smoothing checked against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.seeds import NO_SPREAD, ONE_SEED, difference, over_seeds, t_quantile
from mismatch_cli.train.studies.training import (
    Curve,
    TrainingAnalysis,
    curve_of,
    envelope,
    smoothed,
    thinned,
)
from tests.train.training_runs import ending, run_of


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
    estimate = over_seeds([1.0, 2.0, None, 6.0])
    half = 4.3027 * np.std([1, 2, 6], ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(
        [estimate.value, estimate.low, estimate.high], [3, 3 - half, 3 + half], rtol=1e-3
    )
    assert over_seeds([0.5]) == Estimate(0.5, note=ONE_SEED) and over_seeds([None]) == Estimate(
        None, note=ONE_SEED
    )


def test_an_algorithm_is_above_another_if_the_interval_of_their_difference_is() -> None:
    ends = {
        "good": (0.90, 0.92, 0.91),
        "near": (0.90, 0.86, 0.91),
        "bad": (0.2, 0.22, 0.23),
        "alone": (0.1,),
    }
    study = TrainingAnalysis(ending(ends, steps=1))
    assert {name: study.above(name) for name in ends} == {
        "good": ["bad"],
        "near": ["bad"],
        "bad": [],
        "alone": [],
    }
    first, *_, last = study.to_json()["algorithms"]
    assert (first["algorithm"], first["seeds"], first["above"]) == ("good", 3, ["bad"])
    assert last["final_reward"] == {"value": 0.1, "low": None, "high": None, "note": ONE_SEED}
    near, bad, alone = first["higher_than"]
    assert (near["algorithm"], near["paired_seeds"]) == ("near", 3) and near["by"]["low"] < 0
    assert bad["by"]["low"] > 0.6
    assert (alone["paired_seeds"], alone["by"]["note"]) == (1, ONE_SEED)


def test_a_single_seed_is_compared_with_its_partner() -> None:
    """The rival's other seeds would add their luck; without a partner the means are compared."""
    rivals = [(21, 0.5), (22, 0.3)]
    assert difference([(21, 0.75)], rivals) == (Estimate(0.25, note=ONE_SEED), 1)
    assert difference([(9, 0.75)], rivals) == (Estimate(0.35, note=ONE_SEED), 0)


def test_seeds_that_both_have_are_paired() -> None:
    """Against the formula of a paired t interval; the unpaired one would contain 0."""
    own, other = [(1, 0.2), (2, 0.5), (3, 0.9)], [(3, 0.81), (1, 0.1), (2, 0.44), (7, 0.0)]
    paired = difference(own, other)
    d_N = np.array([0.1, 0.06, 0.09])
    half = 4.3027 * d_N.std(ddof=1) / np.sqrt(3)
    assert paired.pairs == 3 and paired.is_above
    np.testing.assert_allclose(
        [paired.estimate.value, paired.estimate.low, paired.estimate.high],
        [d_N.mean(), d_N.mean() - half, d_N.mean() + half],
        rtol=1e-3,
    )
    assert difference(other, own).estimate.high == -paired.estimate.low
    anonymous = difference([(None, value) for _, value in own], other)
    assert anonymous.pairs == 0 and not anonymous.is_above
    # Two runs of one seed are one value
    twice = difference([*own, (1, 0.2)], other)
    assert twice == paired


def test_other_seeds_are_compared_by_welch() -> None:
    own, other = [0.9, 0.8, 0.85], [0.5, 0.1, 0.4, 0.3]
    estimate = difference(list(enumerate(own)), [(10 + n, value) for n, value in enumerate(other)])
    variance = np.var(own, ddof=1) / 3, np.var(other, ddof=1) / 4
    degrees = sum(variance) ** 2 / (variance[0] ** 2 / 2 + variance[1] ** 2 / 3)
    assert 3 < degrees < 4
    half = 3.182 * np.sqrt(sum(variance))
    np.testing.assert_allclose(
        [estimate.estimate.value, estimate.estimate.high - estimate.estimate.low],
        [np.mean(own) - np.mean(other), 2 * half],
        rtol=1e-3,
    )
    assert estimate.pairs == 0 and estimate.is_above


def test_equal_values_have_no_interval() -> None:
    assert over_seeds([0.1 + 0.2, 0.3, 0.3]).note == NO_SPREAD
    equal = difference([(0, 0.5), (1, 0.7)], [(0, 0.4), (1, 0.6)])
    assert equal.estimate.note == NO_SPREAD and not equal.is_above
    # Neither is rounding of 1e-17
    rounded = difference([(0, 0.1 + 0.2), (1, 0.7 + 2e-16)], [(0, 0.3), (1, 0.7)])
    assert rounded.estimate.low is None


# Rewards of three seeds of two methods whose runs have different lengths
_SLOW = {1: [0.12, 0.18, 0.34, 0.57, 0.73, 0.83, 0.91, 0.93, 0.94, 0.95, 0.95, 0.95],
         2: [0.15, 0.21, 0.34, 0.43, 0.56, 0.80, 0.83],
         3: [0.16, 0.20, 0.32, 0.42, 0.57, 0.76, 0.84]}  # fmt: skip
_FAST = {1: [0.12, 0.20, 0.48, 0.75, 0.92, 0.96, 0.96, 0.97, 0.97, 0.97, 0.97],
         2: [0.15, 0.23, 0.51, 0.81, 0.91, 0.97, 0.96],
         3: [0.16, 0.22, 0.52, 0.82, 0.90, 0.96, 0.99]}  # fmt: skip


def two_methods() -> TrainingAnalysis:
    runs = []
    for name, rewards in (("fast", _FAST), ("slow", _SLOW)):
        for seed, reward_N in rewards.items():
            records = [
                {"step": n, "reward": reward, "blocked": n / 100, "eval_accuracy": n / 10}
                for n, reward in enumerate(reward_N, start=1)
            ]
            records[4]["eval_accuracy"] = None if seed == 2 else 0.5
            runs.append(TrainingRun(f"{name}-{seed}", name, seed, records))
    return TrainingAnalysis(runs)


def test_runs_are_compared_over_the_steps_that_all_share() -> None:
    study = two_methods()
    means = {name: [run.last("reward") for run in runs] for name, runs in study.compared.items()}
    by_hand = [np.mean(_FAST[seed][:7]) - np.mean(_SLOW[seed][:7]) for seed in (1, 2, 3)]
    np.testing.assert_allclose(np.subtract(means["fast"], means["slow"]), by_hand)
    apart = study.difference("fast", "slow")
    half = 4.3027 * np.std(by_hand, ddof=1) / np.sqrt(3)
    assert apart.estimate.low == pytest.approx(np.mean(by_hand) - half, rel=1e-3)
    assert apart.pairs == 3 and study.above("fast") == ["slow"]
    assert (study.window, study.is_final) == ("steps 1 to 7", False)
    # Every mean is over the same steps, and accuracy is of an evaluation that all have
    assert [run.mean("blocked") for run in study.restricted] == pytest.approx([0.04] * 6)
    assert {run.final_accuracy for run in study.restricted} == {0.7}
    (window,) = study.to_json()["compared_over"]
    assert window.pop("runs") == [run.name for run in study.runs]
    assert window == {
        "steps": 7, "first_step": 1, "last_step": 7, "reward_from": 1, "partial": True,
    }  # fmt: skip
    # The runs themselves stay whole
    assert [run.steps for run in study.runs] == [11, 7, 7, 12, 7, 7]


def test_missing_steps_and_rewards_are_left_out_of_all_runs() -> None:
    long = run_of([0.1 * n for n in range(1, 16)])
    gaps = run_of([None if n == 2 else 0.5 for n in range(1, 16)])
    lost = TrainingRun("y", "y", 0, [r for r in gaps.records if r["step"] not in (5, 15)])
    study = TrainingAnalysis([long, lost])
    (steps,) = study.common
    assert steps.step_N.tolist() == [1, 3, 4, *range(6, 15)] and study.window == "steps 4 to 14"
    assert study.restricted[0].last("reward") == pytest.approx(np.mean(steps.step_N[-10:]) / 10)
    apart = TrainingAnalysis([run_of([0.5, 0.6]), run_of([0.5], first=7)])
    assert apart.final_rewards == {} and len(apart.common[0].step_N) == 0
    twice = TrainingRun("z", "z", 0, [*long.records, long.records[-1]])
    assert TrainingAnalysis([twice]).common[0].is_whole
    whole = TrainingAnalysis([long, run_of([0.5] * 15)])
    assert (whole.window, whole.is_final) == ("last 10 steps", True)


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


def test_curves_of_steps_begin_after_the_evaluation_before_training() -> None:
    """And have a number above 0 somewhere after it."""
    runs = [run_of([0.5, 0.1, 0.3], "a", first=0), run_of([0.9, 0.0, 0.0], "b", first=0)]
    curves = TrainingAnalysis(runs).curves_of_steps("reward")
    assert list(curves) == ["a"] and curves["a"].step_N.tolist() == [1, 2]
    assert curves["a"].value_N.tolist() == [0.1, 0.3]
