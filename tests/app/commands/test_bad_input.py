"""User errors: one sentence that says what happened and what to type, the right exit code, no
traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled

MODEL = str(bundled("model"))
SMALL = [
    "--engine",
    "hf",
    "--num-prompts",
    "1",
    "--samples-per-prompt",
    "1",
    "--max-tokens",
    "4",
    "--quiet",
]


@pytest.fixture
def probe(tmp_path, typed):
    """Run `probe` into a new folder."""
    return partial(typed, "probe", *SMALL, "--output", tmp_path / "run")


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/no/such/model"], 1, "There is no model folder /no/such/model"),
        ([MODEL, "--prompts", "gone.jsonl"], 1, "gone.jsonl does not exist"),
        ([MODEL, "--prompt-field", "problm"], 2, "Did you mean problem?"),
        ([MODEL, "--trainer-dtype", "bf16"], 2, "Unknown dtype 'bf16'. Did you mean bfloat16"),
        ([MODEL, "--rollout-dtype", "floot32"], 2, "Did you mean float32"),
        ([MODEL, "--temperature", "0"], 2, "--temperature 0.0 is out of range"),
        ([MODEL, "--top-p", "1.5"], 2, "top_p = 1.5 is out of range"),
        ([MODEL, "--min-p", "1"], 2, "min_p = 1.0 is out of range"),
        ([MODEL, "--top-k", "-1"], 2, "top_k = -1 is too small"),
        ([MODEL, "--top-logprobs", "-3"], 2, "top_logprobs = -3 is too small"),
        ([MODEL, "--top-logprobs", "999999"], 2, "top_logprobs = 999999"),
        ([MODEL, "--engine", "vlm"], 2, "Did you mean vllm?"),
        ([MODEL, "--engine-arg", "seven"], 2, "is not KEY=VALUE"),
        ([MODEL, "--engine-arg", "x=1"], 2, "has no argument x"),
        ([MODEL, "--resume"], 1, "has no run to resume"),
        ([MODEL, "--no-such-flag"], 2, "No such option"),
        ([MODEL, "--trainer-model", "/no/such/model"], 1, "There is no model folder"),
        ([MODEL, "--attn", "nonsense"], 1, "nonsense"),
    ],
)
def test_arguments(probe, arguments, code, message):
    got, _, errors = probe(*arguments)
    assert got == code
    assert message in " ".join(errors.split())
    assert "Traceback" not in errors


def test_a_tokenizer_that_does_not_fit(probe, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    code, _, errors = probe(str(folder))
    assert code == 1
    assert "vocabulary is 100" in errors


def test_a_model_that_is_not_a_causal_lm(probe, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 5000}))
    code, _, errors = probe(str(folder))
    assert code == 1
    assert "not a causal language model" in errors


def test_a_damaged_checkpoint(probe, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, _, errors = probe(str(folder))
    assert code == 1
    assert errors.count("\n") == 1


def test_a_prompt_longer_than_the_context_is_skipped_and_named(tmp_path, capfd):
    rows = [
        {"problem": "What is 1 + 1?", "answer": "2"},
        {"problem": "What is 1 + 1? " * 500, "answer": "2"},
    ]
    arguments = [
        "probe",
        "--prompts",
        write(tmp_path / "p.jsonl", *rows),
        "--engine",
        "hf",
        "--max-tokens",
        "4",
    ]
    assert (
        run([*arguments, "--samples-per-prompt", "2", "--quiet", "--output", str(tmp_path / "run")])
        == 0
    )
    out = " ".join(capfd.readouterr().out.split())
    assert "1 prompt was skipped (prompt 1: the prompt has" in out


def test_an_existing_folder_is_not_overwritten(probe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("x")
    for flags in ([], ["--force"]):
        code, _, errors = probe(MODEL, *flags)
        assert code == 1
        assert "already exists" in errors or "is not a run folder" in errors
        assert (tmp_path / "run" / "precious.txt").read_text() == "x"


def test_resume_with_other_settings_is_refused(probe):
    assert probe(MODEL)[0] == 0
    code, _, errors = probe(MODEL, "--resume", "--temperature", "0.5")
    assert code == 2
    assert "--temperature differs" in errors
    assert probe(MODEL, "--resume")[0] == 0


def test_debug_shows_the_traceback(probe):
    _, _, errors = probe("/no/such/model", "--debug")
    assert "Traceback" in errors


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(tmp_path):
    """`mismatch-cli report | head -1`: the files are still written."""
    run(["probe", *SMALL, "--output", str(tmp_path / "run")])
    (tmp_path / "run/report.html").unlink()
    command = (
        f"{sys.executable} -m mismatch_cli report {tmp_path / 'run'} --quiet | head -1; exit "
        "${PIPESTATUS[0]}"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    assert "</html>" in (tmp_path / "run/report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_recorded(tmp_path):
    """A real file-size limit (RLIMIT_FSIZE) instead of a full disk: the write fails in the same
    place.
    """
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); from mismatch_cli.app.cli "
        "import run; sys.exit(run('probe --engine hf --num-prompts 40 --quiet --output "
        f"{tmp_path / 'run'}'.split()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert result.returncode == 1, result.stderr
    assert "continue with --resume" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", "0"],
        ["--prompts", "gone.jsonl"],
        ["--engine-arg", "nonsense=1"],
        ["--trainer-model", "/gone"],
    ],
)
def test_force_deletes_nothing_when_the_new_run_cannot_start(probe, tmp_path, flags):
    assert probe(MODEL)[0] == 0
    before = (tmp_path / "run" / "summary.json").read_bytes()
    assert probe(MODEL, "--force", *flags)[0] != 0
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    assert list((tmp_path / "run" / "trace").glob("shard-*.parquet"))


def test_a_start_that_failed_does_not_block_the_next(probe):
    assert probe(MODEL, "--engine-arg", "nonsense=1")[0] == 2
    assert probe(MODEL)[0] == 0
    assert probe(MODEL, "--resume", "--force")[0] == 2


def test_how_the_work_is_done_may_change_on_resume(probe):
    assert probe(MODEL)[0] == 0
    assert probe(MODEL, "--resume", "--token-budget", "512")[0] == 0


@pytest.mark.parametrize("output", ["/proc/nope", "{file}/x"])
def test_an_output_that_cannot_be_written(tmp_path, capfd, output):
    (tmp_path / "file").write_text("x")
    code = run(["probe", *SMALL, "--output", output.format(file=tmp_path / "file")])
    errors = capfd.readouterr().err
    assert code == 1
    assert "choose another --output" in errors.lower() and "bug" not in errors
