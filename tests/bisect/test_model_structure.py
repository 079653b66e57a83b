"""Two models compared by the names of their tensors: what one lacks, and what is of no account."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_cli.base.places import bundled
from mismatch_cli.bisect.model_structure import StructureDifference, structure_difference
from tests.changed_models import WEIGHTS, copied

MODEL = str(bundled("model"))
QWEN, LLAMA = "Qwen3ForCausalLM", "LlamaForCausalLM"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


def other(into: Path, without: str = "^$", extra: tuple[str, ...] = (), **settings: Any) -> str:
    """A copy of the bundled model without tensors of such names, with extra ones and settings."""
    model = copied(MODEL, into, settings)
    tensors = load_file(into / WEIGHTS)
    remaining = {name: tensors[name] for name in tensors if not re.search(without, name)}
    save_file(
        remaining | {name: torch.zeros(4) for name in extra}, into / WEIGHTS, {"format": "pt"}
    )
    return model


def test_a_model_does_not_differ_from_its_copy(tmp_path):
    assert structure_difference(MODEL, MODEL) == StructureDifference()
    assert structure_difference(MODEL, other(tmp_path / "copy")) == StructureDifference()


def test_norms_that_only_one_class_has(tmp_path):
    """Named from either side, with both classes."""
    llama = {"architectures": [LLAMA], "model_type": "llama"}
    plain = other(tmp_path / "llama", without="self_attn.q_norm", **llama)
    difference = structure_difference(MODEL, plain)
    assert difference.architectures == (QWEN, LLAMA)
    assert difference.lacking_in_trainer == tuple(
        f"model.layers.{layer}.self_attn.{kind}_norm.weight" for layer in range(4) for kind in "kq"
    )
    # Llama's folder still has k_norm, which its model ignores
    assert difference.lacking_in_rollout == ()
    turned = structure_difference(plain, MODEL)
    assert turned.lacking_in_rollout == difference.lacking_in_trainer
    assert turned.to_json()["architectures"] == {"rollout": LLAMA, "trainer": QWEN}


def test_biases_and_layers_that_only_one_model_has(tmp_path):
    biased = other(tmp_path / "biased", extra=(Q_BIAS,), attention_bias=True)
    assert structure_difference(MODEL, biased).lacking_in_rollout == (Q_BIAS,)
    assert structure_difference(biased, MODEL).lacking_in_trainer == (Q_BIAS,)
    shorter = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    short = other(tmp_path / "short", without=r"layers\.3\.", **shorter)
    lacking = structure_difference(MODEL, short).lacking_in_trainer
    assert lacking and all(name.startswith("model.layers.3.") for name in lacking)


def test_what_no_model_computes_with_is_of_no_account(tmp_path):
    """A draft head, a buffer of old versions, a tied head that one folder also saved."""
    ignored = (
        "model.mtp.0.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "lm_head.weight",
    )
    folder = other(tmp_path / "ignored", extra=ignored)
    assert structure_difference(MODEL, folder) == StructureDifference()
    assert structure_difference(folder, MODEL) == StructureDifference()


def test_a_head_that_only_one_side_ties_is_compared_by_its_numbers(tmp_path):
    """Both models have it: the configurations say that one is tied."""
    untied = other(tmp_path / "untied", extra=("lm_head.weight",), tie_word_embeddings=False)
    assert structure_difference(MODEL, untied) == StructureDifference()
    assert structure_difference(untied, MODEL) == StructureDifference()


def test_a_model_that_cannot_be_built_says_nothing_of_its_tensors(tmp_path, monkeypatch):
    def refuse(_model: str) -> frozenset[str]:
        raise ValueError("unknown model type")

    monkeypatch.setattr("mismatch_cli.bisect.model_structure.computed_names", refuse)
    renamed = other(tmp_path / "renamed", architectures=["OursForCausalLM"])
    difference = structure_difference(MODEL, renamed)
    assert difference == StructureDifference((QWEN, "OursForCausalLM"))


@pytest.mark.slow
def test_a_search_names_the_tensors_before_any_experiment(tmp_path):
    """A trainer without norms: out of budget after the models were compared, then resumed."""
    import json

    from tests.warm import cli

    llama = {"architectures": [LLAMA], "model_type": "llama"}
    plain = other(tmp_path / "llama", without="[kq]_norm", **llama)
    brief = ["--noise-responses", "0", "--no-plots", "--quiet", "--threads", "1"]
    float32 = str(bundled("traces") / "float32")
    trace = str(tmp_path / "trace")
    scored = ["rescore", float32, "--trainer-model", plain, "--trainer-dtype", "float32"]
    said = cli(*scored, "--output", trace, *brief)
    assert said.ended() is not None and said.returncode == 0
    search = ["bisect", "--output", str(tmp_path / "run"), *brief[2:4]]
    first = [*search, trace, "--engine", "hf", "--trainer-model", plain, "--responses", "12"]
    for line in ([*first, "--threads", "1", "--budget", "0.001"], [*search, "--resume"]):
        done = cli(*line)
        done.ended()
        assert done.returncode == 0
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        finished = summary["not_tested"] == []
        if summary["weights"]:
            assert summary["differences"][0].startswith("8 tensors of the engine’s model have no")
    resumed = cli(*search, "--resume", "--budget", "10")
    resumed.ended()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not finished and summary["not_tested"] == []
    assert summary["differences"] and summary["causes"][0]["setting"] == "attention"
