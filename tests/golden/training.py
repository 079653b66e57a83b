"""Ten steps of training with the code here and with that of a commit: weights and metrics equal to
the bit, on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.paths import ROOT

_LINE = (
    "train", "--engine", "hf", "--rollout-dtype", "float32", "--threads", "1", "--steps", "10",
    "--prompts-per-step", "4", "--samples-per-prompt", "4", "--max-tokens", "32", "--minibatches",
    "2", "--eval-every", "5", "--quiet", "--output", "run",
)  # fmt: skip


def compared(commit: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = folder / "before"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "-f", before, commit], cwd=ROOT, check=True
        )
        try:
            old, new = run(before, folder / "old"), run(ROOT, folder / "new")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    if old == new:
        print(f"Ten steps of training are those of {commit}, to the bit.")
        return 0
    for step, (one, other) in enumerate(zip(old["lines"], new["lines"], strict=True)):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                print(f"line {step}, {key}: {one.get(key)} at {commit}, {other.get(key)} here")
    if old["weights"] != new["weights"]:
        print(f"The weights after ten steps differ from those of {commit}.")
    return 1


def run(checkout: Path, folder: Path) -> dict[str, Any]:
    """The lines of metrics.jsonl without times, and a hash of the trained weights."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(checkout), "MISMATCH_EVAL_SAMPLES": "1"}
    subprocess.run(
        [sys.executable, "-m", "mismatch_cli", *_LINE],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    weights = (folder / "run" / "model" / "model.safetensors").read_bytes()
    return {
        "lines": [without_times(json.loads(line)) for line in lines],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}
