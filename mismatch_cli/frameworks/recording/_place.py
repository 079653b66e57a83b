"""Which folder a recording goes into: one of its own, unless the run is resumed or its other
ranks are there.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.trace.manifest import FILE_NAME, VOCABULARY, read_manifest, shards_in
from mismatch_cli.trace.recorder_notes import NOTE, RECORD

RANK_LOCK = ".recorder-{:05d}.lock"  # held by a rank while it records
_LOCKS = ".recorder-[0-9]*.lock"
_NOTES = NOTE.replace("{:05d}", "*")
_CHOICE = ".recorder-choice.lock"
_PATIENCE = 10.0  # seconds for the other ranks to choose


@contextmanager
def choosing(asked: Path) -> Iterator[None]:
    """Let one rank choose at a time: whether a rank lives shows only in its lock."""
    asked.mkdir(parents=True, exist_ok=True)
    file = os.open(asked / _CHOICE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        until = time.monotonic() + _PATIENCE
        while not _locked(file) and time.monotonic() < until:
            time.sleep(0.02)
        yield
    finally:
        os.close(file)
        with suppress(OSError):
            (asked / _CHOICE).unlink()


def places(asked: Path, rank: int, *, resume: bool) -> Iterator[Path]:
    """Where a rank may record, the best place first, the last one new: `recorded`, `recorded-2`, ….

    A resumed run continues the newest recording. Any other gets a folder without responses, which
    is emptied, or the one in which other ranks record at this moment and this rank has not: the
    ranks of a run begin together.
    """
    existing = list(_existing(asked))
    if resume:
        yield from (
            folder
            for folder in reversed(existing)
            if shards_in(folder) and not _is_live(folder, rank)
        )
    for folder in existing:
        if _is_other(folder) or _is_live(folder, rank):
            continue
        if _others_live(folder, rank):
            if not any(folder.glob(f"shard-{rank:05d}-*.parquet")):
                yield folder
        elif not shards_in(folder):
            _empty(folder)
            yield folder
    yield next(folder for folder in _numbered(asked) if not folder.exists())


def _numbered(asked: Path) -> Iterator[Path]:
    yield asked
    for number in count(2):
        yield asked.with_name(f"{asked.name}-{number}")


def _existing(asked: Path) -> Iterator[Path]:
    for folder in _numbered(asked):
        if not folder.is_dir():
            return
        yield folder


def _is_other(folder: Path) -> bool:
    """Whether a folder holds something that no recorder wrote."""
    if (folder / "trace" / FILE_NAME).exists():
        return True
    if (folder / FILE_NAME).exists():
        try:
            return read_manifest(folder).get("command") != RECORD
        except MismatchError:
            return True
    return bool(shards_in(folder)) and not any(folder.glob(_NOTES))


def _empty(folder: Path) -> None:
    """Remove what a recorder leaves that recorded nothing: a crashed run's description must not
    bind the next one.
    """
    for path in (folder / FILE_NAME, folder / VOCABULARY, *folder.glob(_NOTES)):
        path.unlink(missing_ok=True)


def _is_live(folder: Path, rank: int) -> bool:
    return _is_held(folder / RANK_LOCK.format(rank))


def _others_live(folder: Path, rank: int) -> bool:
    own = RANK_LOCK.format(rank)
    return any(_is_held(path) for path in folder.glob(_LOCKS) if path.name != own)


def _is_held(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _locked(file)
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
