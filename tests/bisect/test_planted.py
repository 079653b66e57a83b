"""Causes planted into real runs are named first; without one, nothing is named.

Three causes of the table on real vLLM, each with only the stage that finds it;
`lab/bisection.py` plants all of them in every model and runs every stage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.backends.cpu import get_cpu_capability

from mismatch_cli.app.cli import run
from mismatch_cli.base import custom_code
from mismatch_cli.base.places import bundled
from tests.bisect.planted import BUNDLED, PLANTS, SCALED, Bed, Plant
from tests.changed_models import copied, scaled, with_rounded_norms
from tests.diagnosis.few import few_hypotheses

pytestmark = pytest.mark.slow

MODEL, TRACES = str(bundled("model")), bundled("traces")
_BRIEF = ["--no-plots", "--quiet", "--threads", "1"]


@pytest.fixture(autouse=True)
def _few_hypotheses_and_no_code_afterwards(tmp_path, monkeypatch):
    few_hypotheses(monkeypatch)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield
    custom_code.allow(False)


def planted(name: str) -> Plant:
    return next(plant for plant in PLANTS if plant.name == name)


def typed(line: list[str]) -> None:
    assert run(line) == 0


def bisected(trace: Path, into: Path, *flags: str) -> dict[str, Any]:
    typed(["bisect", str(trace), "--output", str(into), *_BRIEF, *flags])
    return json.loads((into / "summary.json").read_text())


def rescored(folder: Path, model: str, *flags: str) -> Path:
    """The bundled float32 trace, with a gap caused by scoring with this model."""
    bed, source = Bed(folder, BUNDLED, typed), TRACES / "float32"
    return bed.rescored("trace", source, "--noise-responses", "0", *flags, model=model)


def first_of(summary: dict[str, Any], plant: Plant) -> dict[str, Any]:
    first = summary["causes"][0]
    assert plant.is_named_by(first), summary["verdict"]
    assert first["share"]["low"] > 0.5 and first["share"]["high"] >= first["share"]["value"]
    return first


def test_a_kv_cache_of_eight_bits(tmp_path):
    if not get_cpu_capability().startswith("AVX512"):
        pytest.skip("vLLM's fp8 KV cache on a CPU needs AVX-512")
    bed = Bed(
        tmp_path,
        BUNDLED,
        typed,
        "--num-prompts 14 --samples-per-prompt 1 --max-tokens 16 --top-logprobs 0",
    )
    plant = planted("fp8 KV cache in float32")
    summary = bisected(plant.make(bed).run, tmp_path / "run", "--stages", "2")
    first = first_of(summary, plant)
    assert (first["side"], first["value"], first["better"]) == ("rollout", "fp8", "auto")
    assert summary["unexplained"]["value"] < 0.01


def test_one_tensor_that_is_a_hundredth_too_large(tmp_path):
    model = copied(MODEL, tmp_path / "model", tensors=scaled(SCALED, 1.01))
    summary = bisected(
        rescored(tmp_path, model), tmp_path / "run", "--stages", "0", "--responses", "14"
    )
    first = first_of(summary, planted("one tensor × 1.01, trainer"))
    assert first["parts"] == [SCALED] and first["share"]["low"] > 0.99
    assert summary["unexplained"]["value"] < 0.01


def test_norms_that_one_side_rounds_to_bfloat16(tmp_path):
    """The trainer's code rounds; vLLM has its own model for the same folder."""
    model, trusted = with_rounded_norms(MODEL, tmp_path / "model"), "--trust-remote-code"
    trace = rescored(tmp_path, model, trusted)
    summary = bisected(
        trace,
        tmp_path / "run",
        "--trainer-model",
        model,
        trusted,
        "--stages",
        "3",
        "--module-responses",
        "12",
    )
    first = first_of(summary, planted("RMSNorm rounded in the trainer"))
    assert first["stage"] == 3 and "model.layers.0.input_layernorm" in first["parts"]


def test_float32_on_both_sides_has_no_cause(tmp_path):
    summary = bisected(TRACES / "float32", tmp_path / "run")
    assert summary["causes"] == [] and summary["tested"] == []
    assert summary["gap"]["abs_d"]["value"] < 1e-6
