"""A model with capped attention, scored with an uncapped one: warned about, recorded, named,
fixed.
"""

from __future__ import annotations

import json

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer

FLOAT32 = ("--rollout-dtype", "float32", "--trainer-dtype", "float32")
FEW = (
    "--num-prompts",
    "12",
    "--samples-per-prompt",
    "2",
    "--max-tokens",
    "24",
    "--noise-responses",
    "0",
)


@pytest.fixture
def model(save_model) -> str:
    folder = save_model(
        "Gemma2", attn_logit_softcapping=1.0, query_pre_attn_scalar=1, vocab_size=2048
    )
    load_tokenizer(str(bundled("model"))).save_pretrained(folder)
    return folder


@pytest.fixture
def summary(typed):
    def printed(*words: object) -> tuple[dict, str]:
        code, out, err = typed(*words, "--json")
        assert code == 0
        return json.loads(out), " ".join(err.split())

    return printed


def mean_gap(summary: dict) -> float:
    return next(iter(summary["pairs"].values()))["metrics"]["abs_d_mean"]["value"]


@pytest.mark.slow
def test_the_wrong_attention_is_reported_recorded_named_and_fixed(model, tmp_path, summary):
    healthy, said = summary(
        "probe", model, "--engine", "hf", *FLOAT32, *FEW, "-o", tmp_path / "healthy"
    )
    assert mean_gap(healthy) < 1e-5 and "leaves out" not in said
    assert healthy["about"]["trainer"]["attn_implementation"] == "eager"
    uncapped, said = summary(
        "probe",
        model,
        "--engine",
        "hf",
        "--attn",
        "sdpa",
        *FLOAT32,
        *FEW,
        "-o",
        tmp_path / "run",
    )
    assert mean_gap(uncapped) > 1e-3
    assert "The trainer's sdpa attention leaves out attn_logit_softcapping" in said
    manifest = json.loads(
        (tmp_path / "run" / "trace" / "manifest.json").read_text(encoding="utf-8")
    )
    assert manifest["trainer"]["attention_leaves_out"] == "attn_logit_softcapping"

    named, _ = summary("diagnose", tmp_path / "run")
    assert named["first_cause"] == "attention" and named["faults"] == ["attention"]
    finding = next(f for f in named["findings"] if f["check"] == "attention")
    assert "Use attn = eager." in finding["sentence"]
    measured, _ = summary("diagnose", tmp_path / "run", "--trainer-model", model, "--force")
    finding = next(f for f in measured["findings"] if f["check"] == "attention")
    assert measured["first_cause"] == "attention" and finding["explains"] > 0.999
    assert measured["unexplained"]["nats"] < 1e-5

    again = ("--trainer-model", model, "--trainer-dtype", "float32", "--noise-responses", "0")
    mended, _ = summary("rescore", tmp_path / "run", *again, "-o", tmp_path / "mended")
    assert mean_gap(mended) < 1e-5
