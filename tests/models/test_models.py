"""Loading: one sentence says what is wrong with a model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.scoring.proven_head import proven_head
from mismatch_cli.models.sharding import decoder_of

SaveModel = Callable[..., str]


@pytest.mark.parametrize(
    ("dtype", "resolved"),
    [
        ("auto", torch.bfloat16),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_dtype(save_model: SaveModel, dtype: str, resolved: torch.dtype) -> None:
    model = load_causal_lm(save_model("Qwen3", dtype=torch.bfloat16), dtype)
    assert model.dtype == resolved
    assert not model.training


def test_unknown_dtype() -> None:
    with pytest.raises(UsageError, match=r"'fp8' is not a dtype.*bfloat16"):
        load_causal_lm("anything", "fp8")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "nowhere/"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(MismatchError, match="There is no model folder"):
        load_causal_lm(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"it has no config\.json"):
        load_causal_lm(str(tmp_path))


def test_not_a_causal_model(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match="is not a causal language model"):
        load_causal_lm(str(tmp_path))


def test_a_model_that_also_reads_images(tmp_path: Path) -> None:
    """It generates text from left to right, but transformers has no class for that part alone."""
    from transformers import Qwen3VLConfig

    Qwen3VLConfig().save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match=r"reads more than text, .* a model of text only"):
        load_causal_lm(str(tmp_path))


def test_missing_weights_are_not_filled_with_random_numbers(
    save_model: SaveModel, tmp_path: Path
) -> None:
    model = load_causal_lm(save_model("Qwen3"))
    model.model.save_pretrained(tmp_path / "headless")
    with pytest.raises(
        MismatchError, match=r"1 of its weights are missing, such as lm_head\.weight"
    ):
        load_causal_lm(str(tmp_path / "headless"))


@pytest.mark.parametrize("damage", [b"", b"garbage, not safetensors at all"])
def test_damaged_weights(save_model: SaveModel, damage: bytes) -> None:
    folder = save_model("Qwen3")
    (Path(folder) / "model.safetensors").write_bytes(damage)
    with pytest.raises(MismatchError, match="cannot be loaded by transformers"):
        load_causal_lm(folder)


def test_attention_that_does_not_exist(save_model: SaveModel) -> None:
    with pytest.raises(MismatchError, match=r"magic.*sdpa"):
        load_causal_lm(save_model("Qwen3"), attn_implementation="magic")


def test_devices(save_model: SaveModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("Qwen3")
    assert load_causal_lm(folder, device_map="cpu").device.type == "cpu"
    with pytest.raises(UsageError, match="device_map = gpu is not a device"):
        load_causal_lm(folder, device_map="gpu")
    with pytest.raises(MismatchError, match="CUDA devices"):
        load_causal_lm(folder, device_map="cuda:99")
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(MismatchError, match="pip install accelerate"):
        load_causal_lm(folder, device_map="auto")


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
def test_a_device_map_of_accelerate(save_model: SaveModel) -> None:
    assert load_causal_lm(save_model("Qwen3"), device_map="auto").num_parameters() > 0


def test_loading_is_silent(save_model: SaveModel, capfd: pytest.CaptureFixture[Any]) -> None:
    folder = save_model("Qwen3")
    capfd.readouterr()
    load_causal_lm(folder)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "n_layer", "encoder_layers", "num_experts_per_tok", "n_experts"]
)
def test_a_model_of_a_billion_modules_is_refused(name: str, save_model: SaveModel) -> None:
    """Libraries would build them for hours. Sizes may be larger."""
    folder = Path(save_model("Qwen3"))
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        "shared_expert_intermediate_size": 14_336,
        "layer_types_size": 8192,
        "router_expert_dim": 5000,
    }
    (folder / "config.json").write_text(json.dumps(config | sizes))
    load_causal_lm(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {name: 10**9}))
    with pytest.raises(MismatchError, match=f"sets {name} to 1000000000"):
        load_causal_lm(str(folder))


def test_the_decoder_of_llama_4_is_all_but_its_head() -> None:
    """transformers' own `get_decoder` returns the whole model, which has no hidden states."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig, Qwen3Config, Qwen3ForCausalLM

    sizes: Any = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    experts: Any = {"intermediate_size_mlp": 16, "num_local_experts": 2}
    qwen = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    llama = Llama4ForCausalLM(Llama4TextConfig(**sizes, **experts)).eval()
    assert decoder_of(qwen) is qwen.get_decoder() is qwen.model
    assert decoder_of(llama) is llama.model and llama.get_decoder() is llama
    matrix = object()
    parts: Any = {"get_decoder": lambda: matrix, "get_output_embeddings": lambda: matrix}
    assert decoder_of(SimpleNamespace(model=qwen, **parts)) is qwen
    for model in (qwen, llama):
        head, _ = proven_head(model)
        assert head.vocabulary == 64
