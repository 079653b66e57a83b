"""The line through the gaps of steps, on a few numbers computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import growth_over_steps
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from tests.diagnosis.samples import SampleColumns

Trend = growth_over_steps._Trend


def means_of(values: list[float], errors: list[float]) -> list[Mean]:
    return [Mean(value, error, 100, 32) for value, error in zip(values, errors, strict=True)]


def test_a_trend_is_the_weighted_line_through_the_steps():
    """Steps 2, 3, 5 and 9; the third is of too few prompts, whose error is that of the largest."""
    steps = np.array([2, 3, 5, 9])
    value_K, error_K = np.array([1.0, 1.6, 1.2, 2.6]), np.array([0.1, 0.2, 2.6, 0.3])
    means = means_of(value_K.tolist(), [0.1, 0.2, np.inf, 0.3])
    weight_K = 1 / (error_K**2 + (0.1 * value_K.mean()) ** 2)
    assert growth_over_steps._weights(value_K, np.array([0.1, 0.2, np.inf, 0.3])) == pytest.approx(
        weight_K
    )
    x_K = steps / 7
    (slope, start), covariance = np.polyfit(x_K, value_K, 1, w=np.sqrt(weight_K), cov="unscaled")
    left_K = value_K - start - slope * x_K
    scatter = max(1.0, (weight_K * left_K**2).sum() / 2)
    trend = Trend.through(steps, means)
    center = np.average(x_K, weights=weight_K)
    assert trend.slope == pytest.approx(slope)
    assert trend.middle == pytest.approx(start + slope * center)
    assert trend.error == pytest.approx(np.sqrt(covariance[0, 0] * scatter))
    assert (trend.first, trend.last) == pytest.approx((2 / 7 - center, 9 / 7 - center))
    assert trend.t == pytest.approx(slope / trend.error)
    assert trend.factor(trend.slope) == pytest.approx(
        (start + slope * 9 / 7) / (start + slope * 2 / 7)
    )


def test_steps_that_scatter_by_more_than_their_errors_have_a_less_certain_trend():
    steps, values = np.arange(5), [1.0, 3.0, 1.5, 3.5, 2.0]
    trend = Trend.through(steps, means_of(values, [0.01] * 5))
    weight = 1 / (1e-4 + 0.22**2)
    slope, start = np.polyfit(steps / 4, values, 1)
    left_K = np.array(values) - start - slope * steps / 4
    assert (weight * left_K**2).sum() / 3 > 2
    squares = ((steps / 4 - 0.5) ** 2).sum()
    assert trend.error == pytest.approx(np.sqrt((left_K**2).sum() / 3 / squares))
    assert Trend(1.0, 0.5, 0.0, -0.5, 0.5).t == np.inf


def test_the_growth_is_ten_times_at_most():
    """The line may begin below 0."""
    trend = Trend(middle=1.0, slope=3.0, error=1.0, first=-0.5, last=0.5)
    assert trend.factor(3.0) == pytest.approx(10.0)
    assert trend.factor(1.0) == pytest.approx(3.0)
    assert trend.factor(-1.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("error", "power"),
    [
        (0.01, "a growth of 1.5 times from the first step to the last"),
        (0.25, "a growth of 3 times from the first step to the last"),
        (0.4, "a growth of 9 times from the first step to the last"),
        (0.45, "no power: the steps scatter too much to tell growth from chance"),
    ],
)
def test_the_growth_that_would_have_been_found_is_four_standard_errors(error, power):
    trend = Trend(middle=1.0, slope=0.1, error=error, first=-0.5, last=0.5)
    assert growth_over_steps._power(trend) == power


def test_steps_are_scaled_to_the_smallest_gap():
    means = means_of([2.0, 1.0, 4.0, 1.5], [0.1] * 4)
    assert growth_over_steps._growth_K(means) == pytest.approx([2.0, 1.0, 4.0, 1.5])
    assert growth_over_steps._growth_K(means_of([0.0, 0.0], [0.1] * 2)).tolist() == [1.0, 1.0]


def checked(values: list[float], change=None, weights_differ: bool = False):
    """The finding for steps 3, 4, 6, 7, …, in which each of 64 prompts has a response of two
    tokens.
    """
    rng = np.random.default_rng(0)
    steps = np.array([3, 4, 6, 7, 8, 9])[: len(values)]
    step_S = np.repeat(steps, 64)
    u_N = np.repeat(values, 128) * rng.uniform(0.97, 1.03, 128 * len(values))
    response_N = np.repeat(np.arange(len(step_S)), 2)
    sample = SampleColumns(
        step_S=step_S,
        response_T=response_N,
        index_N=np.arange(len(u_N)),
        u_N=u_N,
        d_N=0.1 * u_N,
        group_N=response_N % 64,
    )
    evidence = SimpleNamespace(sample=sample, step_change=change, weights_differ=weights_differ)
    return growth_over_steps.check(evidence), sample


def test_a_gap_that_grows_is_scaled_back_step_by_step():
    values = [1.0, 1.2, 1.6, 1.8, 2.0, 2.2]
    finding, sample = checked(values)
    means = [
        mean_over_prompts(sample.u_N[own], sample.group_N[own])
        for own in (slice(128 * k, 128 * k + 128) for k in range(6))
    ]
    trend = Trend.through(np.array([3, 4, 6, 7, 8, 9]), means)
    assert (finding.check, finding.status) == ("growth-over-steps", "found")
    assert finding.effect == pytest.approx(trend.factor(trend.slope))
    assert finding.effect == pytest.approx(2.2, abs=0.05)
    assert finding.measure == "times from the first step to the last"
    assert finding.evidence == (
        ("first step, typical gaps", means[0].value),
        ("last step, typical gaps", means[-1].value),
        ("t", pytest.approx(trend.t)),
    )
    assert f"by a factor of {finding.effect:.3g} at equal" in finding.sentence
    grown_K = np.array([mean.value for mean in means]) / means[0].value
    assert finding.left_N == pytest.approx(sample.d_N / np.repeat(grown_K, 128))


@pytest.mark.parametrize(
    ("is_found", "weights_differ", "status"),
    [(True, False, "clear"), (False, False, "found"), (True, True, "found")],
)
def test_a_gap_that_changes_at_a_step_does_not_grow(is_found, weights_differ, status):
    """Unless the trainer's weights are newer, where steps say nothing."""
    change = SimpleNamespace(is_found=is_found, where="from step 6 on")
    finding, _ = checked([1.0, 1.2, 1.6, 1.8, 2.0, 2.2], change, weights_differ)
    assert (finding.check, finding.status) == ("growth-over-steps", status)
    if status == "clear":
        assert finding.reason == "it changes from step 6 on" and len(finding.evidence) == 3
        assert finding.effect == pytest.approx(2.2, abs=0.05)


def test_a_gap_that_hardly_grows_or_falls_is_clear():
    for values in ([1.0, 1.1, 1.2, 1.3, 1.35, 1.4], [2.0, 1.8, 1.6, 1.4, 1.2, 1.0]):
        finding, _ = checked(values)
        assert (finding.check, finding.status) == ("growth-over-steps", "clear")
        assert finding.effect == pytest.approx(values[-1] / values[0], rel=0.05)
        assert finding.reason.startswith("would have found a growth of ")


def test_steps_that_scatter_about_a_rise_are_not_growth():
    """A rise of more than half as much again, with a t below 4."""
    finding, _ = checked([1.0, 2.0, 1.0, 2.2, 1.4, 2.4])
    assert finding.check == "growth-over-steps" and finding.status != "found"
