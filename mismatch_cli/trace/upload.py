"""Copies a run folder to an object store: shards first, the manifests that make them a trace
last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import IO

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.trace.drafts import UNFINISHED
from mismatch_cli.trace.manifest import FILE_NAME, missing
from mismatch_cli.trace.stores import StoreError, StorePath, forget

_AT_ONCE = 8  # files
_CHUNK = 2**23  # bytes


def check_upload(folder: Path, place: StorePath, *, force: bool) -> list[str]:
    """The files to upload, in order; a `MismatchError` if there is no trace, or already one at
    the place.
    """
    if not folder.is_dir():
        raise missing(folder)
    files = sorted(
        _files(folder), key=lambda name: (_says(name), Path(name).name == FILE_NAME, name)
    )
    manifests = [name for name in files if Path(name).name == FILE_NAME]
    if not manifests:
        raise MismatchError(f"{folder} contains no trace, so there is nothing to upload.")
    if existing := [name for name in manifests if not force and (place / name).exists()]:
        raise MismatchError(
            f"{place / existing[0]} already exists. Replace the run with --force, or name "
            "another place."
        )
    return files


def upload(
    folder: Path,
    place: StorePath,
    files: list[str],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy these files of a folder to a place; manifests are read before the other files, and
    written after them.

    A kill leaves no manifest there, and so no incomplete trace. Shards of an earlier trace there
    are removed.
    """
    fs = place.file_system
    told = {name: (folder / name).read_bytes() for name in files if _says(name)}
    try:
        for name in told:
            if (place / name).exists():
                fs.delete_file((place / name).inside)

        def put(name: str) -> None:
            with open(folder / name, "rb") as file:
                _write(place / name, file)
            advance(1)

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(put, (name for name in files if name not in told)))
        for name in (name for name in files if Path(name).name == FILE_NAME):
            for stale in (place / name).parent.glob("shard-*.parquet"):
                if f"{Path(name).parent}/{stale.name}".removeprefix("./") not in files:
                    fs.delete_file(stale.inside)
        for name, content in told.items():
            _write(place / name, BytesIO(content))
            advance(1)
        forget()  # the cached listings
    except OSError as error:
        if isinstance(error, MismatchError):
            raise
        raise StoreError(
            f"{place} could not be written ({first_line(error)}). It is not a trace until all "
            "files have arrived: run the same command again."
        ) from error


def _write(path: StorePath, content: IO[bytes]) -> None:
    with path.file_system.open_output_stream(path.inside) as stream:
        shutil.copyfileobj(content, stream, _CHUNK)


def _says(name: str) -> bool:
    """Whether a file lists what belongs to a trace."""
    return Path(name).name == FILE_NAME or Path(name).match("recorder-*.json")


def _files(folder: Path) -> Iterator[str]:
    """Every file by its path in the folder, except locks and files still being written."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not UNFINISHED.fullmatch(name)]
        for name in names:
            if not name.startswith("."):
                yield (Path(root) / name).relative_to(folder).as_posix()
