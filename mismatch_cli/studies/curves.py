"""Curves over training steps: the mean of the seeds with a band, smoothed where there are many steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch_cli.metrics.estimate import student_t
from mismatch_cli.studies.runs import TrainingRun

SMOOTHED_FROM = 100  # curves with more points are smoothed
LEAST_SIGMA = 2  # points
_SIGMA = 0.01  # of the number of points
_REACH = 4  # standard deviations
_FEW_DEGREES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)  # 97.5 % points of Student's t


@dataclass(frozen=True)
class Curve:
    """`_N` one point a step; NaN in the value is a gap, in the band a step that only one seed has."""

    step_N: np.ndarray
    value_N: np.ndarray
    low_N: np.ndarray
    high_N: np.ndarray

    @property
    def has_values(self) -> bool:
        return bool(np.isfinite(self.value_N).any())

    @property
    def is_long(self) -> bool:
        """Whether the curve is smoothed."""
        return bool(np.isfinite(self.value_N).sum() > SMOOTHED_FROM)


def curve_of(runs: Sequence[TrainingRun], *keys: str, gaps: bool = True) -> Curve:
    """The mean over the runs that have a value at a step; the band is [min, max] of two, ± t · s.e. of more.

    Without `gaps`, steps at which no run has a value are left out, for what is measured only now and then.
    """
    found = [(run.step_N, run.series(*keys)) for run in runs]
    step_N = np.unique(np.concatenate([step for step, _ in found])) if found else np.zeros(0)
    value_RN = np.full((len(found), len(step_N)), np.nan)
    for row_N, (step, value) in zip(value_RN, found, strict=True):
        row_N[np.searchsorted(step_N, step)] = value
    curve = Curve(step_N, *_mean_and_band(value_RN))
    return curve if gaps else _only(curve, np.isfinite(curve.value_N))


def _mean_and_band(value_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    finite_RN = np.isfinite(value_RN)
    count_N = finite_RN.sum(axis=0)
    some_N, several_N = np.maximum(count_N, 1), count_N > 1
    mean_N = np.where(finite_RN, value_RN, 0).sum(axis=0) / some_N
    spread_N = np.where(finite_RN, (value_RN - mean_N) ** 2, 0).sum(axis=0)
    half_N = _t_N(count_N - 1) * np.sqrt(spread_N / np.maximum(count_N - 1, 1) / some_N)
    low_N = np.where(count_N > 2, mean_N - half_N, np.where(finite_RN, value_RN, np.inf).min(axis=0, initial=np.inf))
    high_N = np.where(count_N > 2, mean_N + half_N, np.where(finite_RN, value_RN, -np.inf).max(axis=0, initial=-np.inf))
    return (
        np.where(count_N > 0, mean_N, np.nan),
        np.where(several_N, low_N, np.nan),
        np.where(several_N, high_N, np.nan),
    )


def _t_N(degrees_N: np.ndarray) -> np.ndarray:
    """The quantile at each step; a step with fewer than two values has none."""
    t_D = np.array([np.nan, *map(t_quantile, range(1, int(degrees_N.max(initial=0)) + 1))])
    return t_D[np.maximum(degrees_N, 0)]


def t_quantile(degrees: int) -> float:
    """97.5 % point of Student's t, exact where the expansion for many degrees is not."""
    return _FEW_DEGREES[degrees - 1] if degrees <= len(_FEW_DEGREES) else student_t(degrees)


def smoothed(curve: Curve) -> Curve:
    """The same under a Gaussian whose σ is 1 % of its points, at least two; gaps stay gaps, and give nothing."""
    sigma = max(_SIGMA * len(curve.step_N), LEAST_SIGMA)
    return replace(
        curve,
        value_N=_gaussian(curve.value_N, sigma),
        low_N=_gaussian(curve.low_N, sigma),
        high_N=_gaussian(curve.high_N, sigma),
    )


def _gaussian(value_N: np.ndarray, sigma: float) -> np.ndarray:
    finite_N = np.isfinite(value_N)
    if not finite_N.any():
        return value_N
    reach = min(int(_REACH * sigma) + 1, (len(value_N) - 1) // 2)  # np.convolve answers with the longer of the two
    weight = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    total_N = np.convolve(np.where(finite_N, value_N, 0), weight, "same")
    count_N = np.convolve(finite_N.astype(float), weight, "same")
    return np.where(finite_N, total_N / np.where(finite_N, count_N, 1), np.nan)


def thinned(curve: Curve, most: int) -> Curve:
    """Every k-th point, the last one too: a smoothed curve loses nothing by it, and the picture stays small."""
    every = -(-len(curve.step_N) // most)
    keep_N = np.zeros(len(curve.step_N), dtype=bool)
    keep_N[::-1][::every] = True
    return _only(curve, keep_N)


def envelope(curve: Curve, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A line that looks like the raw one: the lowest and the highest value in each column of the picture."""
    finite_N = np.isfinite(curve.value_N)
    step_N, value_N = curve.step_N[finite_N], curve.value_N[finite_N]
    if len(step_N) <= 2 * columns:
        return curve.step_N, curve.value_N
    steps, values = [], []
    for part_N, bin_N in zip(np.array_split(step_N, columns), np.array_split(value_N, columns), strict=True):
        first, second = sorted((int(bin_N.argmin()), int(bin_N.argmax())))
        steps += [part_N[first], part_N[second]]
        values += [bin_N[first], bin_N[second]]
    return np.array(steps), np.array(values)


def _only(curve: Curve, keep_N: np.ndarray) -> Curve:
    return Curve(curve.step_N[keep_N], curve.value_N[keep_N], curve.low_N[keep_N], curve.high_N[keep_N])
