"""A run folder put on an object store: shards first, and what makes them a trace last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import IO

from mismatch_cli.errors import MismatchError, first_line
from mismatch_cli.trace.manifest import FILE_NAME
from mismatch_cli.trace.stores import StoreError, StorePath, forget

_AT_ONCE = 8  # files
_CHUNK = 2**23  # bytes


def check_upload(folder: Path, place: StorePath, *, force: bool) -> list[str]:
    """The files that will be put there, in order; a `MismatchError` where there is no trace, or one at the place."""
    if not folder.is_dir():
        raise MismatchError(f"{folder} does not exist. Name a run folder that `mismatch-cli` wrote.")
    files = sorted(_files(folder), key=lambda name: (_says(name), Path(name).name == FILE_NAME, name))
    manifests = [name for name in files if Path(name).name == FILE_NAME]
    if not manifests:
        raise MismatchError(f"{folder} holds no trace: there is nothing to upload.")
    if there := [name for name in manifests if not force and (place / name).exists()]:
        raise MismatchError(
            f"{place / there[0]} is already there. Replace the run with --force, or name another place."
        )
    return files


def upload(folder: Path, place: StorePath, files: list[str], advance: Callable[[int], None] = lambda _: None) -> None:
    """Put these files of a folder at a place; what makes them a trace is read before the others, and put after them.

    A kill leaves no manifest there, and so no trace that lacks a part. Shards of a trace that was there before go.
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
        forget()  # what was not there, or was listed before
    except OSError as error:
        if isinstance(error, MismatchError):
            raise
        raise StoreError(
            f"{place} could not be written ({first_line(error)}). Nothing there counts as a trace until all of it is: "
            "type the same line again."
        ) from error


def _write(path: StorePath, content: IO[bytes]) -> None:
    with path.file_system.open_output_stream(path.inside) as stream:
        shutil.copyfileobj(content, stream, _CHUNK)


def _says(name: str) -> bool:
    """Whether a file says what belongs to a trace."""
    return Path(name).name == FILE_NAME or Path(name).match("recorder-*.json")


def _files(folder: Path) -> Iterator[str]:
    """Every file by its path in the folder, but for locks and what is being written."""
    for root, _, names in os.walk(folder):
        for name in names:
            if not name.startswith("."):
                yield (Path(root) / name).relative_to(folder).as_posix()
