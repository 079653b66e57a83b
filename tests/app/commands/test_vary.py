"""Runs that differ in settings: real processes, one comparison, and what happens if one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.processes import members
from mismatch_cli.processes.members import Member, Outcome, run_members, run_on_ray, visible_devices

pytestmark = pytest.mark.slow

SMALL = [
    "--engine",
    "hf",
    "--num-prompts",
    "2",
    "--samples-per-prompt",
    "2",
    "--max-tokens",
    "8",
    "--no-plots",
]
DTYPES = ["--vary", "trainer-dtype=bfloat16,float32"]
NAMES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two probes on two fake devices, so that both run at once."""
    folder = tmp_path_factory.mktemp("swept")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mismatch_cli",
            "probe",
            *SMALL,
            *DTYPES,
            "--devices",
            "0,1",
            "--json",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder / "out.json").write_text(done.stdout)
    (folder / "said").write_text(done.stderr)
    return folder


def test_each_run_is_a_run_of_its_own_and_all_are_compared(swept, capsys):
    found = json.loads((swept / "out.json").read_text())
    assert [side["run"] for side in found["traces"]] == list(NAMES)
    assert next(row["setting"] for row in found["comparisons"][0]["settings"]).startswith(
        "trainer."
    )
    folder = swept / "probe-by-trainer-dtype"
    assert json.loads((folder / "summary.json").read_text()) == found
    for name in NAMES:
        manifest = json.loads((folder / name / "trace/manifest.json").read_text())
        assert manifest["trainer"]["dtype"] == name
        assert run(["report", str(folder / name), "--json", "--quiet"]) == 0
        assert f"{name}: mean |Δlog p|" in (swept / "said").read_text()
    capsys.readouterr()


def test_what_was_finished_is_not_made_again(swept, monkeypatch, capsys):
    monkeypatch.chdir(swept)
    words = ["probe", *SMALL, *DTYPES, "--json", "--quiet"]
    assert run(words) == 1
    assert "--resume" in capsys.readouterr().err
    began = (
        (swept / "probe-by-trainer-dtype" / NAMES[0] / "trace/shard-00000.parquet")
        .stat()
        .st_mtime_ns
    )
    assert run([*words, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((swept / "out.json").read_text())
    assert (
        swept / "probe-by-trainer-dtype" / NAMES[0] / "trace/shard-00000.parquet"
    ).stat().st_mtime_ns == began


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--vary", "trainer-dtyp=a,b"], "Did you mean trainer-dtype"),
        (["--vary", "trainer-dtype"], "is invalid"),
        (["--vary", "trainer-dtype=float32,"], "is invalid"),
        (["--vary", "trainer-dtype=float32"], "at least two values"),
        (["--vary", "trainer-dtype=float32,float33"], "float33"),
        (["--vary", "max-tokens=8,few"], "--max-tokens"),
        (["--vary", "model=nowhere/a,nowhere/b/", "--vary", "model=c"], "twice"),
        (["--vary", "eager=true,perhaps"], "neither true nor false"),
        (["--vary", "prompts=a/x.jsonl,b/x.jsonl"], "x.jsonl"),
        ([*DTYPES, "--resume", "--force"], "use one of them"),
    ],
)
def test_what_cannot_be_varied_is_reported_before_anything_starts(
    typed, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run(["probe", *SMALL, *typed]) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def failing(folder: Path, *names: str) -> list[Member]:
    """Runs of which the one called `bad` names a missing trace."""
    words = ("rescore", "--trainer-dtype", "float32", "--no-plots")
    return [
        Member(folder / name, (*words, "--seed", "1") if name == "bad" else words, Path.cwd())
        for name in names
    ]


def test_one_that_fails_is_named_and_the_others_continue(tmp_path):
    told: list[Outcome] = []
    outcomes = run_members(failing(tmp_path, "bad", "good"), ["0", "1"], told.append)
    assert [bool(outcome.fault) for outcome in outcomes] == [True, False]
    assert "--seed" in outcomes[0].fault and outcomes[1].member.finished
    assert {outcome.member.name for outcome in told} == {"bad", "good"}


def test_a_sweep_that_fails_in_part_ends_with_the_command_that_continues(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(members, "_made", lambda member, *_: Outcome(member, "The disk is full."))
    assert run(["rescore", *DTYPES, "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "2 of 2 runs failed, the first bfloat16: The disk is full." in said
    assert (
        "mismatch-cli rescore --vary=trainer-dtype=bfloat16,float32 --output "
        "rescore-by-trainer-dtype --resume" in said
    )


def test_ctrl_c_ends_the_runs_and_resume_continues(tmp_path):
    typed = [
        sys.executable,
        "-m",
        "mismatch_cli",
        "probe",
        *SMALL,
        "--num-prompts",
        "16",
        "--samples-per-prompt",
        "16",
    ]
    typed += ["--max-tokens", "64", *DTYPES, "--devices", "0,1", "--output", "out"]
    process = subprocess.Popen(
        typed, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not all((tmp_path / "out" / name / "trace/manifest.json").exists() for name in NAMES):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Interrupted" in said
    assert not [line for line in _command_lines() if str(tmp_path) in line]


def _command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def test_devices_are_those_that_are_visible(monkeypatch):
    for named, devices in (("0,2", ["0", "2"]), ("", []), ("-1", []), ("GPU-5c", ["GPU-5c"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_devices() == devices
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert visible_devices() == []


def test_a_cluster_makes_them_too(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    outcomes = run_on_ray(failing(tmp_path, "bad", "good"), "ray", lambda _: None)
    assert [bool(outcome.fault) for outcome in outcomes] == [True, False]
    assert "--seed" in outcomes[0].fault and outcomes[1].member.finished
