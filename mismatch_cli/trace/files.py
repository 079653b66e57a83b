"""Files and folders that are either there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mismatch_cli.errors import MismatchError, first_line

TEMPORARY_SUFFIX = ".part"
_NO_ROOM = 2**16  # bytes


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` and rename it over `path` once the block has written it.

    An exception leaves `path` as it was and removes the temporary file; a kill leaves the temporary file, which nothing
    reads and the next attempt overwrites. A full disk is a `MismatchError`.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise could_not_write(path, error) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """The same for a folder: the block fills `.NAME`, which is empty, and it becomes `NAME`.

    The block is to do nothing but write: whatever fails in it is said to be a failure to write.
    """
    temporary = folder.with_name(f".{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # what a kill left behind
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except Exception as error:  # torch and safetensors have errors of their own for a disk that is full
        failure = could_not_write(folder, error)
        shutil.rmtree(temporary, ignore_errors=True)
        raise failure from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def could_not_write(path: Path, error: Exception) -> MismatchError:
    """What a person is told where a file could not be written, most often for want of room."""
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    if not isinstance(error, OSError) and shutil.disk_usage(path.parent).free < _NO_ROOM:
        reason = os.strerror(errno.ENOSPC)
    return MismatchError(
        f"Could not write {path} ({reason}). What was there before is kept: make room or choose another --output. "
        "A run that was being recorded or trained can go on with --resume."
    )


def _sync(path: Path) -> None:
    with open(path, "rb") as written:
        os.fsync(written.fileno())  # the rename must not become durable before the content


def write_atomically(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
