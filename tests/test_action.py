"""The GitHub Action, tested by running its steps: each `run:` in bash as on a runner, with inputs,
files and outputs.

What is not run is actions/setup-python, which needs GitHub; it is only asked for where a Python
version is named.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from mismatch_cli.base.places import bundled
from tests.paths import DOCS, ROOT

pytestmark = pytest.mark.slow

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step.get("id", step["name"]): step for step in ACTION["runs"]["steps"]}
FP8, FLOAT32 = bundled("traces") / "fp8-kv", bundled("traces") / "float32"
_EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")


class Done(NamedTuple):
    """The results of a step: its exit code, its log, and what it wrote into the runner's files."""

    code: int
    log: str
    outputs: dict[str, str]
    summary: str

    @property
    def commands(self) -> list[str]:
        """The lines of the log that a runner interprets: none between stop-commands and its
        token.
        """
        acted, token = [], ""
        for line in self.log.splitlines():
            if token:
                token = "" if line == f"::{token}::" else token
            elif line.startswith("::stop-commands::"):
                token = line.removeprefix("::stop-commands::")
            elif line.lstrip().startswith("::"):
                acted.append(line)
        return acted


class Runner:
    """A runner in a folder: `inputs` as in a workflow, and the outputs of earlier steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outputs = folder, {}
        (folder / "bin").mkdir()
        (folder / "bin" / "python3").symlink_to(sys.executable)
        self.temporary = folder / "temporary folder"
        self.temporary.mkdir()
        # Dependencies come from this environment, so that nothing is fetched; mismatch-cli itself
        # is installed.
        (folder / "site").mkdir()
        for path in Path(yaml.__file__).parents[1].iterdir():
            if "mismatch" not in path.name:
                (folder / "site" / path.name).symlink_to(path)

    def run(self, name: str, **inputs: str) -> Done:
        step, files = STEPS[name], [self.folder / "output", self.folder / "summary"]
        values = {key: about.get("default", "") for key, about in ACTION["inputs"].items()}
        values |= {key.replace("_", "-"): value for key, value in inputs.items()}
        assert values.keys() == ACTION["inputs"].keys() and not _EXPRESSION.search(step["run"])
        context = (
            {f"inputs.{key}": value for key, value in values.items()}
            | self.outputs
            | {"github.action_path": str(ROOT)}
        )
        variables = {
            key: _EXPRESSION.sub(lambda match: context[match[1]], value)
            for key, value in step["env"].items()
        }
        for file in files:
            file.write_text("")
        (self.folder / "step.sh").write_text(step["run"], encoding="utf-8")
        done = subprocess.run(
            # As `shell: bash`
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", self.folder / "step.sh"],
            cwd=self.folder,
            env=self.environment(*files) | variables,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said = dict(line.split("=", 1) for line in files[0].read_text().splitlines())
        self.outputs |= {f"steps.{name}.outputs.{key}": value for key, value in said.items()}
        return Done(done.returncode, done.stdout, said, files[1].read_text(encoding="utf-8"))

    def environment(self, output: Path, summary: Path) -> dict[str, str]:
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "GITHUB_", "PIP_"))
        }
        return variables | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "site"),
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_NO_INDEX": "1",
            "COLUMNS": "100",
            "RUNNER_TEMP": str(self.temporary),
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
        }


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    """A runner on which the action has installed itself, as in a workflow without a version."""
    runner = Runner(tmp_path_factory.mktemp("runner"))
    done = runner.run("install")
    assert done.code == 0, done.log
    program = Path(done.outputs["program"])
    assert program.is_relative_to(runner.temporary) and program.name == "mismatch-cli"
    return runner


def test_a_good_trace_passes(runner):
    done = runner.run("gate", traces=f"{FLOAT32}\n", limits="verl\n  \nnemo-rl\n")
    assert done.code == 0, done.log
    assert done.outputs == {"verdict": "passed", "exit-code": "0"} and done.commands == []
    assert done.summary.startswith("### ✅ Does the gap stay within its limits? Passed\n\n")
    assert "8 of 8 limits hold.\n" in done.summary and "8 of 8 limits hold." in done.log


HOSTILE = "evil |`<b>\n::error::planted"


@pytest.fixture(scope="module")
def bad(runner) -> Done:
    """A run with the gap of an fp8 cache in a folder with a hostile name, and limits with a
    hostile source.
    """
    run = Path(shutil.copytree(FP8, runner.folder / "a run" / "::warning::|`<i>x"))
    limits = runner.folder / "my limits.toml"
    limits.write_text(
        '[limits.tv_binary_mean]\nmax = 0.001\nsource = "' + HOSTILE.replace("\n", "\\n") + '"\n'
    )
    return runner.run(
        "gate",
        traces=str(run),
        limits=str(limits),
        arguments=f"--baseline '{FLOAT32}'",
    )


def test_a_bad_trace_fails_with_a_summary_and_an_annotation(bad):
    assert bad.code == 3 and bad.outputs == {"verdict": "failed", "exit-code": "3"}, bad.log
    (command,) = bad.commands
    assert (
        command
        == "::error title=mismatch-cli gate::tv_binary_mean (mismatch) ≤ 0.001: 0.00275945 is above 0.001"
    )
    assert bad.summary.startswith("### ❌ Does the gap stay within its limits? Failed\n\n")
    assert "The limit does not hold: " in bad.summary
    assert "sampled with different settings" not in bad.log and "tv_binary_mean" in bad.log


def test_names_and_sources_are_text_in_the_summary(bad):
    rows = [line for line in bad.summary.splitlines() if line.startswith("|")]
    assert [len(re.split(r"(?<!\\)\|", row)) for row in rows] == [8] * 3 + [4] * 6
    assert r"0.00276 | \[0.00223, 0.00433\] | ≤ 0.001" in rows[2]
    assert r"evil \|\`\<b\>⏎::error::planted" in rows[-1]
    assert not re.search(r"(?<!\\)[<`]", bad.summary)


def test_a_job_may_continue_if_a_limit_does_not_hold(runner):
    limits = runner.folder / "low.toml"
    limits.write_text("[limits.tv_binary_mean]\nmax = 0.001\n", "utf-8")
    done = runner.run("gate", traces=str(FP8), limits=str(limits), fail_on="error")
    assert done.code == 0 and done.outputs == {"verdict": "failed", "exit-code": "3"}
    assert [line.partition(" ")[0] for line in done.commands] == [
        "::warning"
    ] and "❌" in done.summary


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (
            {"traces": "/no/such/run"},
            {"verdict": "error", "exit-code": "1"},
            "/no/such/run does not exist",
        ),
        ({"traces": " \n"}, {"verdict": "error", "exit-code": "2"}, "No trace named"),
        ({"traces": "x", "arguments": "--baseline '"}, {}, "No closing quotation"),
        ({"traces": "x", "fail_on": "always"}, {}, "fail-on is one of"),
    ],
)
def test_what_cannot_be_checked_is_an_error(runner, inputs, outputs, said):
    done = runner.run("gate", **inputs)
    assert done.code and done.outputs == outputs and said in done.log
    assert ("the check could not run" in done.summary) == bool(outputs)


def test_an_error_fails_the_step_unless_fail_on_is_never(runner):
    assert runner.run("gate", traces="", fail_on="error").code == 2
    done = runner.run("gate", traces="", fail_on="never")
    assert done.code == 0 and done.outputs["verdict"] == "error"


def test_an_input_is_never_a_part_of_a_script(runner):
    """`$(…)`, quotes and line breaks in an input reach the program unchanged."""
    planted = runner.folder / "planted"
    done = runner.run(
        "gate",
        traces=f'$(touch {planted})"; touch {planted}; "',
        arguments="--limits '$(echo verl)'",
    )
    assert done.outputs["verdict"] == "error" and not planted.exists()
    assert all("${{" not in step.get("run", "") for step in ACTION["runs"]["steps"])


def test_the_program_of_an_earlier_step_or_a_version_is_used_on_request(runner):
    mine = runner.folder / "bin" / "mismatch-cli"
    others = Runner.__new__(Runner)
    vars(others).update(vars(runner), outputs={})
    assert "is not on the PATH" in runner_without_program(others).log
    mine.symlink_to(runner.outputs["steps.install.outputs.program"])
    assert others.run("install", version="installed").outputs == {"program": str(mine)}
    done = others.run("install", version="0.0.1", extras="hf")
    # Nothing is fetched here, so pip finds none
    assert done.code and "mismatch-cli[hf]==0.0.1" in done.log


def runner_without_program(runner: Runner) -> Done:
    """The step without a program of this name on the PATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/usr/bin:/bin")
        return runner.run("install", version="installed")


def test_the_metadata_of_the_action_is_true():
    assert (
        set(ACTION["outputs"]) == {"verdict", "exit-code"}
        and ACTION["runs"]["using"] == "composite"
    )
    assert all("run" in step or "uses" in step for step in STEPS.values())
    uses = STEPS["Set up Python"]
    assert uses["if"] == "inputs.python-version != ''" and uses["uses"].startswith(
        "actions/setup-python@"
    )
    referred = set(
        re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text(encoding="utf-8"))
    )
    assert referred == ACTION["inputs"].keys()
    page = (DOCS / "gate.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in (*ACTION["inputs"], *ACTION["outputs"]))
