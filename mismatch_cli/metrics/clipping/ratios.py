"""A part over a whole, from sums by prompt group, with the interval that 32 groups of prompts allow."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.estimate import Estimate, clamped, jackknife_interval


def group_ratio(part_G: np.ndarray, whole_G: np.ndarray, prompts: int) -> Estimate:
    """Σ part / Σ whole; its interval deletes one group of prompts at a time."""
    occupied_G = whole_G > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.float64(part_G.sum()) / whole_G.sum()
        without_G = (part_G.sum() - part_G) / (whole_G.sum() - whole_G)
    return jackknife_interval(float(value), without_G[occupied_G], prompts)


def group_share(part_G: np.ndarray, whole_G: np.ndarray, prompts: int) -> Estimate:
    """The same for a part of the whole: a share, whose interval ends at 0 and at 1."""
    return clamped(group_ratio(part_G, whole_G, prompts), 0.0, 1.0)
