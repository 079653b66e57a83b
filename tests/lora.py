"""Adapters as peft trains and saves them, but with a non-zero B."""

from __future__ import annotations

from pathlib import Path

import torch

from mismatch_cli.models.loading import load_causal_lm

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: str,
    folder: Path,
    targets: tuple[str, ...] = LINEAR,
    *,
    size: float = 0.05,
    seed: int = 0,
) -> str:
    """Save a random adapter of a model; return its folder."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM")
        wrapped = get_peft_model(load_causal_lm(model, "float32"), config)
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=size)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return str(folder)
