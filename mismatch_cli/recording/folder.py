"""The run folder: what belongs to a run, and what may therefore be replaced."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mismatch_cli.errors import MismatchError

_TRACE = "trace"
_LOCK = ".lock"
_KEPT = {"log", _LOCK, "trace.part"}  # the last while `import` writes
_CHILDREN = _KEPT | {_TRACE, "plots", "summary.json", "report.html", "tokens.csv", "tokens.parquet"}
_CHILDREN |= {"responses.jsonl", "clipstats", "diagnosis"}  # what other commands make of the trace goes with it
_CHILDREN |= {"held-out", "perfectible.jsonl"}  # of `curate`
_CHILDREN |= {"distributions"}  # of `probe --full-divergence`, while it runs


def check_run_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but a run: nothing of the user's is ever written over or deleted."""
    if folder.exists() and not folder.is_dir():
        raise MismatchError(f"{folder} is a file. Choose another --output.")
    foreign = sorted(child.name for child in folder.glob("*") if child.name not in _CHILDREN)
    if foreign:
        raise MismatchError(f"{folder} is no run folder: it holds {foreign[0]}. Choose another --output.")


def check_apart(folder: Path, read: Path) -> None:
    """Refuse to write a run where one is read from, inside it, or around it."""
    ours, theirs = folder.resolve(), read.resolve()
    if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
        raise MismatchError(f"{folder} and {read}, which is only read, are not apart. Choose another --output.")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder while writing, so that two processes do not record into one trace; a kill lets go of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MismatchError(
                f"{folder} is being written by another process. Wait for it, or choose another --output."
            ) from error
        yield


def clear_run(folder: Path) -> None:
    """Remove what an earlier run left; its log stays, because the engine of the new run writes there already."""
    for name in _CHILDREN - _KEPT:
        child = folder / name
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink(missing_ok=True)
