"""Writes files and folders atomically, and never through a link.

Everything is created exclusively under a new, unused name and then renamed into place: a symbolic or hard link at the
final name is replaced, not written through.
"""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mismatch_cli.errors import MismatchError, first_line

UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.part")  # names of unfinished files, also after a kill
LOG_HEAD = b"mismatch-cli: log\n"  # the first line of our logs
_NO_ROOM = 2**16  # bytes
_LONGEST = 64  # characters of a name that are repeated in its temporary name


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new, empty file next to `path`, and rename it to `path` once the block has written it.

    An exception leaves `path` unchanged and removes the temporary file; a kill leaves the temporary file, which nothing
    reads and `remove_unfinished` finds by its name. A full disk is a `MismatchError`.
    """
    temporary = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(_create(temporary))
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
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder next to `folder`, which is removed at the end unless the block renames it."""
    temporary = _beside(folder)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Like `replacing`, for a folder: the new folder that the block fills becomes `folder`.

    The block should only write: any exception in it is reported as a failure to write.
    """
    try:
        with unfinished_folder(folder) as temporary:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file():
                    _sync(path)
            if folder.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            if folder.exists():
                os.replace(folder, before := _beside(folder))
                os.replace(temporary, folder)
                shutil.rmtree(before, ignore_errors=True)
            else:
                os.replace(temporary, folder)
    except Exception as error:  # torch and safetensors have their own errors for a full disk
        raise could_not_write(folder, error) from error


def write_atomically(path: Path, text: str) -> None:
    """Write one of our own text files, by atomic rename."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_named(path: Path, text: str, *, replace: bool) -> None:
    """Write a file that the user has named, where their shell would write it: through a link, into a pipe or a device.

    A regular file is replaced atomically. Without `replace`, only an empty one is: CI systems create one to fill.
    Raises a `MismatchError` if there is another file, or nothing can be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:_LONGEST]}.{secrets.token_hex(4)}.tmp")
    try:
        if (path.exists() and not path.is_file()) or path.absolute().parts[1:2] in (("dev",), ("proc",)):
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(_create(temporary), "w", encoding="utf-8") as file:
            file.write(text)
        _sync(temporary)
        if replace or (target.exists() and not target.stat().st_size):
            os.replace(temporary, target)
        else:
            os.link(temporary, target)  # fails if another process has written it meanwhile
    except FileExistsError as error:
        raise MismatchError(f"{path} already exists. Replace it with --force, or name another file.") from error
    except OSError as error:
        raise could_not_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def open_to_append(path: Path) -> BinaryIO:
    """Open one of our own files to append; a link is an `OSError`, and a file with hard links is copied first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    file = open(os.open(path, flags, 0o666), "ab")  # noqa: SIM115 - the caller closes it
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    if status.st_nlink == 1:
        return file
    file.close()
    with replacing(path) as temporary:
        shutil.copyfile(path, temporary)
    return open(os.open(path, flags, 0o666), "ab")


def remove_unfinished(folder: Path, beginning: str = "") -> None:
    """Remove what a killed process was writing directly in this folder; the caller must hold the folder.

    With `beginning`, only names that start with it, where other processes write to the same folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(f".{beginning}") and UNFINISHED.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def could_not_write(path: Path, error: Exception) -> MismatchError:
    """The error for a file that could not be written, most often for lack of space."""
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    if not isinstance(error, OSError) and shutil.disk_usage(path.parent).free < _NO_ROOM:
        reason = os.strerror(errno.ENOSPC)
    return MismatchError(
        f"Could not write {path} ({reason}). Existing files are unchanged: free some space or choose another --output. "
        "If a run was being recorded or trained, continue with --resume."
    )


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:_LONGEST]}.{secrets.token_hex(4)}.part")


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _sync(path: Path) -> None:
    with open(path, "rb") as written:
        os.fsync(written.fileno())  # the rename must not become durable before the content
