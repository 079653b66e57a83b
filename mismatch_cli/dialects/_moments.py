"""Mean, spread and extremes of a quantity, batch by batch; and what frameworks make of them."""

from __future__ import annotations

from math import inf, nan, sqrt

import numpy as np


class Moments:
    """Count, mean, Σ(x − mean)², least and largest value, in float64; batches are joined by Chan's update."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.least, self.largest = inf, -inf

    def update(self, values: np.ndarray) -> None:
        if not len(values):
            return
        added, mean = len(values), float(values.mean(dtype=np.float64))
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite ratio has no spread
            squares = float(np.square(values - np.float64(mean)).sum())
            step = mean - self.mean
            total = self.count + added
            self.squares += squares + step * step * self.count * added / total
            self.mean += step * added / total
        self.count = total
        self.least, self.largest = min(self.least, float(values.min())), max(self.largest, float(values.max()))


def mean(of: Moments) -> float:
    return of.mean


def least(of: Moments) -> float:
    return of.least


def largest(of: Moments) -> float:
    return of.largest


def sample_sd(of: Moments) -> float:
    """With n − 1 in the denominator, as torch.std."""
    return sqrt(of.squares / (of.count - 1)) if of.count > 1 else nan


def population_sd(of: Moments) -> float:
    """With n in the denominator: √(E x² − (E x)²)."""
    return sqrt(of.squares / of.count)


def effective_share(of: Moments) -> float:
    """1 / E[(w / E w)²]."""
    return of.mean**2 / (of.mean**2 + of.squares / of.count)


def ratio_of_means(over: Moments, under: Moments) -> float:
    return over.mean / under.mean if under.mean else nan
