"""What vLLM changes in transformers and torch is restored for the trainer: the same classes, the
same bits.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.configuration_llama import LlamaConfig

from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, create_engine
from mismatch_cli.models.engines._vllm_process import ModelClasses
from mismatch_cli.models.loading import load_causal_lm, load_tokenizer
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.torch_settings import TorchSettings

IDS = torch.tensor([[5, 9, 300, 7, 41, 2]])
SMALL = SamplingSettings(max_tokens=12)


class Compiled:
    """Mocks vLLM's wrapper."""

    def extra(self) -> str:
        return "compiled"


def decorate(kind: type) -> None:
    """Change a class in place as vLLM does: another base, `__init__` and `__call__`."""

    def __init__(self, *_: object, **__: object) -> None:
        raise AssertionError("Current vLLM config is not set.")

    def __call__(self, *_: object, **__: object) -> str:
        return "compiled"

    kind.__bases__ = (*kind.__bases__, Compiled)
    kind.__init__, kind.__call__, kind._ignore_compile_vllm = __init__, __call__, False


def test_a_decorated_class_is_given_back_and_the_engine_keeps_its_own(save_model):
    model = save_model("Llama")
    before = ModelClasses.current(model)
    attributes = dict(vars(LlamaModel))
    served = load_causal_lm(model, "float32")
    expected = served(IDS).logits
    decorate(LlamaModel)
    assert served.model(IDS) == "compiled"
    # An engine, with a model that it has made
    before.restore(SimpleNamespace(apply_model=lambda change: change(served)))
    assert dict(vars(LlamaModel)) == attributes and Compiled not in LlamaModel.__mro__
    assert torch.equal(load_causal_lm(model, "float32")(IDS).logits, expected)
    assert served.model(IDS) == served.model.extra() == "compiled" and isinstance(
        served.model, LlamaModel
    )
    assert type(served) is LlamaForCausalLM


def test_a_configuration_class_is_given_back(save_model):
    class Other(LlamaConfig):
        pass

    before = ModelClasses.current(save_model("Llama"))
    AutoConfig.register("llama", Other, exist_ok=True)
    assert CONFIG_MAPPING["llama"] is Other
    before.restore()
    assert CONFIG_MAPPING["llama"] is LlamaConfig


def test_torch_chooses_its_kernels_as_before():
    before = TorchSettings.current()
    torch.backends.cuda.enable_cudnn_sdp(not before.cudnn_attention)
    torch.set_float32_matmul_precision("high")
    before.restore()
    assert TorchSettings.current() == before


@pytest.mark.slow
def test_a_model_that_vllm_serves_through_transformers_is_scored_beside_it(save_model, tmp_path):
    """vLLM has no code for Olmo 2: it decorates the class of transformers, and names its weights
    differently.
    """
    sizes = {"vocab_size": 2048, "hidden_size": 128, "max_position_embeddings": 256}
    folder = save_model("Olmo2", head_dim=32, eos_token_id=1, **sizes)
    load_tokenizer(str(bundled("model"))).save_pretrained(folder)
    requests = [ScoreRequest([3 + i, 9, 41], [5 + i, 300, 7, 130]) for i in range(4)]

    def scored() -> np.ndarray:
        trainer = Trainer.load(folder, sampling=SMALL, dtype="float32")
        return np.concatenate([s.logp_T for s in trainer.score(requests, token_budget=1000)])

    alone = scored()
    settings = EngineSettings(
        folder, SMALL, 0, dtype="float32", log_file=tmp_path / "log", extra={"max_model_len": 64}
    )
    engine = create_engine("vllm", settings)
    assert np.array_equal(scored(), alone), "beside the engine"
    trainer = Trainer.load(folder, sampling=SMALL, dtype="float32")
    gaps = [gap_of(engine, trainer)]
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    assert gap_of(engine, trainer) > 0.01, "other weights"
    engine.load_weights(trainer.model)
    gaps.append(gap_of(engine, trainer))
    assert max(gaps) < 1e-5
    engine.close()
    assert np.array_equal(scored(), alone), "after it"


def gap_of(engine, trainer: Trainer) -> float:
    """Mean |log π − log μ| of what the engine samples, nats."""
    rollouts = engine.sample([Request([1, 2, 3 + i], seed=i) for i in range(4)], lambda n: None)
    scores = trainer.score(
        [ScoreRequest(r.prompt_ids, r.response_ids) for r in rollouts], token_budget=1000
    )
    gaps = [s.logp_T - r.logp_rollout_T for s, r in zip(scores, rollouts, strict=True)]
    return float(np.abs(np.concatenate(gaps)).mean())
