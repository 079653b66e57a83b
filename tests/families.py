"""A tiny random model of each family that people train, with its special features: scaled
positions, caps, experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_SIZES = {
    "vocab_size": 2048,  # of the bundled tokenizer
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM has a kernel for on CPU
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
# GPT-NeoX and Phi-1 have no groups; vLLM would trust the number
_WHOLE_HEADS = {"num_key_value_heads": 4}
_TRAINED = 64  # the context before its extension


@dataclass(frozen=True)
class Family:
    """Its name in transformers, its settings, and the same with one feature changed that a
    correct engine honours.
    """

    name: str
    settings: Mapping[str, Any]
    part: str  # in words
    without: Mapping[str, Any] = field(default_factory=dict)


def _rope(kind: str = "default", theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def _experts(number: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": number, "num_experts_per_tok": 2, **more}


FAMILIES = {
    "llama": Family(
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=_TRAINED,
        ),
        "the scaling of positions (llama3)",
        _rope(),
    ),
    "gemma2": Family(
        "Gemma2",
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "tie_word_embeddings": True,
        },
        "the soft caps of attention and of logits",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "phi": Family(
        "Phi",
        _WHOLE_HEADS | _rope(partial_rotary_factor=0.5),
        "the share of a head that is rotated",
        _rope(partial_rotary_factor=1.0),
    ),
    "phi3": Family(
        "Phi3",
        {
            "original_max_position_embeddings": _TRAINED,
            **_rope(
                "longrope",
                original_max_position_embeddings=_TRAINED,
                partial_rotary_factor=1.0,
                short_factor=[1.0 + i / 8 for i in range(16)],
                long_factor=[1.0 + i / 4 for i in range(16)],
            ),
        },
        "the scaling of positions (LongRoPE)",
        _rope(),
    ),
    "gpt_neox": Family(
        "GPTNeoX",
        _WHOLE_HEADS | _rope(partial_rotary_factor=0.25),
        "the parallel residual",
        {"use_parallel_residual": False},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        _experts(8, moe_intermediate_size=64, norm_topk_prob=True),
        "normed weights of experts",
        {"norm_topk_prob": False},
    ),
    "olmoe": Family(
        "Olmoe",
        _WHOLE_HEADS | _experts(8),
        "the second expert of a token",
        {"num_experts_per_tok": 1},
    ),
    "mixtral": Family(
        "Mixtral",
        {"num_local_experts": 4},
        "the second expert of a token",
        {"num_experts_per_tok": 1},
    ),
    "gpt_oss": Family(
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 64,
            "sliding_window": 32,
            **_rope(
                "yarn",
                150000.0,
                factor=8.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=_TRAINED,
            ),
        },
        "the scaling of positions (YaRN)",
        _rope(theta=150000.0),
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        {
            **_experts(4, moe_intermediate_size=64, shared_expert_intermediate_size=64),
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        "the second expert of a token",
        {"num_experts_per_tok": 1},
    ),
}


def config_of(family: str, **changes: Any) -> Any:
    """The transformers configuration with these settings."""
    import transformers

    entry = FAMILIES[family]
    return getattr(transformers, f"{entry.name}Config")(**_SIZES | dict(entry.settings) | changes)


def save_family(into: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """Save a model with the bundled tokenizer in a folder of its own; return the folder.

    Every weight is drawn, biases and norms too, and large enough that attention and experts choose:
    a part that is computed differently changes log-probs by tenths of a nat.
    """
    from transformers import AutoModelForCausalLM

    from mismatch_cli.base.places import bundled
    from mismatch_cli.models.loading import load_tokenizer

    model = AutoModelForCausalLM.from_config(config_of(family, **changes))
    # The same weights, whatever is changed
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.copy_(0.1 * noise) if weight.dim() > 1 else weight.add_(0.1 * noise)
    folder = into / family
    model.to(dtype).save_pretrained(folder)
    load_tokenizer(str(bundled("model"))).save_pretrained(folder)
    return str(folder)
