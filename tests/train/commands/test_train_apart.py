"""`train --devices`: several runs at once in processes of their own, and one report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run as cli

pytestmark = pytest.mark.slow

SMALL = ["--engine", "hf", "--steps", "2", "--prompts-per-step", "4", "--samples-per-prompt", "4",
         "--no-plots",
         "--max-tokens", "32", "--eval-every", "0", "--eval-samples", "1", "--num-problems", "8",
         "--checkpoint-every", "1"]  # fmt: skip
RUNS = ("pg-is-seed-3", "gspo-seed-3")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("apart") / "runs"
    arguments = ["train", "-a", "pg-is", "-a", "gspo", "--seed", "3", "--devices", "0,1", *SMALL]
    assert cli([*arguments, "--output", str(folder)]) == 0
    return folder


def test_each_run_is_a_run_of_its_own_and_all_are_in_the_report(made):
    for name in RUNS:
        assert [json.loads(line)["step"] for line in (made / name / "metrics.jsonl").open()] == [
            1,
            2,
        ]
        assert (made / name / "model" / "config.json").is_file()
    summary = json.loads((made / "summary.json").read_text())
    assert {run["name"] for run in summary["runs"]} == set(RUNS)


def test_resume_makes_only_what_is_missing(made, tmp_path, capsys):
    folder = tmp_path / "runs"
    shutil.copytree(made, folder)
    shutil.rmtree(folder / "gspo-seed-3")
    before = (folder / "pg-is-seed-3" / "metrics.jsonl").stat().st_mtime_ns
    arguments = ["train", "-a", "pg-is", "-a", "gspo", "--seed", "3", "--devices", "0,1", *SMALL]
    assert cli([*arguments, "--output", str(folder)]) == 1
    assert "already exists. Continue it with --resume" in capsys.readouterr().err
    assert cli([*arguments, "--output", str(folder), "--resume"]) == 0
    said = capsys.readouterr().err
    assert (
        "2 runs, 1 of them finished" in said
        and "gspo-seed-3: done" in said
        and "pg-is-seed-3: " not in said
    )
    assert (folder / "pg-is-seed-3" / "metrics.jsonl").stat().st_mtime_ns == before


def test_one_run_needs_no_devices(tmp_path, capsys):
    assert cli(["train", "--devices", "0,1", *SMALL, "--output", str(tmp_path / "run")]) == 2
    assert "--devices runs several trainings" in capsys.readouterr().err
