"""A correlation over the steps of a run: its value, and an interval that accounts for
autocorrelation.
"""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.correlation import FEWEST_STEPS, _independent_steps, series_correlation


def width(x: np.ndarray, y: np.ndarray) -> float:
    estimate = series_correlation(x, y)
    assert estimate.low is not None and estimate.high is not None
    return estimate.high - estimate.low


def autoregressive(rng: np.random.Generator, steps: int, phi: float) -> np.ndarray:
    noise, series = rng.normal(size=steps), np.zeros(steps)
    for t in range(1, steps):
        series[t] = phi * series[t - 1] + noise[t]
    return series


@pytest.mark.parametrize(
    ("y", "expected"), [(lambda x: 3 * x + 1, 1.0), (lambda x: -0.1 * x, -1.0)]
)
def test_a_line_has_correlation_one(y, expected):
    x = np.random.default_rng(0).normal(size=40)
    assert series_correlation(x, y(x)).value == pytest.approx(expected)


@pytest.mark.parametrize("true", [0.0, 0.5])
@pytest.mark.parametrize(
    ("steps", "phi"), [(10, 0.0), (20, 0.9), (30, 0.8), (50, 0.9), (100, 0.8), (300, 0.95)]
)
def test_95_percent_intervals_cover_the_truth(steps, phi, true):
    """Two independently drifting curves look alike by accident, and the interval must allow for
    it.
    """
    rng, covered, printed = np.random.default_rng(7), 0, 0
    for _ in range(600):
        x, noise = (autoregressive(rng, steps, phi) for _ in range(2))
        estimate = series_correlation(x, true * x + np.sqrt(1 - true**2) * noise)
        if estimate.low is not None and estimate.high is not None:
            printed += 1
            covered += estimate.low <= true <= estimate.high
    assert printed > 500
    assert covered / printed > 0.93


def test_by_hand():
    """x = 1, 2, 3, 4 and y = 1, 3, 2, 4: cov 1, both variances 5/4."""
    assert series_correlation(
        np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 4])
    ).value == pytest.approx(0.8)


@pytest.mark.parametrize("factor", [3, -0.7])
@pytest.mark.parametrize("seed", range(20))
def test_rounding_takes_no_line_beyond_one(seed, factor):
    """For a third of these the quotient is 1 + 2⁻⁵² or more, whose artanh is not a number."""
    x = np.random.default_rng(seed).normal(size=20)
    estimate = series_correlation(x, factor * x)
    assert abs(estimate.value) <= 1
    assert estimate.low is None or -1 <= estimate.low <= estimate.high <= 1


@pytest.mark.parametrize(
    ("seed", "effective", "has_interval"), [(50, 3.9, False), (20, 4.06, True), (27, 4.76, True)]
)
def test_more_than_four_independent_steps_have_an_interval(seed, effective, has_interval):
    rng = np.random.default_rng(seed)
    x, y = (autoregressive(rng, 20, 0.95) for _ in range(2))
    assert _independent_steps(x - x.mean(), y - y.mean()) == pytest.approx(effective, abs=0.005)
    assert (series_correlation(x, y).low is not None) == has_interval


def test_three_steps_have_a_value():
    """x = 0, 1, 2 and y = 0, 1, 5: cov 5, variances 2 and 14."""
    estimate = series_correlation(np.array([0.0, 1, 2]), np.array([0.0, 1, 5]))
    assert estimate.value == pytest.approx(5 / np.sqrt(28))


