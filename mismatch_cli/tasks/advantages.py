"""Advantages from rewards: what the trainer multiplies its update by."""

from __future__ import annotations

import numpy as np


def group_mean_advantages(reward_S: np.ndarray, prompt_id_S: np.ndarray) -> np.ndarray:
    """Reward minus the mean of its group (the samples of one prompt), without division by the standard deviation.

    A_i = R_i − mean_{j in group} R_j, float32, shape _S. A group of one, or with equal rewards, gets zeros: it teaches
    nothing. Source: Dr. GRPO; arXiv 2602.04879, section 4.1 and App. C.1.
    """
    _, group_S = np.unique(prompt_id_S, return_inverse=True)
    sums_G = np.bincount(group_S, weights=reward_S)
    return (reward_S - (sums_G / np.bincount(group_S))[group_S]).astype(np.float32)
