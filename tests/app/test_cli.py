"""The program as a process: how it exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

import pytest

from mismatch_cli.app import cli
from mismatch_cli.base import registry
from tests.paths import ROOT


def _leave() -> None:
    sys.exit(0)


MAIN = (
    "import atexit, sys; atexit.register(print, 'registered'); from mismatch_cli.app.cli import "
    "main; main()"
)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), (["report", "/nowhere"], 1), (["nonsense"], 2), ([], 2)],
)
def test_it_exits_with_its_code_after_exit_handlers(arguments, code):
    ended = subprocess.run([sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.endswith("registered\n") and "Traceback" not in ended.stderr
    assert ("mismatch-cli 0." in ended.stdout) == (code == 0) and bool(ended.stderr) == (code != 0)


@pytest.mark.parametrize(("allocator", "pool"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_arrow_s_pool_is_chosen_unless_the_user_has_one(allocator, pool, monkeypatch):
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    if allocator:
        monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", allocator)
    register = (
        "import atexit; atexit.register(lambda: "
        "print(__import__('pyarrow').default_memory_pool().backend_name)); "
    )
    main = "from mismatch_cli.app.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", register + main, "--version"], capture_output=True, text=True
    )
    assert ended.stdout.splitlines()[-1] == pool


def test_a_pipe_gets_everything():
    listed = [sys.executable, "-m", "mismatch_cli", "algorithms"]
    whole = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    through = subprocess.run(
        f"{' '.join(listed)} | cat", shell=True, capture_output=True, text=True, check=True
    ).stdout
    assert through == whole and whole.count("\n") > 30


def test_an_exit_within_a_command_is_not_its_success(monkeypatch, capsys):
    """As of a check that a package has added, in `gate`."""
    monkeypatch.setattr(registry, "load", lambda *_: SimpleNamespace(command=_leave))
    assert cli.run(["gate"]) == 1
    assert "Unexpected error (SystemExit: 0)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["report", "--no-plots"], ["probe", "--engine", "hf"]], ids=" ".join
)
def test_ctrl_c_during_the_imports(words, tmp_path):
    """They are most of the first second, and a KeyboardInterrupt within one often becomes another
    error.

    Python's own start, before it runs the first line of the console script, is not ours.
    """
    module = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
        "mismatch-cli"
    ].split(":")[0]
    script = (
        f"import mismatch_cli, signal; print('started', flush=True); from {module} import main; "
        "main()"
    )
    for wait in (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.45, 0.6):
        process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert process.stdout.readline() == "started\n"
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].splitlines()
        assert process.returncode == 130 and said[-1].startswith("mismatch-cli: Interrupted."), (
            wait,
            said,
        )
        assert not [line for line in said if "Traceback" in line or "Error" in line], (wait, said)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "| true"])
def test_nobody_reads(closed, tmp_path):
    line = f"{sys.executable} -m mismatch_cli algorithms {closed}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_output_that_could_not_be_written_is_not_a_success(tmp_path, monkeypatch):
    # An unbuffered Python does not notice a short write
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    line = f"ulimit -f 1; {sys.executable} -m mismatch_cli algorithms > printed"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1 and "File too large" in ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.count("\n") == 1
