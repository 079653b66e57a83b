"""Which parts of a model are spread if transformers has no plan for it."""

from __future__ import annotations

import pytest
import transformers
from transformers import GPT2Config, Qwen3Config

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.sharding import add_plan

SMALL = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 99,
}


def test_the_layers_are_the_parts():
    config = GPT2Config(**SMALL)
    add_plan(config, "gpt2")
    assert config.base_model_fsdp_plan == {"h.*": "free_full_weight"}


def test_a_plan_of_transformers_is_kept():
    config = Qwen3Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    before = config.base_model_fsdp_plan
    add_plan(config, "qwen3")
    assert config.base_model_fsdp_plan == before and "layers.*" in before


def test_a_model_that_names_no_layers_is_refused_with_one_sentence(monkeypatch):
    monkeypatch.setattr(transformers.GPT2PreTrainedModel, "_no_split_modules", None)
    with pytest.raises(
        MismatchError, match=r"does not say which of its modules are layers.*leave out sharded"
    ):
        add_plan(GPT2Config(**SMALL), "gpt2")
