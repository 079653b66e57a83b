"""Every family in float32 on both sides: the engine's numbers are the trainer's, before and
after other weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, create_engine
from mismatch_cli.models.engines.vllm import router_layers
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.positions import first_context, positions_facts, rescaling_warning
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.train.run import RunInProgress
from mismatch_cli.train.train_config import load_config
from tests.families import FAMILIES, config_of, save_family
from tests.train.small_runs import reward_file, run

pytestmark = pytest.mark.slow

SMALL = SamplingSettings(max_tokens=12)
# Of 60 tokens in the end
LONG = [Request([(7 * i + 3 * j) % 2000 + 5 for j in range(48)], seed=i) for i in range(4)]
SAME, OTHER = 1e-5, 0.05  # |log π − log μ|, nats: the largest of one function, the mean of two
# Gated delta rule: the engine goes token by token, the trainer in chunks; rounding differs.
IN_CHUNKS = {"qwen3_next": 1e-4}
# What vLLM does differently in each: tied heads, fused projections, experts that it packs, and
# those that it copies.
ON_VLLM = ("gemma2", "phi3", "olmoe", "gpt_oss")
# Heads with a cap and a bias, sinks, recurrent layers
TRAINED = ("gemma2", "phi", "gpt_oss", "qwen3_next")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("families")
    return {family: save_family(folder, family) for family in FAMILIES}


def gaps_of(engine, trainer: Trainer, requests: Sequence[Request] = LONG) -> np.ndarray:
    """|log π − log μ| of every token that the engine samples."""
    rollouts = engine.sample(requests, lambda n: None)
    scores = trainer.score(list(map(ScoreRequest.of, rollouts)), token_budget=1000)
    pairs = zip(scores, rollouts, strict=True)
    gaps = [score.logp_T - rollout.logp_rollout_T for score, rollout in pairs]
    return np.abs(np.concatenate(gaps))


def without_its_feature(family: str, weights: torch.nn.Module) -> Trainer:
    """The same weights in a model without the family's special feature."""
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(family, **FAMILIES[family].without), attn_implementation="eager"
    )
    model.load_state_dict(weights.state_dict())
    return Trainer(model.float().eval(), SMALL)


def compare_sides(engine, model: str, family: str) -> None:
    """The control, proof that it can fail, and new weights: all of them change, including
    biases, norms and sinks.
    """
    same = IN_CHUNKS.get(family, SAME)
    trainer = Trainer.load(model, sampling=SMALL, dtype="float32")
    assert gaps_of(engine, trainer).max() <= same, family
    part, without = FAMILIES[family].part, without_its_feature(family, trainer.model)
    assert gaps_of(engine, without).mean() > OTHER, part
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    assert gaps_of(engine, trainer).mean() > OTHER, family
    engine.load_weights(trainer.model)
    assert gaps_of(engine, trainer).max() <= same, family


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_of_hugging_face_agrees_and_a_wrong_model_does_not(models, family):
    engine = create_engine("hf", EngineSettings(models[family], SMALL, 0, dtype="float32"))
    compare_sides(engine, models[family], family)
    engine.close()


@pytest.mark.parametrize("family", TRAINED)
def test_three_steps_train_and_every_sync_is_proven(models, family, tmp_path):
    settings = {
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "num_problems": 2,
        "max_tokens": 12,
        "minibatches": 1,
    }
    settings |= {
        "reward": reward_file(tmp_path),
        "algorithm": "pg-is",
        "checkpoint_every": 3,
        "learning_rate": 1e-3,
    }
    lines = run(tmp_path / "run", model=models[family], steps=3, **settings)
    assert [line["sync"] for line in lines] == ["proven"] * 3


@pytest.mark.parametrize("family", ON_VLLM)
def test_vllm_agrees_and_loads_every_weight(models, family, tmp_path):
    settings = EngineSettings(models[family], SMALL, 0, dtype="float32", log_file=tmp_path / "log")
    engine = create_engine("vllm", settings)
    compare_sides(engine, models[family], family)
    if family in ("olmoe", "gpt_oss"):  # on a GPU it would report the experts of these layers
        assert next(iter(engine.llm.apply_model(router_layers))) == [0, 1]  # type: ignore[attr-defined]
    engine.close()


def test_vllm_says_what_to_use_for_a_model_that_it_cannot_compute(models, tmp_path):
    settings = EngineSettings(
        models["qwen3_next"], SMALL, 0, dtype="float32", log_file=tmp_path / "log"
    )
    engine = create_engine("vllm", settings)
    assert not engine.describe()["prefix_caching"], (
        "recurrent states are not cached where prompts stay whole"
    )
    with pytest.raises(
        MismatchError, match=r"cannot compute Qwen3NextForCausalLM in float32 here: .* --engine hf"
    ):
        engine.sample(LONG, lambda n: None)
    engine.close()


def test_a_context_whose_position_scaling_depends_on_the_length_is_refused(models):
    config = load_causal_lm(models["phi3"]).config
    assert (
        first_context(config) == 64
        and first_context(load_causal_lm(models["llama"]).config) is None
    )
    assert (
        first_context(config_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}))
        == 512
    )
    short = create_engine("hf", EngineSettings(models["phi3"], SMALL, 0, dtype="float32"))
    trainer = Trainer.load(models["phi3"], sampling=SMALL, dtype="float32")
    assert short.max_model_len == 64 and not rescaling_warning(short.describe(), trainer.describe())
    extra = {"max_model_len": 512}
    long = create_engine(
        "hf", EngineSettings(models["phi3"], SMALL, 0, dtype="float32", extra=extra)
    )
    flags = "Use --engine-arg max_model_len=64 (train: max_context_tokens = 64)."
    assert flags in rescaling_warning(long.describe(), trainer.describe())
    assert flags in rescaling_warning(
        long.describe() | {"engine": "vllm"}, positions_facts(config) | {"model": "m"}
    )
    beyond = [Request(request.prompt_ids + request.prompt_ids[:12], seed=0) for request in LONG]
    assert gaps_of(short, trainer, LONG).max() <= SAME
    assert gaps_of(long, trainer, beyond).mean() > OTHER, (
        "transformers scales by the length no longer: drop the sentence"
    )


@pytest.mark.parametrize(("context", "warns"), [(64, False), (128, True)])
def test_a_run_whose_context_is_so_long_says_so_at_its_start(models, tmp_path, context, warns):
    changes = {"engine": "hf", "model": models["phi3"], "max_context_tokens": context}
    changes |= {
        "rollout_dtype": "float32",
        "prompts_per_step": 2,
        "num_problems": 2,
        "max_tokens": 12,
    }
    said: list[str] = []
    RunInProgress(load_config("miniature", changes), tmp_path, said.append).close()
    sentences = [s for s in said if "scales its positions differently in sequences above 64" in s]
    assert len(sentences) == warns
