"""Tiny random models, saved and loaded like those of users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "initializer_range": 0.2,  # logits of a few nats, as in a trained model
    "pad_token_id": 0,
}


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., str]:
    """Save a tiny random model of a family, such as `save_model("Qwen3", vocab_size=1003)`;
    return its folder.
    """

    return partial(saved_model, tmp_path)


def saved_model(
    into: Path, family: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> str:
    """Save it into a given folder."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{"vocab_size": 512} | _SIZES | settings)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config)
    folder = into / family
    model.to(dtype).save_pretrained(folder)
    return str(folder)
