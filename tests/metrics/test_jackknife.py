"""The one interval over prompts: checked by hand, when it is missing, and its coverage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.base.hashing import prompt_groups
from mismatch_cli.metrics.estimate import (
    ABOVE_1,
    ABOVE_MINUS_1,
    CANCELLING,
    CORRELATION,
    FEW_DECIDE,
    FEW_PROMPTS,
    NO_SPREAD,
    ONE_HAS_ALL,
    OVERFLOW,
    POSITIVE,
    SHARE,
    SIGNED,
    grouped_ratio,
    grouped_share,
    interval,
    student_t,
)
from mismatch_cli.metrics.gap_table import SCALES
from mismatch_cli.metrics.sums import COLUMNS, INDEX, GroupSums, evaluate

INF, NAN = float("inf"), float("nan")


def _without(x_G: np.ndarray) -> np.ndarray:
    return (x_G.sum() - x_G) / (len(x_G) - 1)


def test_without_skewness_the_interval_of_a_mean_is_student_s():
    """But for the factor of 32 / 31 that few groups need."""
    half = np.random.default_rng(0).normal(size=16)
    x = np.concatenate([half, -half]) + 5
    estimate = interval(x.mean(), _without(x), prompts=32)
    degrees = min(2 / ((half**4).sum() * 2 / (2 * half @ half) ** 2 - 1 / 32), 31)
    assert 2.0 < 1.96 * (1 + 1.2 / degrees) < 2.2
    assert estimate.high - 5 == pytest.approx(5 - estimate.low)
    assert (estimate.high - 5) / (x.std(ddof=1) / np.sqrt(32)) == pytest.approx(
        1.96 * (1 + 1.21 / degrees) * 32 / 31, rel=0.01
    )


def test_a_few_large_values_extend_it_upwards():
    x = np.random.default_rng(1).lognormal(0, 1, 64)
    plain, logarithmic = (
        interval(x.mean(), _without(x), 64, scale) for scale in (SIGNED, POSITIVE)
    )
    for estimate in (plain, logarithmic):
        assert estimate.high - x.mean() > 1.2 * (x.mean() - estimate.low)
    assert logarithmic.low > 0


@pytest.mark.parametrize("scale", [SIGNED, POSITIVE, CANCELLING])
def test_the_interval_moves_with_its_value(scale):
    x = np.random.default_rng(2).gamma(2, size=40)
    one, ten = (interval(factor * x.mean(), factor * _without(x), 40, scale) for factor in (1, 10))
    assert (10 * one.low, 10 * one.high) == (pytest.approx(ten.low), pytest.approx(ten.high))


@pytest.mark.parametrize(
    ("scale", "x"),
    [(SIGNED, -2), (POSITIVE, 3), (ABOVE_1, 1.5), (CANCELLING, -0.5), (SHARE, 0.2),
     (CORRELATION, 0.6)],
    ids=["signed", "positive", "above 1", "cancelling", "share", "correlation"],
)  # fmt: skip
def test_a_scale_has_the_slope_and_the_inverse_of_its_transformation(scale, x):
    beside = x + np.array([-1e-5, 1e-5])
    assert scale.slope(x) == pytest.approx(np.ptp(scale.to(beside)) / np.ptp(beside), rel=1e-6)
    assert scale.back(scale.to(beside)) == pytest.approx(beside, rel=1e-12)


@pytest.mark.parametrize("scale", [SIGNED, CANCELLING])
@pytest.mark.parametrize("power", [-400, 600, 1000])
def test_values_of_any_size_have_the_same_interval(power, scale):
    """A broken recording has ratios of e^200 and more; scaling by 2^200 is exact, so the bits
    are the same.
    """
    x = np.random.default_rng(4).gamma(2, size=40)
    plain, far = (
        interval(factor * x.mean(), factor * _without(x), 40, scale) for factor in (1.0, 2.0**power)
    )
    assert (plain.low * 2.0**power, plain.high * 2.0**power) == (far.low, far.high)


@pytest.mark.parametrize("centre", [0.0, 1.0, 100.0])
def test_a_mean_of_gaps_that_cancel_has_the_interval_of_both_scales(centre):
    """Far from 0 asinh(x) is ln 2x. Near it the ends of both are the same but for a fifth."""
    x = np.random.default_rng(5).normal(size=40)
    x += centre - x.mean()
    of_both = interval(x.mean(), _without(x), 40, CANCELLING)
    plain = interval(x.mean(), _without(x), 40, SIGNED)
    assert of_both.low <= plain.low and of_both.high >= plain.high
    if centre > 10:
        as_log = interval(x.mean(), _without(x), 40, replace(POSITIVE, skewness=0.5))
        assert of_both.high == pytest.approx(as_log.high, rel=1e-4) and of_both.low == plain.low
    if not centre:
        assert of_both.high / plain.high == pytest.approx(1.2, abs=0.05)
    negative = interval(-x.mean(), _without(-x), 40, CANCELLING)
    assert (-negative.high, -negative.low) == pytest.approx((of_both.low, of_both.high))


def test_chi_squared_is_nowhere_below_minus_1():
    x = np.append(np.zeros(39), 200.0)
    assert interval(x.mean(), _without(x), 40, CANCELLING).low < -1
    assert interval(x.mean(), _without(x), 40, ABOVE_MINUS_1).low == -1


def test_the_interval_of_an_effective_sample_size_follows_from_chi_squared():
    chi2_G = np.random.default_rng(3).lognormal(-5, 0.3, 40)
    chi2 = interval(chi2_G.mean(), _without(chi2_G), 40, POSITIVE)
    size = interval(1 / (1 + chi2_G.mean()), 1 / (1 + _without(chi2_G)), 40, SCALES["ess_token"])
    assert (1 / (1 + chi2.high), 1 / (1 + chi2.low)) == pytest.approx(
        (size.low, size.high), rel=1e-12
    )


def test_too_few_prompts_or_groups_of_them():
    x = np.linspace(0.9, 1.1, 32)
    assert interval(1.0, x, prompts=9).note == FEW_PROMPTS
    assert interval(1.0, x[:7], prompts=64).note == FEW_PROMPTS
    assert interval(1.0, np.where(np.arange(32) < 7, x, NAN), prompts=64).note == FEW_PROMPTS
    assert interval(1.0, x[:10], prompts=10).low is not None


def test_a_value_that_few_groups_decide_says_so_beside_its_interval():
    """Blocked tokens in one group of prompts: without it nothing is left, so that the interval
    extends by a factor, e^(t(4) · 40/39 / (1 − share)), to both sides of the odds.
    """
    whole, part = np.full(40, 100.0), np.zeros(40)
    part[3] = 7
    estimate = grouped_share(part, whole, 40)
    assert estimate.note == FEW_DECIDE
    share = part.sum() / whole.sum()
    odds = share / (1 - share)
    reach = math.exp(student_t(4) * (40 / 39) / (1 - share))
    low, high = (factor * odds / (1 + factor * odds) for factor in (1 / reach, reach))
    assert (estimate.low, estimate.high) == (
        pytest.approx(low),
        pytest.approx(high),
    )
    mean_of_two = np.full(40, 1.0)
    mean_of_two[:2] = 0.5, 1.5
    estimate = interval(1.0, mean_of_two, 40)
    assert estimate.note == FEW_DECIDE
    assert estimate.low < 1.0 < estimate.high
    assert interval(1.0, np.linspace(0.9, 1.1, 40), 40).note is None


def test_a_value_that_is_not_defined_without_a_group_has_no_interval():
    part = np.zeros(40)
    part[3] = 7
    assert grouped_ratio(part, part, 40).note == FEW_PROMPTS  # no other group has any
    assert interval(1.0, np.where(np.arange(40) == 3, INF, 1.0), 40).note == ONE_HAS_ALL
    beyond = interval(1e300, np.where(np.arange(40) == 3, 1.0, 1e300), 40, POSITIVE)
    assert (beyond.low, beyond.note) == (None, OVERFLOW)


def test_no_spread_is_not_certainty():
    assert grouped_share(np.zeros(40), np.full(40, 10.0), 40).note == NO_SPREAD
    assert interval(2.0, np.full(20, 2.0), 20).note == NO_SPREAD


def test_a_share_stays_between_its_ends():
    rng = np.random.default_rng(3)
    part = rng.binomial(3, 0.05, 40).astype(float)
    estimate = grouped_share(part, np.full(40, 3.0), 40)
    assert 0 < estimate.low < estimate.value < estimate.high < 1
    other = grouped_share(3 - part, np.full(40, 3.0), 40)
    assert (1 - other.high, 1 - other.low) == (
        pytest.approx(estimate.low),
        pytest.approx(estimate.high),
    )


def test_a_lost_share_may_be_negative():
    estimate = interval(-0.1, np.random.default_rng(4).normal(-0.1, 0.01, 40), 40, SHARE)
    assert estimate.low < -0.1 < estimate.high


def _simulated(rng: np.random.Generator, prompts: int, samples: int) -> np.ndarray:
    """Sums over responses of 40 t-distributed tokens, with a scale that mostly depends on the
    prompt.
    """
    scale_P = 0.06 * np.exp(0.5 * rng.normal(size=prompts))
    d_ST = np.repeat(scale_P, samples)[:, None] * rng.standard_t(5, size=(prompts * samples, 40))
    sums_SM = np.zeros((len(d_ST), len(COLUMNS)))
    ratio_ST = np.exp(d_ST)
    columns = {
        "n": np.ones_like(d_ST), "supported": np.ones_like(d_ST), "d": d_ST, "abs_d": np.abs(d_ST),
        "d_d": d_ST**2,
        "k3": ratio_ST - 1 - d_ST, "outside_narrow": (ratio_ST < 0.8) | (ratio_ST > 1.25),
    }  # fmt: skip
    for name, values_ST in columns.items():
        sums_SM[:, INDEX[name]] = values_ST.sum(axis=1)
    return sums_SM


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "samples"), [(40, 4), (64, 8)])
def test_95_percent_intervals_cover_the_truth_for_clustered_prompts(prompts, samples):
    """400 traces with a strong prompt effect and heavy tails."""
    rng, keys = (
        np.random.default_rng(5),
        ("abs_d_mean", "d_mean", "d_sd", "k2", "k3", "ratio_outside_0.8_1.25"),
    )
    truth = evaluate(_simulated(rng, 40_000, 1).sum(axis=0))
    printed, covering, short, long_ = (dict.fromkeys(keys, 0) for _ in range(4))
    for trial in range(400):
        sums = GroupSums(len(COLUMNS))
        sums.update(
            np.repeat(prompt_groups(np.arange(prompts) + 1000 * trial), samples),
            _simulated(rng, prompts, samples),
        )
        for key, estimate in sums.result(evaluate, prompts, SCALES).items():
            if key in keys and estimate.low is not None:
                printed[key] += 1
                short[key] += estimate.high < truth[key]
                long_[key] += estimate.low > truth[key]
                covering[key] += estimate.low <= truth[key] <= estimate.high
    for key in keys:
        assert printed[key] >= 380, (key, printed[key])
        assert 0.925 <= covering[key] / printed[key] <= 0.98, (key, covering[key])
        assert max(short[key], long_[key]) <= 26, (key, short[key], long_[key])
