"""`rescore` from the command line: its run folder, resuming, and user errors."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from tests.paths import DOCS
from tests.warm import cli

MODEL, FLOAT32, FP8 = (
    str(bundled("model")),
    str(bundled("traces") / "float32"),
    str(bundled("traces") / "fp8-kv"),
)
PAGE = DOCS / "rescore.md"


@pytest.fixture
def rescore(typed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(typed, "rescore")


@pytest.fixture(scope="module")
def without_arguments(tmp_path_factory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("here")
    with chdir(folder), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert run(["rescore"]) == 0
    return folder / "rescore-float32", out.getvalue(), err.getvalue()


def test_without_arguments_the_bundled_model_scores_the_control(without_arguments):
    folder, out, err = without_arguments
    words = " ".join(out.split())  # where a line wraps depends on how long the model's path is
    assert "vllm 0.32.0 float32 against transformers 5.19.0 bfloat16" in words
    assert (
        "Scoring: 11,057/11,057 tokens" in err and "mismatch-cli diagnose rescore-float32" in words
    )
    for name in ("summary.json", "report.html", "trace/vocab.parquet"):
        assert (folder / name).stat().st_size > 0
    manifest = json.loads((folder / "trace" / "manifest.json").read_text())
    assert manifest["command"] == "rescore" and manifest["trainer"]["dtype"] == "bfloat16"
    assert manifest["rescored"]["before"]["trainer"]["dtype"] == "float32"
    documented = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert manifest["rescored"].keys() | set(manifest["rescored"]["replaced"]) <= documented


def test_a_finished_run_is_shown_again_and_never_overwritten(without_arguments, rescore, tmp_path):
    folder = Path(shutil.copytree(without_arguments[0], tmp_path / "rescore-float32"))
    shard = folder / "trace" / "shard-00000.parquet"
    before = shard.stat().st_mtime_ns
    code, _, err = rescore()
    assert code == 1 and "already exists. Continue it with --resume, replace it with --force" in err
    code, out, err = rescore("--resume", "--output", str(folder), "--json")
    assert code == 0 and json.loads(out)["pairs"].keys() == {"mismatch"}
    assert "Loading" not in err and shard.stat().st_mtime_ns == before
    code, _, err = rescore("--resume", "--weights", "newer", "--output", str(folder))
    assert code == 2 and "--weights differs from the run to resume" in err
    code, _, err = rescore(
        FP8, "--trainer-model", MODEL, "--weights", "newer", "--resume", "--output", str(folder)
    )
    assert code == 2 and "TRACE differs from the run to resume" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("--weights", "older"),
            2,
            "--weights older is invalid. Use equal, newer, or a version such as 40.",
        ),
        (("--trainer-dtype", "bf16"), 2, "Did you mean bfloat16"),
        (("--token-budget", "0"), 2, "--token-budget 0 is too small"),
        (("--noise-responses", "-1"), 2, "noise_responses = -1 is too small"),
        (("--top-p", "2"), 2, "top_p = 2.0 is out of range"),
        ((FP8, "--trainer-model", MODEL), 2, "sampled at 6 versions"),
        (("/no/such/trace", "--trainer-model", MODEL), 1, "/no/such/trace does not exist"),
        (("--trainer-model", "/no/such/model"), 1, "There is no model folder"),
        (("--resume",), 1, "has no run to resume"),
    ],
)
def test_mistakes(rescore, arguments, code, message, tmp_path):
    got, _, err = rescore(*arguments, "--quiet")
    assert got == code and message in err and "Traceback" not in err
    assert not list(tmp_path.glob("*/trace"))


@pytest.mark.parametrize("inside", [".", "trace", "more"])
def test_the_input_is_never_overwritten(rescore, tmp_path, inside):
    shutil.copytree(FLOAT32, tmp_path / "run" / "trace")
    shard = tmp_path / "run" / "trace" / "shard-00000.parquet"
    before = shard.read_bytes()
    code, _, err = rescore("run", "--trainer-model", MODEL, "--force", "--output", f"run/{inside}")
    assert code == 1 and "Choose another --output" in err
    assert shard.read_bytes() == before


@pytest.mark.slow
def test_ctrl_c_says_how_to_continue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--trainer-model",
        MODEL,
        "--weights",
        "newer",
        "--token-budget",
        "200",
        "--quiet",
        "--output",
        "run",
    ]
    process = cli("rescore", FP8, *flags)
    while not (tmp_path / "run" / "trace" / "shard-00000.parquet").is_file():
        assert process.poll() is None, process.said()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    errors = process.ended(within=60)
    assert process.returncode == 130
    how = "the same command with --resume, and without --force, continues it"
    assert errors == f"mismatch-cli: Interrupted. What was recorded is kept: {how}.\n"
