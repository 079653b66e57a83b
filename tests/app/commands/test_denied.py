"""What may not be read is told as that: it may be whole, and is neither imported again, deleted
nor left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from mismatch_cli.base.places import bundled
from tests.fuzz import world
from tests.paths import ROOT

PROBE = (
    "probe",
    "--engine",
    "hf",
    "--num-prompts",
    "2",
    "--no-plots",
    "--output",
    "probed",
    "--force",
)
DUMP = ("import", "dump", "--output", "imported")
CASES = {  # what may not be read, its mode, and a command that would
    "manifest": ("run/trace/manifest.json", 0, ("report", "run", "--no-plots")),
    "shard": ("run/trace/shard-00000.parquet", 0, ("report", "run", "--no-plots")),
    "shard that could be left out": (
        "run/trace/shard-00000.parquet",
        0,
        ("clipstats", "run", "--skip-broken"),
    ),
    "vocabulary": ("run/trace/vocab.parquet", 0, ("report", "run", "--no-plots")),
    "folder": ("run/trace", 0, ("report", "run", "--no-plots")),
    "names in a folder": ("run/trace", 0o311, ("report", "run", "--no-plots")),
    "steps": ("training/metrics.jsonl", 0, ("report", "training", "--no-plots")),
    "steps of a watched run": (
        "training/metrics.jsonl",
        0,
        ("watch", "training", "--once", "--output", "watched"),
    ),
    "config": ("training/config.toml", 0, ("report", "training", "--no-plots")),
    "limits": ("limits.toml", 0, ("gate", "run", "--limits", "limits.toml")),
    "preset": ("preset.toml", 0, ("train", "--preset", "preset.toml", "--show-config")),
    "lines of a dump": ("dump/step_0/rank_0.jsonl", 0, DUMP),
    "folder of a dump": ("dump/step_0", 0, DUMP),
    "folder of a watched dump": (
        "dump/step_0",
        0,
        ("watch", "dump", "--once", "--output", "watched-dump"),
    ),
    "table of a dump": (
        "dumps/plain-parquet/plain.parquet",
        0,
        ("import", "dumps/plain-parquet", "--output", "imported"),
    ),
    "prompts": ("prompts.jsonl", 0, (*PROBE, "--prompts", "prompts.jsonl")),
    "model": ("model/config.json", 0, (*PROBE, "./model")),
    "weights": ("model/model.safetensors", 0, (*PROBE, "./model")),
    "tokenizer": ("model/tokenizer.json", 0, (*PROBE, "./model")),
}
SCRIPT = """
import contextlib, io, json, os, sys
from mismatch_cli.app.cli import run
from tests.permissions import obey

obey()
said = {}
for name, (path, mode, words) in json.load(sys.stdin).items():
    before = os.stat(path).st_mode
    os.chmod(path, mode)
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = run([*words, "--quiet"])
    os.chmod(path, before)
    said[name] = (code, errors.getvalue())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What each command says, all of them typed in one process."""
    folder = tmp_path_factory.mktemp("denied")
    shutil.copytree(world.template(), folder, dirs_exist_ok=True)
    shutil.copytree(bundled("dumps") / "token_exports", folder / "dump")
    shutil.copytree(bundled("model"), folder / "model")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_names_the_permission_and_no_damage(said, case):
    path, (code, errors) = CASES[case][0], said[case]
    *_, sentence = errors.splitlines()
    assert (
        code == 1 and f"{path}" in sentence and "permission denied. Get access to it" in sentence
    ), errors
    assert not [
        word for word in ("damaged", "again", "Delete", "Restore", "space") if word in errors
    ], errors
