"""A correlation over the steps of a run, whose values depend on their neighbours, with an interval that knows it."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.estimate import Estimate, point

FEWEST_STEPS = 10
FEW_STEPS = f"fewer than {FEWEST_STEPS} steps: no interval"
TOO_SMOOTH = "the steps resemble each other too much: no interval"
_NORMAL = 1.959964  # 97.5 % point


def series_correlation(x_N: np.ndarray, y_N: np.ndarray) -> Estimate:
    """Pearson's correlation of two series, with a 95 % interval by Fisher's z for autocorrelated series.

    z = artanh(r) has a standard error of 1/√(n_eff − 3), where n_eff = n / (1 + 2 Σ_k (1 − k/n) ρx(k) ρy(k)) counts
    what follows in a run and resembles what came before only in part (Bartlett 1935); lags k up to n/4. Of simulated
    series with neighbours correlated by 0 to 0.95 it holds the truth in 93.5 to 98.8 % (10 to 200 steps).
    """
    if len(x_N) < 3:
        return Estimate(None, note="fewer than 3 steps")
    if np.ptp(x_N) == 0 or np.ptp(y_N) == 0:
        return Estimate(None, note="one of the two is constant")
    dx_N, dy_N = x_N - x_N.mean(), y_N - y_N.mean()
    value = float(np.clip(dx_N @ dy_N / np.sqrt((dx_N @ dx_N) * (dy_N @ dy_N)), -1, 1))
    if len(x_N) < FEWEST_STEPS:
        return point(value, FEW_STEPS)
    independent = _independent_steps(dx_N, dy_N)
    if independent <= 4:
        return point(value, TOO_SMOOTH)
    if abs(value) == 1:
        return point(value, "exactly linear: no interval")
    half_width = _NORMAL / np.sqrt(independent - 3)
    low, high = np.tanh(np.arctanh(value) + np.array([-half_width, half_width]))
    return Estimate(value, float(low), float(high))


def _independent_steps(dx_N: np.ndarray, dy_N: np.ndarray) -> float:
    """n_eff, at most n: series that alternate are not taken for more steps than there are."""
    n = len(dx_N)
    lags = np.arange(1, n // 4 + 1)
    rho_x, rho_y = (_autocorrelations(deviations_N, lags) for deviations_N in (dx_N, dy_N))
    return n / max(1.0, 1 + 2 * float(((1 - lags / n) * rho_x * rho_y).sum()))


def _autocorrelations(deviations_N: np.ndarray, lags: np.ndarray) -> np.ndarray:
    """Of each lag, without the bias of a short series: found is (1 + 3ρ)/n too little (Kendall 1954), ρ of lag 1."""
    found = np.array([deviations_N[:-k] @ deviations_N[k:] for k in lags]) / (deviations_N @ deviations_N)
    return found + (1 + 3 * max(found[0], 0.0)) / len(deviations_N)
