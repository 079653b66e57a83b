"""`probe --adapter`: no gap if both sides apply it, staleness if one does, an error if it is
ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.json_form import from_json
from mismatch_cli.base.places import bundled
from mismatch_cli.models.engines import vllm as vllm_engine
from mismatch_cli.report.preamble import who_facts
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace
from tests.lora import save_adapter
from tests.probe.test_rescore import flat

SIZE = [
    "--num-prompts",
    "6",
    "--samples-per-prompt",
    "4",
    "--max-tokens",
    "48",
    "--top-logprobs",
    "0",
    "--quiet",
]
pytestmark = pytest.mark.usefixtures("no_report")
FLOAT32 = ["--rollout-dtype", "float32", "--trainer-dtype", "float32"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    return save_adapter(str(bundled("model")), tmp_path_factory.mktemp("lora") / "a")


@pytest.fixture(scope="module")
def both(adapter, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "both"
    assert probe(folder, *FLOAT32, "--adapter", adapter) == 0
    return folder


def probe(folder: Path, *flags: str) -> int:
    return run(["probe", *SIZE, *flags, "--output", str(folder)])


def gaps(folder: Path) -> dict[str, float]:
    """mean |Δ probability| of the three pairs."""
    names = ("rollout", "trainer", "recomputed")
    rollout, trainer, recomputed = (
        np.exp(flat(Trace.open(folder), f"logp_{name}_T")) for name in names
    )
    pairs = {
        "mismatch": (rollout, recomputed),
        "staleness": (recomputed, trainer),
        "total": (rollout, trainer),
    }
    return {name: float(np.abs(one - other).mean()) for name, (one, other) in pairs.items()}


def manifest(folder: Path) -> dict:
    return json.loads((folder / "trace" / "manifest.json").read_text())


@pytest.mark.slow
def test_real_vllm_and_the_trainer_apply_the_same_adapter(both, adapter):
    assert gaps(both)["mismatch"] < 2e-6 and gaps(both)["staleness"] == 0
    about = manifest(both)
    assert about["equal_weights"] is True
    for side in ("rollout", "trainer"):
        assert (
            about[side]["adapter"],
            about[side]["adapter_rank"],
            about[side]["adapter_alpha"],
        ) == (adapter, 4, 8.0)
        assert about[side]["adapter_merged"] is False
    assert about["rollout"]["adapter_digest"] == about["trainer"]["adapter_digest"]
    check = about["adapter_check"]
    assert (
        check["applied"] is True and check["abs_dp_with"] < 2e-6 and check["abs_dp_without"] > 1e-3
    )
    shown = dict(who_facts(from_json(About, about)))
    assert all(
        f"adapter {adapter} (rank 4)" in shown[side] for side in ("Rollout engine", "Trainer")
    )


def test_a_merge_in_half_precision_is_measured(both, adapter, tmp_path):
    """In float32 the merge is exact; in bfloat16 it rounds the weights once more."""
    gap_of = {}
    for name, flags in {
        "float32": ["--trainer-dtype", "float32", "--merge-adapter"],
        "beside": ["--trainer-dtype", "bfloat16"],
        "merged": ["--trainer-dtype", "bfloat16", "--merge-adapter"],
    }.items():
        trainer = ["--trainer-model", str(bundled("model")), "--trainer-adapter", adapter, *flags]
        assert (
            run(["rescore", str(both), *trainer, "--quiet", "--output", str(tmp_path / name)]) == 0
        )
        gap_of[name] = gaps(tmp_path / name)["mismatch"]
    assert gap_of["float32"] < 2e-6
    assert gap_of["merged"] != gap_of["beside"]
    assert min(gap_of["merged"], gap_of["beside"]) > 1e-4
    assert manifest(tmp_path / "merged")["trainer"]["adapter_merged"] is True


def test_rescoring_without_the_adapter_warns(both, tmp_path, capsys):
    trainer = ["--trainer-model", str(bundled("model")), "--trainer-dtype", "float32"]
    assert run(["rescore", str(both), *trainer, "--output", str(tmp_path / "out")]) == 0
    assert "was sampled with the adapter" in capsys.readouterr().err
    assert gaps(tmp_path / "out")["mismatch"] > 1e-3


@pytest.mark.slow
def test_an_engine_that_ignores_the_adapter_is_noticed(adapter, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_engine, "load_adapter", lambda llm, adapter: None)
    assert probe(tmp_path / "run", "--rollout-dtype", "bfloat16", "--adapter", adapter) == 1
    assert f"The engine did not apply the adapter {adapter}" in " ".join(
        capsys.readouterr().err.split()
    )
    assert all(batch.logp_trainer_T is None for batch in Trace.open(tmp_path / "run").batches())


@pytest.mark.slow
@pytest.mark.parametrize(("side", "checked"), [("rollout", True), ("trainer", False)])
def test_an_adapter_on_one_side_means_different_weights(adapter, tmp_path, side, checked):
    folder = tmp_path / "run"
    assert probe(folder, *FLOAT32, "--engine", "hf", f"--{side}-adapter", adapter) == 0
    gap_of = gaps(folder)
    assert gap_of["mismatch"] < 2e-6 and gap_of["staleness"] > 1e-3 and gap_of["total"] > 1e-3
    said = manifest(folder)
    assert said["equal_weights"] is False and ("adapter_check" in said) is checked
    assert ("adapter" in said["rollout"], "adapter" in said["recomputed"]) == (checked, checked)
    assert ("adapter" in said["trainer"]) is not checked


@pytest.mark.slow
def test_an_adapter_that_changed_is_not_resumed(tmp_path, capsys):
    model, lora, folder = str(bundled("model")), tmp_path / "lora", tmp_path / "run"
    save_adapter(model, lora)
    assert probe(folder, "--engine", "hf", "--adapter", str(lora)) == 0
    resume = ["probe", "--resume", "--output", str(folder), "--quiet"]
    assert run(resume) == 2, "a manifest loads no adapter"
    assert "add these words to your command" in " ".join(capsys.readouterr().err.split())
    assert run([*resume, "--adapter", str(lora)]) == 0
    save_adapter(model, lora, seed=1)
    assert run([*resume, "--adapter", str(lora)]) == 1
    assert "has changed since this run began" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--adapter", "a", "--trainer-adapter", "b"], "--adapter applies to both sides"),
        (["--merge-adapter"], "needs an adapter of the trainer to merge"),
        (["--adapter", "./nowhere"], "is not an adapter"),
    ],
)
def test_invalid_combinations_are_refused(tmp_path, capsys, flags, said):
    assert probe(tmp_path / "run", *flags) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())
