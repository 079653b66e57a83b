"""Random tokens as the published objectives take them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from tests.rules.algorithms.published import Sample

RESPONSES = 250
PROMPTS = np.arange(RESPONSES) // 5


def partition(given: Policies, logp_TK: Tensor, logp_T: Tensor) -> Tensor:
    """Probabilities of the top-K, of the sampled token if it is not among them, and of all
    others.
    """
    assert given.topk is not None
    alone_T = (given.topk.ids_TK != given.topk.response_ids_T[:, None]).all(-1)
    named = torch.cat([logp_TK.exp(), torch.where(alone_T, logp_T.exp(), 0.0)[:, None]], -1)
    return torch.cat([named, 1 - named.sum(-1, keepdim=True)], -1)


def sample(given: Policies, advantage_T: Tensor) -> Sample:
    topk = given.topk
    assert topk is not None and topk.recomputed is not None and given.recomputed is not None
    columns = (
        (topk.rollout, given.rollout),
        (topk.trainer, given.trainer),
        (topk.recomputed, given.recomputed),
    )
    parts = [partition(given, *pair) for pair in columns]
    logp = given.trainer.clone().requires_grad_()
    lengths, prompts = (
        given.responses.length_S.tolist(),
        PROMPTS[: len(given.responses.length_S)].tolist(),
    )
    luck, grouped = given.compare(TRAINER_ROLLOUT).draw_T, (parts[0], parts[1], parts[2])
    return Sample(
        logp,
        given.recomputed,
        given.rollout,
        advantage_T,
        lengths,
        grouped,
        given.compare(TRAINER_ROLLOUT).entropy_T,
        prompts,
        luck,
        given.average,
    )
