"""The real pretrained model that `make real-model` gets: an ordinary folder that says where its
weights come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.weights_note import KEY, weights_facts, weights_sentence

NOTE = "4-bit values (GGUF Q4_1) in bfloat16, not the published weights"


@pytest.mark.slow
@pytest.mark.real
def test_every_manifest_and_report_says_what_the_weights_are(
    real_model: Path, tmp_path: Path, capfd
) -> None:
    size = [
        "--num-prompts",
        "2",
        "--samples-per-prompt",
        "1",
        "--max-tokens",
        "4",
        "--noise-responses",
        "1",
    ]
    (tmp_path / "prompts.csv").write_text(
        "problem\nWhat is 17 + 25?\nName a colour.\n", encoding="utf-8"
    )
    where = ["--prompts", str(tmp_path / "prompts.csv"), "--output", str(tmp_path / "run")]
    code = run(["probe", str(real_model), "--engine", "hf", *size, *where])
    said = "".join(capfd.readouterr())
    assert code == 0, said
    manifest = json.loads(
        (tmp_path / "run" / "trace" / "manifest.json").read_text(encoding="utf-8")
    )
    assert manifest["rollout"][KEY] == manifest["trainer"][KEY] == NOTE
    assert manifest["trainer"]["vocab_size"] == 49_152
    assert NOTE in " ".join(said.split())
    assert NOTE in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.real
def test_the_weights_are_those_of_a_model_that_can_talk(real_model: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = (
        load_causal_lm(str(real_model), "float32"),
        AutoTokenizer.from_pretrained(real_model),
    )
    ids = torch.tensor([tokenizer("The capital of France is").input_ids])
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])


def test_a_model_without_a_note_has_none() -> None:
    assert (
        weights_facts(SimpleNamespace(weights_note=["not a text"])) == weights_facts(object()) == {}
    )
    assert weights_sentence({"model": "a"}, {"model": "b"}) == ""
    assert (
        weights_sentence({"model": "a", KEY: "halves"}, {"model": "b"})
        == "The weights of a are halves."
    )
