"""Where the Hugging Face engine ends a response: at which tokens, and at which context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings
from mismatch_cli.models.engines.hf import HfEngine

SETTINGS = EngineSettings("m", SamplingSettings(), 0, routes=False)


def engine_of(config: Any, generation_eos: Any, **settings: Any) -> HfEngine:
    generation = SimpleNamespace(eos_token_id=generation_eos)
    model = SimpleNamespace(config=config, generation_config=generation)
    return HfEngine(model, SETTINGS, batch_size=2, max_model_len=settings.get("longest"))


@pytest.mark.parametrize(
    ("of_generation", "of_config", "stops"),
    [(None, 7, {7}), ([1, 106], 7, {1, 7, 106}), (3, None, {3}), (None, None, set())],
)
def test_the_end_of_text_and_context_are_those_of_the_text_model(of_generation, of_config, stops):
    """Gemma 3 from 4B on reads images too, and its own configuration lacks both."""
    from transformers import Gemma3Config, Gemma3TextConfig

    text = Gemma3TextConfig(eos_token_id=of_config, max_position_embeddings=96)
    config = Gemma3Config(text_config=text)
    assert not hasattr(config, "eos_token_id") and not hasattr(config, "max_position_embeddings")
    for each in (text, config):
        engine = engine_of(each, of_generation)
        assert engine._stop_ids == stops
        assert engine.max_model_len == 96
        assert engine_of(each, of_generation, longest=48).max_model_len == 48
    config.eos_token_id = [9, 5]
    assert engine_of(config, of_generation)._stop_ids == stops | {5, 9}


def test_a_context_without_a_limit_and_one_that_positions_limit():
    from transformers import MambaConfig, Phi3Config

    assert engine_of(MambaConfig(), None).max_model_len == 2**31
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = Phi3Config(max_position_embeddings=64)
    config.rope_parameters = rope
    assert engine_of(config, None).max_model_len == 64
