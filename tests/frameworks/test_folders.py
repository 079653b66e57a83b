"""A framework is its folder: the package answers without one, and knows another that is added."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.house import FRAMEWORKS
from tests.test_programs import without

TOY = {
    "metrics.py": """
from mismatch_cli.frameworks.dialects._metric import ENGINE_GAP, FrameworkMetric
WHEN = "Logged at every step."
LINES = (FrameworkMetric("toy/gap", ENGINE_GAP, "E |d|", "toy.py", metric="abs_d_mean"),)
""",
    "limits.toml": """
publisher = "toy"
[about]
toy = "An example."
[[limit]]
who = "toy page"
source = "gap.md"
name = "toy/gap"
metric = "abs_d_mean"
pair = "mismatch"
healthy = 0.5
says = "an example"
gate = "toy"
""",
    "algorithms.toml": """
[[algorithm]]
name = "toy-default"
source = "an example"
masks = [{ name = "ratio-clip", ratio = "trainer/recomputed", ratio_high = 0.4 }]
weight = [{ level = "product", cap = 3 }]
means = "mis"
""",
    "causes.toml": 'temperature = "In toy: heat = 1"\n',
}
TRACE = "fp8-kv"
NAMES = ("--help", "algorithms", "import --formats", "verdict toy toy/gap=0.4")
NUMBERS = (
    f"report {TRACE} --as all",
    f"gate {TRACE} --limits toy",
    f"clipstats {TRACE} -a toy-default",
    f"diagnose {TRACE}",
)
ANSWERS = """
from mismatch_cli.app.cli import run
for line in {lines!r}:
    answered = run(line.split())
    assert answered == 0, (line, answered)
from mismatch_cli.rules.algorithms.table import MEANINGS
from mismatch_cli.limits.causes import framework_remedy
assert MEANINGS["mis"][-1] == "toy-default"
assert framework_remedy("toy", "temperature") == "In toy: heat = 1"
"""


def answers_without(framework: str, lines: tuple[str, ...], tmp_path) -> str:
    """What is printed by a package whose `frameworks/` has one folder less, and `toy/` more."""
    root = without((framework,), tmp_path / "copy")
    toy = root / "mismatch_cli/frameworks/toy"
    toy.mkdir()
    for name, text in TOY.items():
        (toy / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS.format(lines=lines)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root), "COLUMNS": "100"},
    )
    assert done.returncode == 0, f"{framework}: {done.stderr[-3000:]}"
    return done.stdout


def test_one_folder_less_and_one_more(tmp_path):
    printed = answers_without("verl", NAMES + NUMBERS, tmp_path)
    assert "toy/gap" in printed and "rollout_corr/kl" not in printed
    assert "≤ 0.5 ✔ holds" in " ".join(printed.split())  # a set of healthy values alone
    assert "Π" in printed.partition("toy-default")[2][:300]


@pytest.mark.slow
def test_each_folder_less(tmp_path):
    for framework in sorted({*FRAMEWORKS} - {"verl"}):
        answers_without(framework, NAMES, tmp_path / framework)
