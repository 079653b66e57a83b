"""What commands print in a real terminal of several widths, under NO_COLOR, and into a real
pipe.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.terminal import Terminal

_SCRIPT = """
import sys
from mismatch_cli.app.cli import run
for line in sys.argv[1:]:
    print("$", line)
    assert run([*line.split(), "-q"]) in (0, 3)
    sys.stdout.flush()
"""
_STUDIES = "report", "clipstats", "compare", "diagnose", "clipstats -a ppo --full"
_LINES = [
    *(f"{line} --no-plots -o {number}" for number, line in enumerate(_STUDIES)),
    "gate --limits verl --limits tinker",
    "report --as trl",
    "verdict trl sampling/sampling_logp_difference/mean=0.02",
]
_STYLE = re.compile(r"\x1b\[[\d;]*m")


def outputs(text: str) -> dict[str, list[str]]:
    """The lines of each command."""
    parts = re.split(r"^\$ (.*)$", text.replace("\r", ""), flags=re.MULTILINE)[1:]
    assert parts[::2] == _LINES, text
    return {
        line: out.strip("\n").split("\n") for line, out in zip(parts[::2], parts[1::2], strict=True)
    }


def in_terminal(folder: Path, width: int, *lines: str, **variables: str) -> str:
    terminal = Terminal([sys.executable, "-c", _SCRIPT, *lines], width, folder, **variables)
    assert terminal.finish() == 0, terminal.text
    return terminal.text


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_gets_lines_that_fit_and_a_verdict_in_colour(tmp_path, width):
    for command, lines in outputs(in_terminal(tmp_path, width, *_LINES)).items():
        judged = "--as" not in command and "clipstats" not in command  # which show no verdict
        assert any(re.search(r"\x1b\[1;3[123]m", line) for line in lines) or not judged, command
        whole = "--full" in command or "--as" in command  # everything, without a screen
        assert len(lines) <= 40 or width < 80 or whole, command
        for line in lines:
            shown = _STYLE.sub("", line)
            assert not shown.endswith(" "), (command, line)
            assert cell_len(shown) <= width or shown.startswith(("mismatch-cli ", "# ")), (
                command,
                line,
            )


@pytest.mark.slow
def test_no_color_leaves_no_style(tmp_path):
    text = in_terminal(tmp_path, 80, *_LINES, "gate --help", NO_COLOR="1")
    assert "\x1b" not in text and "✘ FAILED" in text and "Usage:" in text


@pytest.mark.slow
def test_a_pipe_gets_every_column_and_no_padding(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", _SCRIPT, *_LINES]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "\x1b" not in done.stdout and "Hidden at" not in done.stdout
    for command, lines in outputs(done.stdout).items():
        assert not any(line.endswith(" ") for line in lines), command
