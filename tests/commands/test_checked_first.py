"""What could have been told at the start is told there: before a model loads, a run begins or a file is written."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from mismatch_cli.cli import run
from mismatch_cli.places import bundled

LOADING = [
    f"mismatch_cli.{name}"
    for name in (
        "engines", "models", "engines.hf", "scoring.trainer", "rl.loop", "rl.run",
        "recording.curate", "recording.record", "recording.rescore", "recording.rollouts",
    )
]  # fmt: skip
MODEL, FLOAT32 = str(bundled("model")), str(bundled("traces") / "float32")


@pytest.fixture
def refused(capfd, monkeypatch, tmp_path):
    """Type a command that is to be refused; answers what it said. Nothing may have been loaded or written."""
    (tmp_path / "files").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def began(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded before everything was checked")

    for name in ("rl.loop.train", "engines.create_engine", "models.load_causal_lm", "models.load_tokenizer"):
        room, _, function = name.rpartition(".")
        original = getattr(importlib.import_module(f"mismatch_cli.{room}"), function)
        for module in [importlib.import_module(name) for name in LOADING]:  # each holds a name of its own for it
            if getattr(module, function, None) is original:
                monkeypatch.setattr(module, function, began)

    def call(*arguments: str) -> str:
        capfd.readouterr()
        code = run(list(arguments))
        out, err = capfd.readouterr()
        assert code in (1, 2) and not out, (arguments, out, err)
        assert "Traceback" not in err and "bug" not in err, err
        assert not list(Path().rglob("*")), (arguments, list(Path().rglob("*")))
        return " ".join(err.split())

    return call


def write(name: str, text: str) -> str:
    path = Path("../files") / name
    path.write_text(text)
    return str(path)


def test_train_and_show_config_check_every_name(refused):
    reward = write("reward.py", "def score(response):\n    return 1\n")
    broken = write("broken.py", "import nothing_of_this_name\n")
    few = write("few.jsonl", '{"problem": "1 + 1", "answer": "2"}\n')
    preset = write("preset.toml", 'algorithm = "dppo-binary-tv:max_tv=-1"\n')
    mistakes = (
        (["-a", "pg-is", "-a", "dpo-binary-tv"], "Unknown algorithm 'dpo-binary-tv'. Did you mean"),
        (["-a", "pg-is", "-a", "dppo-binary-tv:max_tvv=0.1"], "Unknown parameter of dppo-binary-tv 'max_tvv'"),
        (["-a", "pg-is", "-a", "dppo-binary-tv:max_tv=-1"], "max_tv=-1 makes no sense"),
        (["-a", "pg-is", "-a", "dppo-topk-tv:k=99999"], "dppo-topk-tv:k=99999 needs the top 99,999 log-probs, and"),
        (["-a", "pg-is", "-a", "gone.py"], "gone.py does not exist"),
        (["-a", "pg-is", "-a", broken], "cannot be imported"),
        (["--preset", preset], "max_tv=-1 makes no sense"),
        (["--preset", "miniatur"], "Unknown preset 'miniatur'. Did you mean miniature"),
        (["--reward", "gone.py:score"], "there is no such function"),
        (["--reward", f"{reward}:scores"], "has no function 'scores'"),
        (["--reward", f"{broken}:score"], "cannot be loaded (ModuleNotFoundError"),
        (["--dataset", "gone.jsonl"], "There is no file gone.jsonl"),
        (["--dataset", few], "is more than the 1 problems there are"),
        (["--dataset", few, "--prompts-per-step", "1", "--prompt-field", "problm"], "Did you mean problem?"),
        (["--eval-dataset", "gone.parquet"], "There is no file gone.parquet"),
        (["--model", "/no/such/model"], "There is no model folder /no/such/model"),
        (["--engine", "vlm"], "Unknown engine 'vlm'. Did you mean vllm"),
        (["--aggregation", "token"], "Unknown aggregation 'token'. Did you mean token-mean"),
        (["--prompt-template", "chatt"], "Unknown template 'chatt'. Did you mean chat"),
        (["--temperature", "0"], "Temperature 0"),
    )
    for flags, said in mistakes:
        for more in ([], ["--show-config"]):
            error = refused("train", *flags, *more)
            assert said in error, (flags, error)


def test_probe_and_curate_check_every_name(refused):
    reward = write("reward.py", "def score(response):\n    return 1\n")
    mistakes = (
        (["--engine", "vlm"], "Did you mean vllm?"),
        (["--prompts", "gone.jsonl"], "There is no file gone.jsonl"),
        (["--prompts", write("bad.jsonl", "{}\n[1]\n")], "line 2 is no JSON object"),
        (["--prompt-field", "problm"], "Did you mean problem?"),
        (["--prompt-template", "chatt"], "Did you mean chat?"),
        (["--reward", f"{reward}:scores"], "has no function 'scores'"),
        (["--reward", "gone.py:score"], "there is no such function"),
    )
    for command in ("probe", "curate"):
        for flags, said in [*mistakes, (["/no/such/model"], "There is no model folder /no/such/model")]:
            error = refused(command, *flags)
            assert said in error, (command, flags, error)
    for flag in ("--trainer-model", "--adapter", "--trainer-adapter"):
        assert "/no/such/folder" in refused("probe", flag, "/no/such/folder")


def test_rescore_clipstats_gate_compare_and_import_check_every_name(refused):
    for arguments, said in (
        (["rescore", FLOAT32, "--trainer-model", "/no/such/model"], "There is no model folder"),
        (["rescore", FLOAT32, "--trainer-model", MODEL, "--trainer-adapter", "/no/such/folder"], "/no/such/folder"),
        (["rescore", FLOAT32, "--trainer-model", MODEL, "--weights", "older"], "--weights older is not known"),
        (["clipstats", "-a", "pg-is", "-a", "dpo-binary-tv"], "Unknown algorithm 'dpo-binary-tv'"),
        (["clipstats", "--compare", "pg-is", "dpo"], "Unknown algorithm 'dpo'"),
        (["gate", "--limits", "prime"], "Did you mean prime-rl?"),
        (["gate", "--baseline", "gone"], "gone does not exist"),
        (["compare", "--pair", "mismatches"], "Unknown pair 'mismatches'"),
        (["compare", FLOAT32, "gone"], "gone does not exist"),
        (["diagnose", "--earlier-model", "/no/such/model"], "There is no model folder"),
        (["report", "--as", "verll"], "Did you mean verl"),
        (["report", "--export", "xml"], "--export xml is not known"),
        (["import", "--format", "slimy", "--tokenizer", "/no/such/model", FLOAT32], "Did you mean slime?"),
    ):
        error = refused(*arguments)
        assert said in error, (arguments, error)
