"""The run folder: what belongs to a run, and what may therefore be replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

from mismatch_cli.errors import MismatchError

_TRACE = "trace"
_CHILDREN = {_TRACE, "log", "plots", "summary.json", "report.html", "tokens.csv", "tokens.parquet"}


def check_run_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but a run: nothing of the user's is ever written over or deleted."""
    if folder.exists() and not folder.is_dir():
        raise MismatchError(f"{folder} is a file. Choose another --output.")
    foreign = sorted(child.name for child in folder.glob("*") if child.name not in _CHILDREN)
    if foreign:
        raise MismatchError(f"{folder} is no run folder: it holds {foreign[0]}. Choose another --output.")


def clear_run(folder: Path) -> None:
    """Remove what an earlier run left; its log stays, because the engine of the new run writes there already."""
    for name in _CHILDREN - {"log"}:
        child = folder / name
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink(missing_ok=True)
