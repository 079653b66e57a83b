"""Where a mask blocks in the plane of two probabilities: asked of the mask itself, point by point."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mismatch_cli.algorithms.algorithm import Algorithm, Mask, keep_T
from mismatch_cli.policies import Policies


def limiting(algorithm: Algorithm) -> tuple[Mask, ...]:
    """The masks that limit the trainer; those on the engine gap say nothing about π."""
    return tuple(mask for mask in algorithm.masks if mask.ratio.current == "trainer")


def anchor_of(algorithm: Algorithm) -> str:
    """The policy from which the masks measure: the horizontal axis of the plane."""
    anchors = {mask.ratio.anchor for mask in limiting(algorithm)}
    return anchors.pop() if len(anchors) == 1 else "rollout"


def blocked_T(algorithm: Algorithm, logp_anchor_T: np.ndarray, logp_T: np.ndarray, sign: float) -> np.ndarray | None:
    """Whether the limiting masks block a token with these log-probabilities (nats) and an advantage of that sign.

    None where there is no such mask, or where two probabilities do not decide: top-K masks need more columns, and
    a mask on whole responses answers otherwise when the same tokens form one response instead of many.
    """
    masks = limiting(algorithm)
    if not masks or len({mask.ratio.anchor for mask in masks}) > 1:
        return None
    anchor_T, current_T = torch.from_numpy(logp_anchor_T), torch.from_numpy(logp_T)
    advantage_T = torch.full_like(anchor_T, sign)
    answers = []
    for offset_S1 in (torch.arange(len(anchor_T) + 1), torch.tensor([0, len(anchor_T)])):
        policies = Policies(anchor_T, current_T, anchor_T, offset_S1)
        try:
            answers.append(~keep_T(replace(algorithm, masks=masks), policies, advantage_T))
        except Exception:  # a user's own mask can ask for anything that a bare pair of probabilities does not have
            return None
    return answers[0].numpy() if torch.equal(*answers) else None
