"""The program as a process: how it exits."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mismatch_cli import cli, registry


def _leave() -> None:
    sys.exit(0)


MAIN = "import atexit, sys; atexit.register(print, 'registered'); from mismatch_cli.cli import main; main()"


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["report", "/nowhere"], 1), (["nonsense"], 2), ([], 2)]
)
def test_it_exits_with_its_code_after_exit_handlers(arguments, code):
    ended = subprocess.run([sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.endswith("registered\n") and "Traceback" not in ended.stderr
    assert ("mismatch-cli 0." in ended.stdout) == (code == 0) and bool(ended.stderr) == (code != 0)


@pytest.mark.parametrize(("asked", "pool"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_arrow_s_pool_is_chosen_unless_the_user_has_one(asked, pool, monkeypatch):
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    if asked:
        monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", asked)
    register = (
        "import atexit; atexit.register(lambda: print(__import__('pyarrow').default_memory_pool().backend_name)); "
    )
    main = "from mismatch_cli.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", register + main, "--version"], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == pool


def test_a_pipe_gets_everything():
    listed = [sys.executable, "-m", "mismatch_cli", "algorithms"]
    whole = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    through = subprocess.run(f"{' '.join(listed)} | cat", shell=True, capture_output=True, text=True, check=True).stdout
    assert through == whole and whole.count("\n") > 30


def test_an_exit_within_a_command_is_not_its_success(monkeypatch, capsys):
    """As of a check that a package has added, in `gate`."""
    monkeypatch.setattr(registry, "load", lambda *_: SimpleNamespace(command=_leave))
    assert cli.run(["gate"]) == 1
    assert "Unexpected error (SystemExit: 0)" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "2>&-", "| true"])
def test_nobody_reads(closed, tmp_path):
    line = f"{sys.executable} -m mismatch_cli algorithms {closed}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_output_that_could_not_be_written_is_not_a_success(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # an unbuffered Python does not notice a short write
    line = f"ulimit -f 1; {sys.executable} -m mismatch_cli algorithms > printed"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1 and "File too large" in ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.count("\n") == 1
