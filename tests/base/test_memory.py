"""Limits of memory: commands end with one sentence before a C library spins or ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.memory import bounded, is_out_of_memory, room
from tests.paths import ROOT


def limited(
    tmp_path: Path, kilobytes: int, *line: str, kind: str = "v"
) -> subprocess.CompletedProcess[str]:
    """The end of a command under `ulimit`; a `TimeoutExpired` if it takes over ten seconds."""
    script = f'ulimit -{kind} {kilobytes}; exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, *line],
        capture_output=True,
        text=True,
        timeout=10,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("kind", "kilobytes", "command"),
    [
        ("v", 300_000, "clipstats fp8-kv --workers 2"),
        ("v", 350_000, "report fp8-kv --workers 2"),
        ("v", 350_000, "diagnose fp8-kv"),
        ("d", 200_000, "compare fp8-kv float32"),
    ],
)
def test_a_pass_under_a_small_limit_ends_with_one_sentence(tmp_path, kind, kilobytes, command):
    ended = limited(tmp_path, kilobytes, "-m", "mismatch_cli", *command.split(), kind=kind)
    assert ended.returncode == 1 and ended.stdout == ""
    assert (
        "needs 1024 MB of memory, but a limit leaves it" in ended.stderr
        and ended.stderr.count("\n") == 1
    )
    assert list(tmp_path.iterdir()) == []


def test_help_needs_less(tmp_path):
    assert limited(tmp_path, 100_000, "-m", "mismatch_cli", "clipstats", "--help").returncode == 0


def test_the_buffer_of_products_is_mapped_before_a_pass_fills_the_memory(tmp_path):
    """What remains would not hold it: OpenBLAS would retry forever."""
    script = (
        "import resource; import numpy as np; from mismatch_cli.base import memory\n"
        "if {early}: memory.map_buffer_of_products()\n"
        "used = memory._status('/proc/self/status', 'VmSize:')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**24,) * 2)\n"
        "if not {early}: memory.map_buffer_of_products()\n"
        "ones = np.ones((100, 300)); print((ones @ ones.T).sum())"
    )
    early = limited(tmp_path, 2**22, "-c", script.replace("{early}", "True"))
    assert early.stdout == "3000000.0\n", early.stderr
    late = limited(tmp_path, 2**22, "-c", script.replace("{early}", "False"))
    assert "needs 64 MB of memory, but a limit leaves it 16 MB" in late.stderr


def test_no_limit_leaves_any_room():
    assert room() == float("inf")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        ImportError("libarrow.so.2600: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_what_says_that_memory_is_exhausted(error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("another thread"))


def test_a_small_limit_of_the_user_is_not_blamed_on_the_file(tmp_path):
    script = "from mismatch_cli.base.memory import bounded\nwith bounded('a file', 100): bytearray(2**31)"
    assert "MemoryError" in limited(tmp_path, 10**6, "-c", script, kind="d").stderr.splitlines()[-1]
    with (
        pytest.raises(MismatchError, match="a file expands far beyond its size"),
        bounded("a file", 100),
    ):
        bytearray(2**31)
