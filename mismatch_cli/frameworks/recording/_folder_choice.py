"""Which folder a recording goes into: one of its own, unless the run is resumed or its other
ranks are there.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, filterfalse
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
def choosing_alone(requested: Path) -> Iterator[None]:
    """A context in which no other rank of the run chooses its folder; the requested one exists
    from then on.
    """
    requested.mkdir(parents=True, exist_ok=True)
    # Whether a rank records in a folder shows only in its lock, which it takes after choosing.
    # Two ranks that chose at once would both find the folder free.
    lock = os.open(
        requested / _CHOICE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        until = time.monotonic() + _PATIENCE
        # A rank that hangs must not keep the others from training: after a while they choose too.
        while not _try_to_lock(lock) and time.monotonic() < until:
            time.sleep(0.02)
        yield
    finally:
        os.close(lock)
        with suppress(OSError):
            (requested / _CHOICE).unlink()


def candidate_folders(requested: Path, rank: int, *, resume: bool) -> Iterator[Path]:
    """Where a rank may record, the best folder first, the last one new: `recorded`, `recorded-2`,
    ….

    A resumed run continues the newest recording. Any other gets a folder without responses, which
    is emptied, or the one in which other ranks record at this moment and this rank has not: the
    ranks of a run begin together.
    """
    existing = list(_existing_folders(requested))
    if resume:
        for folder in reversed(existing):
            if shards_in(folder) and not _is_recording(folder, rank):
                yield folder
    for folder in existing:
        if _is_foreign(folder) or _is_recording(folder, rank):
            continue
        if _other_ranks_record(folder, rank):
            if not any(folder.glob(f"shard-{rank:05d}-*.parquet")):
                yield folder
        elif not shards_in(folder):
            _remove_descriptions(folder)
            yield folder
    yield next(filterfalse(Path.exists, _numbered_folders(requested)))


def _numbered_folders(requested: Path) -> Iterator[Path]:
    yield requested
    for number in count(2):
        yield requested.with_name(f"{requested.name}-{number}")


def _existing_folders(requested: Path) -> Iterator[Path]:
    for folder in _numbered_folders(requested):
        if not folder.is_dir():
            return
        yield folder


def _is_foreign(folder: Path) -> bool:
    """Whether a folder holds something that no recorder wrote."""
    if (folder / "trace" / FILE_NAME).exists():
        return True
    if (folder / FILE_NAME).exists():
        try:
            return read_manifest(folder).get("command") != RECORD
        except MismatchError:
            return True
    return bool(shards_in(folder)) and not any(folder.glob(_NOTES))


def _remove_descriptions(folder: Path) -> None:
    """Remove the files of a recorder that recorded nothing: a crashed run's description must not
    bind the next one.
    """
    for path in (folder / FILE_NAME, folder / VOCABULARY, *folder.glob(_NOTES)):
        path.unlink(missing_ok=True)


def _is_recording(folder: Path, rank: int) -> bool:
    """Whether a living process of this rank records in a folder."""
    return _is_held(folder / RANK_LOCK.format(rank))


def _other_ranks_record(folder: Path, rank: int) -> bool:
    own_lock = folder / RANK_LOCK.format(rank)
    return any(lock != own_lock and _is_held(lock) for lock in folder.glob(_LOCKS))


def _is_held(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    # Closing the file also releases the lock that the attempt may have taken.
    try:
        return not _try_to_lock(file)
    finally:
        os.close(file)


def _try_to_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
