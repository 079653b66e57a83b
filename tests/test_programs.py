"""Programs are built on the instrument, not into it: without `train`, `bisect` or `watch` the core
answers as before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_cli.base.places import bundled
from tests.paths import PACKAGE, ROOT
from tests.test_architecture import PROGRAMS, ROOMS

FLOAT32, BFLOAT16 = (bundled("traces") / name for name in ("float32", "bfloat16"))
# Each with the code that it ends with
LINES = {
    f"report {FLOAT32} --json": 0,
    f"clipstats {FLOAT32} -a ppo -a dppo-binary-tv --json": 0,
    f"compare {FLOAT32} {BFLOAT16} --json": 0,
    f"diagnose {FLOAT32} --json": 0,
    f"gate {FLOAT32} --limits verl": 0,
    "verdict k1=0.001": 0,
    "algorithms": 0,
}
# Shown by `train` alone
OF_TRAINING = {"report trained": 1}
ANSWERS = """
import sys
from mismatch_cli.app.cli import run
run(["--help"])
for line, code in {lines!r}.items():
    answered = run(line.split())
    assert answered == code, (line, answered)
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
# Tests that look at everything at once, and so at programs too
OF_ALL = (
    "app/commands/test_advice.py", "app/commands/test_checked_first.py",
    "app/commands/test_completion.py", "app/commands/test_denied.py",
    "app/commands/test_full_disk.py", "app/commands/test_guide.py", "app/commands/test_help.py",
    "app/commands/test_settings.py",
    "app/commands/test_nothing_lost.py", "app/commands/test_odd_files.py", "app/test_cli.py",
    "base/test_child_python.py", "base/test_custom_code.py", "base/test_entry_points.py",
    "base/test_places.py", "probe/test_from_manifest.py", "report/plots/test_words.py",
    "report/test_screens.py", "trace/test_completeness.py", "trace/test_folder.py",
    "app/commands/test_configuration.py", "app/commands/test_curate.py",
    "report/test_paper_figures.py", "studies/test_remedies.py", "limits/test_one_judge.py",
    "models/engines/test_server.py", "app/test_rank_command_line.py",
)  # fmt: skip


def without(programs: tuple[str, ...], folder: Path) -> Path:
    """A copy of the package without these programs, beside the sample data."""
    shutil.copytree(
        PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", *programs)
    )
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_core_answers_without_it(program, tmp_path):
    root = without((program,), tmp_path / "copy")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n', "utf-8")
    lines = LINES | (OF_TRAINING if program == "train" else {})
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS.format(lines=lines)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root), "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    panels = done.stdout.partition("GRPO")[0]
    listed = {name for name in PROGRAMS if f"\n{name}  " in panels}
    assert listed == set(PROGRAMS) - {program}
    if program == "train":
        assert "trained is a training run. The program `train` shows those" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_tests_of_the_core_pass_without_any(tmp_path):
    root = without(PROGRAMS, tmp_path / "copy")
    shutil.copytree(
        ROOT / "tests", root / "tests", ignore=shutil.ignore_patterns("__pycache__", *PROGRAMS)
    )
    for name in ("pyproject.toml", "README.md", "docs", "lab", ".real-model"):
        if (ROOT / name).exists():
            (root / name).symlink_to(ROOT / name)
    core = [f"tests/{room}" for room in ROOMS if (root / "tests" / room).is_dir()]
    ignored = [f"--ignore=tests/{name}" for name in OF_ALL]
    done = subprocess.run(
        [*PYTEST, *core, *ignored],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stdout[-5000:]
