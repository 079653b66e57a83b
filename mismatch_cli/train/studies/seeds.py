"""Means over the seeds of an algorithm, and the difference of two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from mismatch_cli.metrics.estimate import Estimate, student_t
from mismatch_cli.train.studies.runs import TrainingRun

ONE_SEED = "one seed: no interval"
NO_SPREAD = "the same for all seeds: no interval"  # it is unknown how far others are
# Of the numbers' size: a smaller spread comes from the order of additions
_ROUNDING = 1e-12
# 97.5 % points of Student's t
_FEW_DEGREES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
Seeded = Sequence[tuple[int | None, float]]  # a value of each run with the seed of the run


class SeedDifference(NamedTuple):
    """How much higher an algorithm is than its rival, in the mean over seeds."""

    estimate: Estimate
    pairs: int  # of runs with the same seed; 0 where the runs are not paired

    @property
    def is_above(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.estimate.low is not None and self.estimate.low > 0


def over_seeds(values: Iterable[float | None]) -> Estimate:
    """The mean over seeds with its 95 % interval, ± t · s.e. (Student's t); a single seed has
    none, and neither have equal values.
    """
    value_N = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(value_N):
        return Estimate(None, note=ONE_SEED)
    if len(value_N) == 1:
        return Estimate(float(value_N[0]), note=ONE_SEED)
    return _mean(value_N, float(np.abs(value_N).max()))


def seeded(runs: Iterable[TrainingRun], values: Iterable[float | None]) -> Seeded:
    """The values of runs, each with the seed of its run; those without a value are left out."""
    measured = []
    for run, value in zip(runs, values, strict=True):
        if value is not None:
            measured.append((run.seed, value))
    return measured


def difference(own: Seeded, rival: Seeded) -> SeedDifference:
    """Own mean − the rival's, with its 95 % interval.

    Runs with the same seed get the same problems in the same order, so they are paired: mean d ±
    t(n − 1) · sd(d) / √n over the n seeds that both have. With fewer than two such seeds the runs
    are independent: Welch's interval, its degrees of freedom rounded down. Where one side has a
    single seed there is no interval, and a partner with that seed is all it is compared with.
    """
    pairs = paired(own, rival)
    if len(pairs) > 1:
        own_N, rival_N = np.array(list(pairs.values())).T
        size = max(np.abs(own_N).max(), np.abs(rival_N).max())
        return SeedDifference(_mean(own_N - rival_N, float(size)), len(pairs))
    if pairs and min(len(own), len(rival)) == 1:
        ((own_value, rival_value),) = pairs.values()
        return SeedDifference(Estimate(own_value - rival_value, note=ONE_SEED), 1)
    return SeedDifference(_welch(_without_seeds(own), _without_seeds(rival)), 0)


def paired(own: Seeded, rival: Seeded) -> dict[int, tuple[float, float]]:
    """Own and the rival's value with each seed that both have, ascending."""
    by_seed, rival_by_seed = _by_seed(own), _by_seed(rival)
    shared = sorted(by_seed.keys() & rival_by_seed.keys())
    return {seed: (by_seed[seed], rival_by_seed[seed]) for seed in shared}


def t_quantile(degrees: int) -> float:
    """The 97.5 % point of Student's t, exact for few degrees of freedom, where the expansion is
    not.
    """
    return _FEW_DEGREES[degrees - 1] if degrees <= len(_FEW_DEGREES) else student_t(degrees)


def _by_seed(runs: Seeded) -> dict[int, float]:
    """The mean value of each seed; runs without one have no partner."""
    values: dict[int, list[float]] = {}
    for seed, value in runs:
        if seed is not None:
            values.setdefault(seed, []).append(value)
    return {seed: float(np.mean(of_seed)) for seed, of_seed in values.items()}


def _without_seeds(runs: Seeded) -> np.ndarray:
    return np.array([value for _, value in runs])


def _mean(value_N: np.ndarray, size: float) -> Estimate:
    """The mean of a sample with its interval; `size` is that of the numbers it was made of."""
    variance = _variance(value_N, size)
    return _estimate(float(value_N.mean()), variance, len(value_N) - 1)


def _welch(own_N: np.ndarray, rival_N: np.ndarray) -> Estimate:
    """The difference of the means of two independent samples (Welch 1947, Satterthwaite's
    degrees of freedom).
    """
    mean = float(own_N.mean() - rival_N.mean())
    fewest = min(len(own_N), len(rival_N))
    if fewest < 2:
        return Estimate(mean, note=ONE_SEED)
    size = float(max(np.abs(own_N).max(), np.abs(rival_N).max()))
    own, rival = _variance(own_N, size), _variance(rival_N, size)
    below = own**2 / (len(own_N) - 1) + rival**2 / (len(rival_N) - 1)
    degrees = int((own + rival) ** 2 / below) if below else fewest - 1
    return _estimate(mean, own + rival, degrees)


def _variance(value_N: np.ndarray, size: float) -> float:
    """The variance of the mean; 0 for values that differ by rounding only."""
    if np.ptp(value_N) <= _ROUNDING * size:
        return 0.0
    return float(value_N.var(ddof=1)) / len(value_N)


def _estimate(mean: float, variance: float, degrees: int) -> Estimate:
    """The mean ± t · √variance; without an interval where there is no variance."""
    if variance == 0.0:
        return Estimate(mean, note=NO_SPREAD)
    half = t_quantile(degrees) * sqrt(variance)
    return Estimate(mean, mean - half, mean + half)
