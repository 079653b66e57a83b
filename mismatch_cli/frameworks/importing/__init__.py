"""Turns dumps of other programs into traces: a file per format; `driver.py` writes, other
helpers read and check.
"""

import glob
import os
from pathlib import Path

from mismatch_cli.base.errors import MismatchError, denied
from mismatch_cli.trace.drafts import UNFINISHED
from mismatch_cli.trace.stores import is_store

# By the suffix
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pt": "pt", ".pth": "pt"}
SEALED = ".zst"  # after the suffix of a file of lines
PICKLES = (".pkl", ".pickle", ".dp")  # only those that a framework's `pickles.py` reads as data


def files_at(path: Path) -> tuple[list[Path], Path]:
    """The files that a path names (a file, a whole folder, or all files with that prefix) and their
    folder.

    Raises `MismatchError` where it names nothing, or a part of it may not be read.
    """
    if path.is_file():
        return [path], path.parent
    if path.is_dir():
        found = [path, *path.rglob("*")]  # which passes over folders that may not be read
        if closed := [p for p in found if p.is_dir() and not os.access(p, os.R_OK | os.X_OK)]:
            raise denied(closed[0])
        return [
            p for p in found if p.is_file() and not any(map(UNFINISHED.fullmatch, p.parts))
        ], path
    if files := [p for p in path.parent.glob(f"{glob.escape(path.name)}*") if p.is_file()]:
        return files, path.parent
    if is_store(path):
        raise MismatchError(
            f"{path} is remote, and import reads local files. Copy it to this machine first."
        )
    raise MismatchError(
        f"{path} does not exist. Name a dump: a file, several, or the folder of a run."
    )
