"""A correlation over the steps of a run, whose values depend on their neighbours, with an interval that knows it."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.estimate import Estimate, point

FEWEST_STEPS = 10
FEW_STEPS = f"fewer than {FEWEST_STEPS} steps: no interval"
_REPLICATES = 1000


def block_bootstrap_pearson(x_N: np.ndarray, y_N: np.ndarray) -> Estimate:
    """Pearson's correlation of two series, with the 2.5 to 97.5 % range of a circular block bootstrap.

    Blocks of about N^(1/3) consecutive steps are drawn together (Künsch 1989; Politis and Romano 1992), because what
    follows in a run resembles what came before. The draws are seeded: the same series gives the same interval.
    """
    if len(x_N) < 3:
        return Estimate(None, note="fewer than 3 steps")
    value = _pearson(x_N, y_N)
    if np.isnan(value):
        return Estimate(None, note="one of the two is constant")
    if len(x_N) < FEWEST_STEPS:
        return point(float(value), FEW_STEPS)
    length = max(1, round(len(x_N) ** (1 / 3)))
    starts = np.random.default_rng(0).integers(0, len(x_N), (_REPLICATES, -(-len(x_N) // length), 1))
    index_BN = ((starts + np.arange(length)) % len(x_N)).reshape(_REPLICATES, -1)[:, : len(x_N)]
    replicates = _pearson(x_N[index_BN], y_N[index_BN])
    low, high = np.percentile(replicates[~np.isnan(replicates)], [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def _pearson(x_xN: np.ndarray, y_xN: np.ndarray) -> np.ndarray:
    """Over the last axis; NaN where a series is constant, also where its mean rounds."""
    dx, dy = (series - series.mean(axis=-1, keepdims=True) for series in (x_xN, y_xN))
    constant = (np.ptp(x_xN, axis=-1) == 0) | (np.ptp(y_xN, axis=-1) == 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = (dx * dy).sum(-1) / np.sqrt((dx * dx).sum(-1) * (dy * dy).sum(-1))
    return np.where(constant, np.nan, value)
