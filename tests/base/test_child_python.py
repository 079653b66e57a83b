"""No process that a command starts imports from the current directory; what the user names still
imports its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mismatch_cli.base.child_python import safe_path, users_environment
from mismatch_cli.base.places import bundled
from mismatch_cli.probe.tasks.rewards import OwnReward
from tests.poisoned import PoisonedFolder

pytestmark = pytest.mark.slow

TRACE, OTHER = bundled("traces") / "fp8-kv", bundled("traces") / "float32"
# What a library does in our process: it starts a Python, here to import what is in the current
# directory too.
MASK = """
import subprocess, sys
from mismatch_cli import Decision
subprocess.run([sys.executable, "-c", "import json, logging, select"], check=True)

def trust_region(compared, advantage_T, *, limit: float = 1.01):
    return Decision(compared.ratio_T <= limit, compared.ratio_less_1_T)
"""
REWARD = """
import subprocess, sys
from pathlib import Path
import beside

def reward(response):
    return beside.HALF

def by_script(response):
    script = Path(__file__).with_name("script.py")
    return float(subprocess.run([sys.executable, script], capture_output=True, check=True).stdout)
"""


@pytest.fixture
def folder(tmp_path: Path) -> PoisonedFolder:
    return PoisonedFolder(tmp_path)


@pytest.fixture
def reward(tmp_path: Path) -> str:
    """The file of two rewards: one imports what is beside it, the other starts a script that
    does.
    """
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in {
        "beside": "HALF = 0.5",
        "script": "import beside\nprint(beside.HALF)",
        "it": REWARD,
    }.items():
        (folder / f"{name}.py").write_text(text)
    return str(folder / "it.py")


def test_workers_and_what_libraries_start(folder, tmp_path):
    (tmp_path / "mask.py").write_text(MASK)
    words = (
        "clipstats",
        TRACE,
        "-a",
        tmp_path / "mask.py",
        "--no-plots",
        "--output",
        tmp_path / "one",
    )
    assert (done := folder.run(*words)).returncode == 0, done.stderr
    words = ("compare", TRACE, OTHER, "--workers", "2", "--no-plots", "--output", tmp_path / "two")
    assert (done := folder.run(*words)).returncode == 0, done.stderr
    assert folder.imported() == []


def test_training_its_reward_its_tracker_and_its_report(folder, tmp_path, reward):
    run, small = (
        tmp_path / "run",
        ("--samples-per-prompt", "2", "--max-tokens", "8", "--threads", "1"),
    )
    words = (
        "--engine",
        "hf",
        *small,
        "--steps",
        "1",
        "--prompts-per-step",
        "2",
        "--track",
        "tensorboard",
        "--no-plots",
    )
    done = folder.run("train", *words, "--reward", f"{reward}:reward", "--output", run)
    assert done.returncode == 0, done.stderr
    assert "could not be refreshed" not in done.stderr and list(run.rglob("events.out.tfevents.*"))
    assert (
        done := folder.run("watch", run, "--once", "--no-plots", "--output", tmp_path / "w")
    ).returncode == 0
    assert (tmp_path / "w/report.html").is_file(), done.stderr
    assert folder.imported() == []


def test_the_ranks_of_nproc(folder, tmp_path):
    """A command that refuses its arguments, as soon as a rank has imported what it needs."""
    done = folder.run(
        "probe",
        tmp_path / "no-model",
        "--engine",
        "hf",
        "--nproc",
        "2",
        "--output",
        tmp_path / "run",
    )
    assert done.returncode == 1 and "no-model" in done.stderr, done.stderr
    assert folder.imported() == []


def test_a_users_program_sees_the_environment_as_the_user_left_it(tmp_path, monkeypatch, reward):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with safe_path():
        assert os.environ["PYTHONSAFEPATH"] and "PYTHONSAFEPATH" not in users_environment()
        grader = OwnReward(f"{reward}:by_script")
        assert grader.grade("a", None, "stop", "") == 0.5
        grader.child.stop()
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the user's own setting stays
    with safe_path():
        assert users_environment()["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONSAFEPATH"] == "1"
