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
        return _files_below(path), path
    with_prefix = path.parent.glob(f"{glob.escape(path.name)}*")
    files = [file for file in with_prefix if file.is_file()]
    if files:
        return files, path.parent
    if is_store(path):
        raise MismatchError(
            f"{path} is remote, and import reads local files. Copy it to this machine first."
        )
    raise MismatchError(
        f"{path} does not exist. Name a dump: a file, several, or the folder of a run."
    )


def _files_below(folder: Path) -> list[Path]:
    """The finished files in a folder and its subfolders, all of which must be readable."""
    files: list[Path] = []
    for path in (folder, *folder.rglob("*")):
        # `rglob` passes over a folder that may not be read without an error.
        # Its files would be missing from the trace, and nobody would know.
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise denied(path)
        is_draft = any(map(UNFINISHED.fullmatch, path.parts))
        if path.is_file() and not is_draft:
            files.append(path)
    return files