def by_hand(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """tanh(artanh r ± 1.96/√(n_eff − 3)), with Bartlett's n_eff up to lag n/4 and without
    Kendall's bias.
    """
    n, effective = len(x), 1.0

    def rho(s: np.ndarray, k: int) -> float:
        return (
            sum((s[t] - s.mean()) * (s[t + k] - s.mean()) for t in range(n - k))
            / ((s - s.mean()) ** 2).sum()
        )

    bias_x, bias_y = ((1 + 3 * max(rho(s, 1), 0)) / n for s in (x, y))
    for k in range(1, n // 4 + 1):
        effective += 2 * (1 - k / n) * (rho(x, k) + bias_x) * (rho(y, k) + bias_y)
    half = 1.959964 / np.sqrt(n / max(effective, 1) - 3)
    z = np.arctanh(np.corrcoef(x, y)[0, 1])
    return np.tanh(z - half), np.tanh(z + half)


@pytest.mark.parametrize(("steps", "phi"), [(10, 0.0), (37, 0.6), (80, 0.9), (60, -0.7)])
def test_the_interval_by_hand(steps, phi):
    rng = np.random.default_rng(8)
    x, y = (autoregressive(rng, steps, phi) for _ in range(2))
    estimate = series_correlation(x, y)
    assert (estimate.low, estimate.high) == pytest.approx(by_hand(x, y), rel=1e-9)


def test_alternating_series_do_not_count_as_more_steps():
    """One series alternates, the other drifts: ρx·ρy < 0 at odd lags would count more than n
    steps.
    """
    rng = np.random.default_rng(9)
    x, y = autoregressive(rng, 80, -0.9), autoregressive(rng, 80, 0.9)
    estimate = series_correlation(x, y)
    half = (np.arctanh(estimate.high) - np.arctanh(estimate.low)) / 2
    assert half == pytest.approx(1.959964 / np.sqrt(80 - 3))


def test_no_interval_if_steps_are_too_similar_or_exactly_linear():
    up_and_down = np.tile([1.0, -1.0], 20)  # two different steps, twenty times over
    same = up_and_down, up_and_down * np.linspace(1, 1.2, 40)
    line = np.random.default_rng(10).normal(size=20)
    for (x, y), why in ((same, "resemble"), ((line, 2 * line), "linear")):
        estimate = series_correlation(x, y)
        assert estimate.value is not None and estimate.low is estimate.high is None
        assert why in estimate.note and "no interval" in estimate.note


@pytest.mark.parametrize("rho", [-0.8, 0.0, 0.5])
def test_a_known_correlation_is_within_the_interval(rho):
    rng = np.random.default_rng(1)
    x, noise = rng.normal(size=2000), rng.normal(size=2000)
    estimate = series_correlation(x, rho * x + np.sqrt(1 - rho**2) * noise)
    assert estimate.value == pytest.approx(rho, abs=0.05)
    assert estimate.low < rho < estimate.high and estimate.high - estimate.low < 0.12


def test_symmetric_and_free_of_scale():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 50))
    plain, swapped, scaled = (
        series_correlation(*pair) for pair in ((x, y), (y, x), (1e6 * x - 5, 1e-6 * y + 7))
    )
    for other in (swapped, scaled):
        assert (other.value, other.low, other.high) == tuple(
            pytest.approx(v, abs=1e-9) for v in (plain.value, plain.low, plain.high)
        )


def test_a_constant_series_has_no_correlation():
    for pair in ((np.ones(30), np.arange(30.0)), (np.arange(30.0), np.zeros(30))):
        estimate = series_correlation(*pair)
        assert (estimate.value, estimate.low, estimate.high) == (None, None, None)
        assert "constant" in estimate.note


@pytest.mark.parametrize("constant", [0.1, 0.7])
@pytest.mark.parametrize("steps", [23, 100])
def test_a_constant_whose_mean_rounds_has_no_correlation_either(constant, steps):
    """0.1 added up 23 times and divided by 23 is not 0.1: only rounding is left, not a series."""
    estimate = series_correlation(np.full(steps, constant), np.arange(float(steps)))
    assert estimate.value is None


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_few_steps_for_a_value(steps):
    estimate = series_correlation(np.arange(float(steps)), np.arange(float(steps)))
    assert estimate.value is None and "3 steps" in estimate.note


def test_few_steps_have_a_value_without_an_interval():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, FEWEST_STEPS))
    few = series_correlation(x[:-1], y[:-1])
    assert few.value is not None and few.low is None and few.high is None and few.note
    enough = series_correlation(x, y)
    assert enough.low < enough.value < enough.high and enough.note is None


def test_autocorrelated_steps_count_less():
    """Drifting series correlate by accident."""
    rng = np.random.default_rng(4)
    independent = np.mean([width(*rng.normal(size=(2, 200))) for _ in range(15)])
    dependent = np.mean(
        [width(*(autoregressive(rng, 200, 0.9) for _ in range(2))) for _ in range(15)]
    )
    assert dependent > 1.3 * independent


def test_more_steps_narrow_the_interval():
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(2, 1600))
    assert width(x, y) < 0.6 * width(x[:400], y[:400]) < 0.6 * width(x[:100], y[:100])


def test_the_same_series_gives_the_same_interval():
    x, y = np.random.default_rng(6).normal(size=(2, 37))
    assert series_correlation(x, y) == series_correlation(x.copy(), y.copy())
