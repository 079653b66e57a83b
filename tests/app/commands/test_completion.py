"""Shell completion as users get it: installed into the shell's own files, then the tab key in a
terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.app.completions import algorithms
from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS
from tests.paths import ROOT
from tests.terminal import Terminal
from tests.tiers import cpu_seconds_of_children

pytestmark = pytest.mark.slow

PROGRAM = shutil.which("mismatch-cli", path=str(Path(sys.executable).parent))
needs_program = pytest.mark.skipif(
    PROGRAM is None, reason="mismatch-cli is not installed beside this Python"
)
SHELLS = {"bash": ["-i"], "zsh": ["-i"]}
LINES = (  # what is typed, and what the tab key adds or lists
    ("mismatch-cli clips", "clipstats"),
    ("mismatch-cli train --preset mini", "miniature"),
    ("mismatch-cli clipstats -a dppo-binary-tv-rec", "dppo-binary-tv-recompute"),
    ("mismatch-cli report fp", "fp8-kv"),
)
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x07|[^\n]\x08")
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "pandas",
    "matplotlib",
    "pyarrow",
    "datasets",
    "math_verify",
)


def environment(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)}
    return names | {"TERM": "dumb", "PS1": "READY> "}


def shown(terminal: Terminal, keys: str, wanted: str, seconds: float = 60) -> str:
    """The terminal after these keys, as soon as it shows what is wanted."""
    start, until = len(terminal.text), time.monotonic() + seconds
    terminal.type(keys)
    while wanted not in (text := _CONTROL.sub("", terminal.text[start:])):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
        terminal.shows("")
    return text


@needs_program
@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_completes_after_installation(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    installation = subprocess.run(  # from inside the shell, since Typer detects which one it is
        [shell, "-c", "mismatch-cli --install-completion; true"],
        env=os.environ | environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{shell} completion installed" in installation.stdout, installation.stderr
    with (tmp_path / f".{shell}rc").open("a") as file:
        file.write("\nPS1='READY> '\n")
    terminal = Terminal([shell, *SHELLS[shell]], 80, tmp_path, **environment(tmp_path))
    try:
        assert "READY>" in shown(terminal, "", "READY>")
        # At its first tab zsh only loads the function
        shown(terminal, "mismatch-cli \t\t", "clipstats", 20)
        shown(terminal, "\x15", "")
        for line, wanted in LINES:
            screen = shown(terminal, f"{line}\t", wanted)
            assert wanted in screen, f"{line}\n{screen}"
            shown(terminal, "\x15", "")  # delete the line
        screen = shown(terminal, "mismatch-cli probe --engine \t\t", "vllm")
        assert all(name in screen for name in ("hf", "server", "vllm")), screen
    finally:
        terminal.process.kill()


def completed(line: str, folder: Path) -> list[str]:
    """The completions of a line's last word in bash; at the end, the heavy modules that were
    imported.
    """
    script = (
        "import atexit, sys; sys.argv[0] = 'mismatch-cli'\n"
        "from mismatch_cli.app.cli import main\n"
        "@atexit.register\n"
        f"def _(): print([m for m in {HEAVY!r} if m in sys.modules])\n"
        "main()"
    )
    words = line.split(" ")
    variables = {
        "_MISMATCH_CLI_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | variables | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\n")[:-1]


def test_it_answers_soon_and_imports_nothing_heavy(tmp_path):
    """CPU time below half a second, even for algorithms, which need numpy."""
    (tmp_path / "mine" / "trace").mkdir(parents=True)
    (tmp_path / "mine" / "trace" / "manifest.json").touch()
    before = cpu_seconds_of_children()
    lines = {
        "mismatch-cli clipstats --compare pg-is pg-t": ["pg-tis"],
        "mismatch-cli report m": ["mine", "moe", "moe-replayed"],
        "mismatch-cli gate --limits prime": ["prime-rl"],
        "mismatch-cli bisect --engine v": ["vllm"],
    }
    for line, wanted in lines.items():
        assert completed(line, tmp_path) == [*wanted, "[]"]
    assert cpu_seconds_of_children() - before < 0.8 * len(lines)


def test_it_knows_all_algorithms():
    assert {*TABLE, *VARIANTS} <= set(algorithms())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --engine vlm --show-config", "Unknown engine 'vlm'. Did you mean vllm?"),
        ("bisect --engine serve", "--engine: Unknown engine 'serve'. Did you mean server?"),
        ("report --as verll", "--as: Unknown framework 'verll'. Did you mean verl, roll or trl?"),
    ],
)
def test_an_unknown_choice_names_the_nearest(line, said, capfd):
    assert run(line.split()) == 2
    assert said in capfd.readouterr().err
