"""Packing of a model with fewer tokens than hidden dimensions."""

from __future__ import annotations

import transformers

from mismatch_cli.models.scoring.layout import keeps_apart


def test_a_model_with_a_small_vocabulary_is_tested_with_ids_that_it_has(save_model):
    path = save_model("Qwen3", vocab_size=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    assert model.config.hidden_size > 5
    assert keeps_apart(model)
