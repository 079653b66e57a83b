"""`train --lora`: the gradient is the full one along the low-rank directions, and the engine
gets merged weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.options import by_key
from mismatch_cli.base.places import bundled
from mismatch_cli.models.adapters import MergedAdapter, apply_adapter, read_adapter, start_lora
from mismatch_cli.models.loading import load_causal_lm, load_tokenizer
from mismatch_cli.train.learner import Learner
from mismatch_cli.train.train_config import TrainConfig
from tests.paths import DOCS
from tests.train.learners import CONFIG, PLAIN, gradients, make_samples
from tests.train.small_runs import assert_same_run, numbers, run

LORA = {"lora": True, "lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 5e-3}


@pytest.fixture(scope="module")
def unbroken_lora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    torch.set_num_threads(1)
    run(folder, trace_every=4, **LORA)
    return folder


def test_the_gradient_is_that_of_all_weights_along_the_low_rank_directions(make_learner):
    """d/dB = scale · G Aᵀ and d/dA = scale · Bᵀ G, with G the gradient of every weight at the
    sum.
    """
    whole, small = make_learner(), make_learner()
    start_lora(small.model, rank=3, alpha=6, targets="all-linear", seed=0)
    for name, weight in small.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    small = Learner(small.trainer, small.algorithm, PLAIN, CONFIG)
    whole.model.load_state_dict(MergedAdapter(small.model).state_dict())
    samples = make_samples(whole)
    for learner in (whole, small):
        learner.update(samples)
    result = gradients(small)
    assert len(result) == 2 * 7 * 2 and all(".lora_" in name for name in result)
    largest = max(float(gradient.abs().max()) for gradient in result.values())
    for name, layer in small.model.named_modules():
        if hasattr(layer, "lora_A"):
            g, a, b = (
                whole.model.get_submodule(name).weight.grad,
                layer.lora_A["default"],
                layer.lora_B["default"],
            )
            torch.testing.assert_close(
                b.weight.grad, 2 * g @ a.weight.T, atol=2e-5 * largest, rtol=1e-3
            )
            torch.testing.assert_close(
                a.weight.grad, 2 * b.weight.T @ g, atol=2e-5 * largest, rtol=1e-3
            )
    assert sum(state["exp_avg"].numel() for state in small.optimizer.state.values()) == sum(
        gradient.numel() for gradient in result.values()
    )


def test_every_step_is_proven_and_only_the_adapter_learns(unbroken_lora):
    lines = numbers(unbroken_lora)
    assert [line["sync"] for line in lines] == ["proven"] * 4
    assert all(line["mismatch"]["abs_dp_mean"] < 2e-6 for line in lines)
    assert lines[-1]["current"]["abs_dp_mean"] > 1e-4
    manifest = json.loads(
        (unbroken_lora / "traces" / "step-4" / "manifest.json").read_text(encoding="utf-8")
    )
    assert manifest["trainer"]["adapter_rank"] == 4 and "adapter" not in manifest["rollout"]
    adapter = read_adapter(str(unbroken_lora / "adapter"))
    assert (adapter.rank, adapter.alpha) == (4, 8.0)
    model = str(bundled("model"))
    summed = apply_adapter(load_causal_lm(model, "float32"), adapter, merge=True).state_dict()
    for name, weight in load_causal_lm(str(unbroken_lora / "model")).state_dict().items():
        torch.testing.assert_close(weight, summed[name], atol=1e-7, rtol=0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(summed[name], load_causal_lm(model, "float32").state_dict()[name])


@pytest.mark.slow
def test_stopped_and_resumed_equals_unbroken(unbroken_lora, tmp_path):
    folder = tmp_path / "run"
    run(folder, stop_after=1, **LORA)
    assert (
        folder / "checkpoints" / "step-000001" / "adapter" / "adapter_model.safetensors"
    ).is_file()
    run(folder, resume=True, **LORA)
    assert_same_run(folder, unbroken_lora)
    adapter, expected = (
        load_file(each / "adapter" / "adapter_model.safetensors")
        for each in (folder, unbroken_lora)
    )
    assert adapter.keys() == expected.keys() and all(
        torch.equal(adapter[name], expected[name]) for name in expected
    )


@pytest.mark.slow
def test_fused_experts_learn_and_a_resumed_run_is_the_same(save_model, tmp_path):
    sizes = {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "eos_token_id": 1,
    }
    model = save_model("Qwen3Moe", vocab_size=2048, max_position_embeddings=1024, **sizes)
    load_tokenizer(str(bundled("model"))).save_pretrained(model)
    small = LORA | {
        "model": model,
        "steps": 2,
        "checkpoint_every": 1,
        "max_tokens": 8,
        "algorithm": "pg-is",
    }
    # an untrained model gets nothing right, and equal rewards would teach it nothing
    small["reward"] = f"{save_reward(tmp_path)}:length"
    run(tmp_path / "unbroken", **small)
    lines = numbers(tmp_path / "unbroken")
    assert [line["sync"] for line in lines] == ["proven"] * 2
    assert max(line["mismatch"]["abs_dp_mean"] for line in lines) < 2e-6
    before, after = (
        load_causal_lm(path).state_dict() for path in (model, str(tmp_path / "unbroken" / "model"))
    )
    learnt = {
        name.rpartition("layers.0.")[2]
        for name in before
        if not torch.equal(before[name], after[name])
    }
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"} <= learnt
    run(tmp_path / "resumed", stop_after=1, **small)
    run(tmp_path / "resumed", resume=True, **small)
    assert_same_run(tmp_path / "resumed", tmp_path / "unbroken")


def save_reward(folder: Path) -> Path:
    path = folder / "rewards.py"
    path.write_text(
        "def length(response, answer):\n    return float(sum(map(ord, response)) % 2)\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.slow
def test_real_vllm_gets_the_merged_weights(tmp_path):
    records = run(tmp_path / "run", engine="vllm", steps=3, **LORA)
    assert [record["sync"] for record in records] == ["proven"] * 3
    assert max(record["mismatch"]["abs_dp_mean"] for record in records) <= 1e-6
    assert records[-1]["current"]["abs_dp_mean"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rollout_dtype", ["float32", "bfloat16"])
def test_an_adapter_that_is_not_merged_stops_the_run(rollout_dtype, tmp_path, monkeypatch):
    """The engine keeps the base model; at the first step that is the same, since B starts at 0."""
    real = MergedAdapter.state_dict

    def without(self: MergedAdapter) -> Any:
        layers = [
            (name, layer)
            for name, layer in self.learning.named_modules()
            if hasattr(layer, "lora_A")
        ]
        return dict(real(self)) | {
            f"{name}.weight": layer.get_base_layer().weight.detach() for name, layer in layers
        }

    monkeypatch.setattr(MergedAdapter, "state_dict", without)
    with pytest.raises(MismatchError, match="weight sync failed"):
        run(tmp_path / "run", rollout_dtype=rollout_dtype, **LORA | {"steps": 8})
    assert len(numbers(tmp_path / "run")) < 3


def test_the_settings_of_an_adapter_are_documented():
    text = (DOCS / "training-runs.md").read_text(encoding="utf-8")
    for name in by_key(TrainConfig):
        if name.startswith("lora"):
            assert f"`{name}`" in text, name
