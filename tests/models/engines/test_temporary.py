"""Engines leave nothing in the temporary folder, even when killed, and never touch anybody
else's files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mismatch_cli.models.engines._vllm_process import TemporaryFolder, remove_abandoned
from tests.paths import ROOT

HELD = """
import os, sys, tempfile
from mismatch_cli.models.engines._vllm_process import TemporaryFolder
folder = TemporaryFolder()
os.mkdir(tempfile.mkdtemp() + "/inside")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_engine_is_cleaned_up_after_and_a_living_one_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(TemporaryFolder, "current", None)  # of an engine that another test keeps
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", HELD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for _ in range(2)
    ]
    killed, living = (Path(engine.stdout.readline().decode().strip()) for engine in engines)
    assert killed.parent == living.parent == tmp_path and len(list(killed.iterdir())) == 2
    engines[0].kill()
    engines[0].wait()
    for name in ("mismatch-cli-engine-of-the-user", "vllm_dist_of_another"):
        (tmp_path / name).mkdir()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "in-use").touch()
    (tmp_path / "mismatch-cli-engine-link").symlink_to(precious)
    own = TemporaryFolder()
    assert tempfile.gettempdir() == str(own.path) == os.environ["TMPDIR"]
    assert not killed.exists() and living.exists() and (precious / "in-use").exists()
    first, second = TemporaryFolder.shared(), TemporaryFolder.shared()
    assert first is second and first.path.parent == own.path
    first.close()
    assert first.path.is_dir() and tempfile.gettempdir() == str(first.path)
    second.close()
    assert not first.path.exists() and tempfile.gettempdir() == str(own.path)
    own.close()
    assert tempfile.gettempdir() == str(tmp_path) == os.environ["TMPDIR"] and not own.path.exists()
    engines[1].communicate()
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mismatch-cli-engine-link",
        "mismatch-cli-engine-of-the-user",
        "precious",
        "vllm_dist_of_another",
    ]
