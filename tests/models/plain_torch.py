"""What plain torch reads: a model's numbers at the tokens of a response, alone in its batch.

A response is whatever has `prompt_ids` and `response_ids`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mismatch_cli.base.sampling import SamplingSettings


@torch.inference_mode()
def logits_of(model: torch.nn.Module, response: Any) -> Tensor:
    """[T, V], at the positions that predict the response; on the CPU."""
    ids = torch.tensor([(response.prompt_ids + response.response_ids)[:-1]], device=model.device)
    return model(ids).logits[0, len(response.prompt_ids) - 1 :].cpu()


def logp_of(model: torch.nn.Module, response: Any, sampling: SamplingSettings) -> Tensor:
    """[T, V], under the distribution that these settings leave."""
    return sampling.process(logits_of(model, response)).log_softmax(-1)


def at_sampled(x_TV: Tensor, response: Any) -> Tensor:
    """[T]"""
    return x_TV.gather(1, torch.tensor(response.response_ids, dtype=torch.int64)[:, None])[:, 0]
