"""Checkpoints: a folder that is there whole or not at all, and a run folder cut back to one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mismatch_cli.errors import MismatchError
from mismatch_cli.trace.files import replacing_folder, write_atomically

METRICS_FILE = "metrics.jsonl"
_KEPT = 2
_STATE, _NAMES = "state.pt", "step-" + 6 * "[0-9]"


def save_checkpoint(
    run_folder: Path, step: int, state: dict[str, Any], beside: Callable[[Path], None] = lambda _: None
) -> None:
    """Write `checkpoints/step-N` under another name and rename it; the two newest are kept.

    `beside` may write more into the folder, before the state that makes it a checkpoint.
    """
    with replacing_folder(run_folder / "checkpoints" / f"step-{step:06d}") as temporary:
        beside(temporary)
        torch.save(state | {"step": step}, temporary / _STATE)
    for old in _checkpoints(run_folder)[:-_KEPT]:
        shutil.rmtree(old)


def latest_checkpoint(run_folder: Path) -> dict[str, Any] | None:
    """The state of the newest checkpoint; None where there is none."""
    found = _checkpoints(run_folder)
    if not found:
        return None
    try:
        state: dict[str, Any] = torch.load(found[-1] / _STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own errors have no common class
        how = (
            "Delete it, and --resume goes on from the one before."
            if len(found) > 1
            else "Start anew in another --output."
        )
        raise MismatchError(f"{found[-1]} is damaged. {how}") from error
    return state


def cut_back(run_folder: Path, step: int) -> None:
    """Forget everything after `step`: lines of metrics, and traces of steps."""
    path = run_folder / METRICS_FILE
    if path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        write_atomically(path, "".join(f"{line}\n" for line in lines))
    for folder in (run_folder / "traces").glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdecimal() and int(number) > step:  # a copy that somebody made has another name
            shutil.rmtree(folder)


def last_step(run_folder: Path) -> int:
    """The newest step on record; 0 where there is none."""
    path = run_folder / METRICS_FILE
    steps = [_step_of(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return int(max((step for step in steps if step < float("inf")), default=0))


def _checkpoints(run_folder: Path) -> list[Path]:
    """Those that are whole, in order; a copy under a name of the user's is not one that may be removed."""
    return sorted(path for path in (run_folder / "checkpoints").glob(_NAMES) if (path / _STATE).is_file())


def _step_of(line: str) -> float:
    """The step of a line; a line that was not finished belongs to no step that is kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
