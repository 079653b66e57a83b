"""Adapters on a model: the intended sum, whatever is tied; misfits are reported, never silently
dropped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.adapters import (
    MergedAdapter,
    apply_adapter,
    read_adapter,
    same_adapter,
    start_lora,
)
from mismatch_cli.models.adapters import save_adapter as save_adapter_of_run
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from tests.folders import change_json
from tests.lora import save_adapter

IDS = torch.tensor([[5, 9, 300, 7, 41, 2]])


@pytest.fixture
def model(save_model) -> str:
    return save_model("Qwen3", tie_word_embeddings=True)


def logits_of_the_sum(model: str, adapter: str) -> torch.Tensor:
    """The logits of W + B A · alpha / rank written out, with the head untied from the
    embeddings.
    """
    loaded, adapter_read = load_causal_lm(model, "float32"), read_adapter(adapter)
    weights = load_file(Path(adapter) / "adapter_model.safetensors")
    head = loaded.get_output_embeddings().weight.detach().clone()
    for name, a in weights.items():
        if "lora_A" in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = (
                weights[name.replace("lora_A", "lora_B")]
                @ a
                * adapter_read.alpha
                / adapter_read.rank
            )
            with torch.no_grad():
                (head if path == "lm_head" else loaded.get_submodule(path).weight).add_(delta)
    with torch.inference_mode():
        return loaded.model(IDS).last_hidden_state[0] @ head.T


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("v_proj", "lm_head")])
def test_the_adapter_is_the_sum_of_its_products(model, tmp_path, merge, targets):
    """Also with a tied head: peft's own merge would change the embeddings with it."""
    adapter = save_adapter(model, tmp_path / "lora", targets)
    expected = logits_of_the_sum(model, adapter)
    adapted = apply_adapter(load_causal_lm(model, "float32"), read_adapter(adapter), merge=merge)
    with torch.inference_mode():
        torch.testing.assert_close(adapted(IDS).logits[0], expected, atol=2e-5, rtol=1e-5)
        without = load_causal_lm(model, "float32")(IDS).logits[0]
    assert (without - expected).abs().max() > 0.05
    requests = [ScoreRequest(IDS[0, :2].tolist(), IDS[0, 2:].tolist())]
    trainer = Trainer.load(model, sampling=SamplingSettings(), adapter=adapter, merge_adapter=merge)
    (scores,) = trainer.score(requests, token_budget=100)
    logp_T = expected[1:-1].log_softmax(-1).gather(1, IDS[0, 2:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(scores.logp_T), logp_T, atol=2e-5, rtol=1e-5)
    assert trainer.describe()["adapter_merged"] is merge
    assert trainer.describe()["adapter_targets"] == ", ".join(sorted(targets))


def test_what_an_engine_takes_over_is_the_sum_and_the_base_stays(model):
    loaded = load_causal_lm(model, "bfloat16")
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
    start_lora(loaded, rank=3, alpha=6, targets="q_proj, up_proj", seed=0)
    same = MergedAdapter(loaded).state_dict()
    assert same.keys() == before.keys()
    assert all(torch.equal(same[name], weight) for name, weight in before.items())
    layer = loaded.model.layers[1].mlp.up_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    for _ in range(3):  # computed from the base each time: nothing accumulates
        state = MergedAdapter(loaded).state_dict()
    delta = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(state[name], (before[name].float() + delta).bfloat16())
    assert [n for n in before if not torch.equal(state[n], before[n])] == [name]
    assert torch.equal(layer.get_base_layer().weight, before[name])


FUSED = {
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {"num_local_experts": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "targets", "changed"),
    [
        (
            "Qwen3Moe",
            "all-linear",
            {"gate_up_proj", "down_proj", "gate", "q_proj", "k_proj", "v_proj", "o_proj"},
        ),
        ("Mixtral", "gate_up_proj, q_proj", {"gate_up_proj", "q_proj"}),
        ("DeepseekV3", "experts.down_proj, q_a_proj", {"down_proj", "q_a_proj"}),
        ("GptOss", "gate_up_proj, down_proj", {"gate_up_proj", "down_proj"}),
        ("Phimoe", "all-linear", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("GPT2", "c_attn, c_proj", {"c_attn", "c_proj"}),
    ],
)
def test_experts_in_one_parameter_are_merged_parameter_by_parameter(
    save_model, tmp_path, family, targets, changed
):
    """W + B A · scale of each expert written out, against peft's own merge of the saved adapter
    and its logits.
    """
    model = save_model(family, **FUSED.get(family, {}))
    loaded, base = load_causal_lm(model, "float32"), load_causal_lm(model, "float32").state_dict()
    wrapped = start_lora(loaded, rank=2, alpha=6, targets=targets, seed=0)
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    state = MergedAdapter(loaded).state_dict()
    assert state.keys() == base.keys()
    different = {name for name in base if not torch.equal(state[name], base[name])}
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in different} == changed
    for layer in (layer for layer in loaded.modules() if hasattr(layer, "lora_A")):
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        name = next(n for n, value in base.items() if n in different and torch.equal(value, weight))
        torch.testing.assert_close(
            state[name] - weight, sum_of_products(layer, weight), atol=1e-6, rtol=1e-5
        )
    save_adapter_of_run(wrapped, tmp_path / "lora")
    again = apply_adapter(
        load_causal_lm(model, "float32"), read_adapter(str(tmp_path / "lora")), merge=True
    )
    with torch.inference_mode():
        torch.testing.assert_close(again(IDS).logits, loaded(IDS).logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(weight, state[name]) for name, weight in again.state_dict().items())


def sum_of_products(layer, weight: torch.Tensor) -> torch.Tensor:
    """B A · scale expert by expert, in the order of the experts: their ranks are A's rows in
    blocks, and every n-th column of B.
    """
    a, b, scale = (
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        layer.scaling["default"],
    )
    if weight.dim() == 2:
        delta = scale * b @ a
        return delta.T if layer.fan_in_fan_out else delta
    experts = len(weight)
    rank = len(a) // experts
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    deltas = [scale * b[:, e::experts] @ a[e * rank : (e + 1) * rank] for e in range(experts)]
    return torch.stack(
        [d if d.shape == weight.shape[1:] and not is_transposed else d.T for d in deltas]
    )


def test_adapters_are_the_same_by_what_they_hold(model, tmp_path):
    one = save_adapter(model, tmp_path / "one")
    shutil.copytree(one, tmp_path / "copy")
    assert same_adapter(one, str(tmp_path / "copy")) and same_adapter(None, None)
    assert not same_adapter(one, None)
    assert not same_adapter(one, save_adapter(model, tmp_path / "other", seed=1))
    change_json(tmp_path / "copy" / "adapter_config.json", lora_alpha=9)
    assert not same_adapter(one, str(tmp_path / "copy")), "the same weights, scaled otherwise"


def test_what_is_not_an_adapter_is_reported(model, tmp_path):
    with pytest.raises(MismatchError, match="no adapter"):
        read_adapter(model)
    folder = Path(save_adapter(model, tmp_path / "lora"))
    (folder / "adapter_model.safetensors").write_bytes(b"half of it")
    with pytest.raises(MismatchError, match=r"is not a readable LoRA adapter"):
        read_adapter(str(folder))
    whole = Path(save_adapter(model, tmp_path / "whole"))
    change_json(whole / "adapter_config.json", modules_to_save=["lm_head"])
    with pytest.raises(MismatchError, match=r"full modules \(lm_head\)"):
        read_adapter(str(whole))


def test_an_adapter_that_would_be_dropped_in_part_is_refused(model, save_model, tmp_path):
    """peft only warns, and continues with what fits, or with nothing."""
    folder = Path(save_adapter(model, tmp_path / "lora"))
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    save_file(
        {name.replace("layers.1", "layers.7"): weight for name, weight in weights.items()}, path
    )
    with pytest.raises(
        MismatchError, match=r"only in part: 14 of its weights are missing and 14 fit no module"
    ):
        apply_adapter(load_causal_lm(model), read_adapter(str(folder)), merge=False)
    wide = save_model("Llama", hidden_size=96)
    with pytest.raises(MismatchError, match="does not fit"):
        apply_adapter(
            load_causal_lm(wide), read_adapter(save_adapter(model, tmp_path / "fits")), merge=True
        )


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("q_proj,lm_head", "includes the LM head"),
        ("magic", "no modules magic"),
        ("q_proj,magic,trick", "no modules magic, trick"),
    ],
)
def test_what_cannot_be_trained_is_reported(model, targets, said):
    with pytest.raises(MismatchError, match=said):
        start_lora(load_causal_lm(model), rank=2, alpha=2, targets=targets, seed=0)
