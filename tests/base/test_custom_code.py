"""Models with their own code, and pickles that would run code: nothing is executed unless the
user allows it.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.base import custom_code
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.manifest import read_manifest
from tests.folders import change_json

MODEL = bundled("model")
FLOAT32 = str(bundled("traces") / "float32")
_SIZE = ["--engine", "hf", "--num-prompts", "2", "--samples-per-prompt", "2", "--max-tokens", "4"]
_CODE = """
from pathlib import Path
Path({proof!r}).touch()
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, PreTrainedTokenizerFast
class MyConfig(Qwen3Config):
    model_type = "my-model"
class MyModel(Qwen3ForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Payload:
    """The code that a pickle runs when it is opened."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self):
        return Path.touch, (self._proof,)


@pytest.fixture
def proof(tmp_path) -> Path:
    return tmp_path / "executed"


@pytest.fixture(autouse=True)
def _agreeing(monkeypatch):
    """Every prompt gets a y from stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    yield
    custom_code.allow(False)


@pytest.fixture
def hostile(tmp_path, proof, monkeypatch) -> Path:
    """A model folder with its own code for configuration, model and tokenizer."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return make_hostile(tmp_path / "hostile", proof)


def make_hostile(folder: Path, proof: Path) -> Path:
    """The bundled model with code that touches `proof` when it is imported."""
    shutil.copytree(MODEL, folder)
    (folder / "code.py").write_text(_CODE.format(proof=str(proof)))
    names = {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.MyModel"}
    change_json(folder / "config.json", model_type="my-model", auto_map=names)
    change_json(
        folder / "tokenizer_config.json",
        tokenizer_class="MyTokenizer",
        auto_map={"AutoTokenizer": [None, "code.MyTokenizer"]},
    )
    return folder


def commands(model: str) -> dict[str, list[str]]:
    """Every command that loads a model."""
    return {
        "probe": ["probe", model, *_SIZE],
        "probe with vLLM": ["probe", model, *_SIZE[2:]],
        "trainer": ["probe", str(MODEL), *_SIZE, "--trainer-model", model],
        "whole": ["probe", model, *_SIZE, "--full-divergence", "1"],
        "curate": ["curate", model, *_SIZE[:4]],
        "train": ["train", "--model", model, "--engine", "hf"],
        "train with vLLM": ["train", "--model", model],
        "rescore": ["rescore", FLOAT32, "--trainer-model", model],
        "diagnose": ["diagnose", FLOAT32, "--earlier-model", model],
        "import": ["import", str(bundled("dumps")), "--tokenizer", model],
    }


@pytest.mark.parametrize("name", commands(""))
def test_no_command_runs_the_code_of_a_model_whatever_stdin_says(
    name, hostile, proof, tmp_path, capfd
):
    code = run([*commands(str(hostile))[name], "-q", "-o", str(tmp_path / "run")])
    said = capfd.readouterr().err
    assert code == 1 and not proof.exists(), said
    assert (
        "contains its own code" in said and "--trust-remote-code" in said and said.count("\n") == 1
    )


@pytest.mark.slow
def test_vllm_does_not_run_it_either(hostile, proof, tmp_path, capfd, monkeypatch):
    """With a harmless tokenizer, the engine is the first that would run the code."""
    import mismatch_cli.probe.record as record

    monkeypatch.setattr(record, "load_tokenizer", lambda _: record_tokenizer())
    from mismatch_cli.models.loading import load_tokenizer

    def record_tokenizer():
        return load_tokenizer(str(MODEL))

    assert run([*commands(str(hostile))["probe with vLLM"], "-q", "-o", str(tmp_path / "run")]) == 1
    said = capfd.readouterr().err
    assert "contains its own code" in said and not proof.exists() and said.count("\n") == 1


@pytest.mark.slow
def test_with_the_flag_it_runs_and_is_recorded_by_name(hostile, proof, tmp_path, capfd):
    flags = ["-q", "-o", str(tmp_path / "run")]
    assert run([*commands(str(hostile))["probe"], *flags, "--trust-remote-code"]) == 0, (
        capfd.readouterr().err
    )
    assert proof.exists()
    (names,) = read_manifest(tmp_path / "run" / "trace")["custom_code"].values()
    assert {name.rpartition(".")[2] for name in names} == {"MyConfig", "MyModel", "MyTokenizer"}
    for shard in (tmp_path / "run" / "trace").glob("shard-*.parquet"):
        shard.unlink()
    proof.unlink()
    sys.modules.pop("code", None)
    for more, code in ([], 2), (["--trust-remote-code"], 2), ([str(hostile)], 1):
        # A folder cannot give the user's permission
        assert run(["probe", "--resume", *flags, *more]) == code
        assert "--trust-remote-code" in capfd.readouterr().err and not proof.exists()
    assert run(["probe", str(hostile), "--resume", *flags, "--trust-remote-code"]) == 0


def test_no_other_setting_is_a_way_around(hostile, proof, tmp_path, capfd):
    out = ["-q", "-o", str(tmp_path / "run")]
    assert (
        run([*commands(str(hostile))["probe"], *out, "--engine-arg", "trust-remote-code=true"]) == 2
    )
    assert "Use --trust-remote-code." in capfd.readouterr().err
    assert run(["rescore", *out, "--attn", "somebody/kernels"]) == 2
    assert "is code on the hub" in capfd.readouterr().err and not proof.exists()


@pytest.mark.slow
def test_a_pickle_is_refused_in_one_sentence_of_ours(proof, tmp_path, capfd, monkeypatch):
    """Weights of a model, an adapter, a dump: the message never repeats torch's advice on
    `weights_only`.
    """
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "model.safetensors").unlink()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    dump = tmp_path / "rollout.pt"
    for legacy in (False, True):
        for path in (model / "pytorch_model.bin", adapter / "adapter_model.bin", dump):
            torch.save({"weight": Payload(proof)}, path, _use_new_zipfile_serialization=not legacy)
        for number, command in enumerate(
            (
                *[
                    line
                    for name, line in commands(str(model)).items()
                    if name not in ("import", "train with vLLM")
                ],
                ["rescore", "--trainer-adapter", str(adapter)],
                ["probe", *_SIZE, "--adapter", str(adapter)],
                ["import", str(dump)],
                ["import", "--format", "slime", str(dump)],
            )
        ):
            code = run([*command, "-q", "-o", str(tmp_path / f"run-{legacy}-{number}")])
            said = capfd.readouterr().err
            last = said.splitlines()[-1]
            assert code == 1 and not proof.exists(), (command, said)
            assert "weights_only" not in last and "succeed" not in last and "bug" not in last, last
            assert "pickle" in last or "run any code" in last, (command, last)
    for path in (model / "pytorch_model.bin", dump):
        path.write_bytes(pickle.dumps(Payload(proof)))
    for command in (commands(str(model))["rescore"], ["import", str(dump)]):
        assert run([*command, "-q", "-o", str(tmp_path / "again")]) == 1 and not proof.exists()
        assert "weights_only" not in capfd.readouterr().err.splitlines()[-1]
