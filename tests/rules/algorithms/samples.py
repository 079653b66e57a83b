"""Random tokens as the published objectives take them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from tests.rules.algorithms.published import Sample

RESPONSES = 250
PROMPTS = np.arange(RESPONSES) // 5


def partition(
    batch: Policies, logp_TK: Tensor, logp_T: Tensor, replace_last: bool = False
) -> Tensor:
    """Probabilities of the top-K, of the sampled token if it is not among them, and of all others;
    the sampled token may take the place of the last of the top-K.
    """
    alone_T = (batch.topk.ids_TK != batch.topk.response_ids_T[:, None]).all(-1)
    p_TK = logp_TK.exp()
    p_TK[alone_T & replace_last, -1] = 0.0
    named = torch.cat([p_TK, torch.where(alone_T, logp_T.exp(), 0.0)[:, None]], -1)
    return torch.cat([named, 1 - named.sum(-1, keepdim=True)], -1)


def sample(batch: Policies, advantage_T: Tensor) -> Sample:
    names, compared = ("rollout", "trainer", "recomputed"), batch.compare(TRAINER_ROLLOUT)
    parts = [partition(batch, getattr(batch.topk, name), getattr(batch, name)) for name in names]
    lengths = batch.responses.length_S.tolist()
    return Sample(
        batch.trainer.clone().requires_grad_(),
        batch.recomputed,
        batch.rollout,
        advantage_T,
        lengths,
        parts,
        compared.entropy_T,
        PROMPTS[: len(lengths)].tolist(),
        compared.draw_T,
        batch.average,
    )
