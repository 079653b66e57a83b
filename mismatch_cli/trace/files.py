"""Writes files and folders atomically, and never through a link.

Everything is created in a draft (`drafts.py`) and then renamed into place: a symbolic or hard link
at the final name is replaced, not written through.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.trace.drafts import NEW, draft, exchange, files_in, remove_unfinished

LOG_HEAD = b"mismatch-cli: log\n"  # the first line of our logs
_NO_ROOM = 2**16  # bytes


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new, empty file, and rename it to `path` once the block has written it.

    An exception leaves `path` unchanged. A full disk is a `MismatchError`.
    """
    try:
        with draft(path) as draft_folder:
            new = draft_folder / NEW
            os.close(_create(new))
            yield new
            _sync(new)
            os.replace(new, path)
    except OSError as error:
        raise could_not_write(path, error) from error


@contextmanager
def replacing_entries(path: Path, old: Callable[[], Collection[Path]]) -> Iterator[Path]:
    """Yield an empty folder; at the end its entries replace files of the folder around `path`, all
    at once.

    Replaced are files of the same names, and `old`, listed once the block has written everything.
    """
    with draft(path) as draft_folder:
        new = draft_folder / NEW
        new.mkdir()
        yield new
        for file in files_in(new):
            if not (new / file).is_symlink():
                _sync(new / file)
        try:
            exchange(draft_folder, old())
        except OSError as error:
            raise could_not_write(path, error) from error


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder, and rename it to `folder` once the block has filled it.

    An exception leaves `folder` unchanged. The block should only write: any exception in it is
    reported as a failure to write.
    """

    def old() -> list[Path]:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        return [folder / file for file in files_in(folder)]

    try:
        with replacing_entries(folder, old) as new:
            (new / folder.name).mkdir()
            yield new / folder.name
    except MismatchError:
        raise
    except Exception as error:  # torch and safetensors have their own errors for a full disk
        raise could_not_write(folder, error) from error


def write_atomically(path: Path, text: str) -> None:
    """Write one of our own text files, by atomic rename."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_named(path: Path, text: str, *, replace: bool) -> None:
    """Write a file that the user has named, where their shell would write it: through a link, into
    a pipe or a device.

    A regular file is replaced atomically. Without `replace`, only an empty one is: CI systems
    create one to fill. Raises a `MismatchError` if there is another file, or nothing can be
    written.
    """
    target = Path(os.path.realpath(path))
    try:
        is_of_system = path.absolute().parts[1:2] in (("dev",), ("proc",))
        if is_of_system or (path.exists() and not path.is_file()):
            # A pipe or device takes what is written, and cannot be replaced by a file.
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
            return
        remove_unfinished(target.parent, target.name)
        with draft(target) as draft_folder:
            new = draft_folder / NEW
            with open(_create(new), "w", encoding="utf-8") as file:
                file.write(text)
            _sync(new)
            is_empty = target.exists() and not target.stat().st_size
            if replace or is_empty:
                os.replace(new, target)
            else:
                # Unlike a rename, a link fails if another process has written the file meanwhile.
                os.link(new, target)
    except FileExistsError as error:
        raise MismatchError(
            f"{path} already exists. Replace it with --force, or name another file."
        ) from error
    except OSError as error:
        raise could_not_write(path, error) from error


def open_to_append(path: Path) -> BinaryIO:
    """Open one of our own files to append; a link is an `OSError`, and a file with hard links is
    copied first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opening a pipe that nobody reads would wait for ever: with O_NONBLOCK it fails.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    file = open(os.open(path, flags, 0o666), "ab")  # noqa: SIM115 - the caller closes it
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    if status.st_nlink == 1:
        return file
    # Another name of this file may be a file of somebody else, which must not grow.
    file.close()
    with replacing(path) as temporary:
        shutil.copyfile(path, temporary)
    return open(os.open(path, flags, 0o666), "ab")


def could_not_write(path: Path, error: Exception) -> MismatchError:
    """The error for a file that could not be written, most often for lack of space."""
    reason = first_line(error)
    if isinstance(error, OSError):
        reason = error.strerror or reason
    elif shutil.disk_usage(path.parent).free < _NO_ROOM:
        reason = os.strerror(errno.ENOSPC)  # libraries have their own errors for a full disk
    return MismatchError(
        f"Could not write {path} ({reason}). Existing files are unchanged: free some space or "
        "choose another --output. If a run was being recorded or trained, continue with --resume."
    )


def _create(path: Path) -> int:
    """A new file, open to write; an `OSError` if the name exists, even as a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _sync(path: Path) -> None:
    """Write the content of a file to disk: its rename must not become durable before."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
