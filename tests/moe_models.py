"""Tiny mixtures of experts of each family with known routers, with the bundled tokenizer where
one is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer
from tests.tiny_models import saved_model

EXPERTS, TOP_K = 8, 2
_COUNTED: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": _COUNTED | {"norm_topk_prob": True},
    "Olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "eos_token_id": 1},
    "Mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    "GptOss": {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    "Qwen3Next": _COUNTED
    | {
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        **{f"linear_num_{part}_heads": 2 for part in ("key", "value")},
        **{f"linear_{part}_head_dim": 16 for part in ("key", "value")},
    },
}


def with_tokenizer(into: Path, family: str = "Qwen3Moe", **settings: Any) -> str:
    """A model that commands can sample from."""
    tokenizer = load_tokenizer(str(bundled("model")))
    room = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
    }
    folder = saved_model(into, family, **FAMILIES[family] | room | settings)
    tokenizer.save_pretrained(folder)
    return folder
