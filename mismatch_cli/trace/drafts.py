"""Drafts: what is being written, beside what it will replace. Whenever a kill or a failure comes,
one of both counts.

A draft is a hidden folder with our mark in it; without the mark inside, nothing is ever removed.

    .trace.0123abcd.mismatch-cli.part/
        .mismatch-cli   the mark, locked while its process lives
        new             the file that is being written, or a folder of all entries to come
        old/            the files that go, moved here once `new` is complete
        ready/          `new` under its second name, once all of `old` is here

Without `ready`, the old files count, and `settle` moves them back; with it, the new ones count, and
`settle` moves them in. Whoever holds the folder next does the same for drafts whose process is
gone.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR

from mismatch_cli.base.errors import MismatchError

MARK = ".mismatch-cli"
NEW, _OLD, _READY = "new", "old", "ready"
_ENDING = f"{MARK}.part"
RUN = f".run{_ENDING}"  # the draft of a run, which outlives its process: --resume continues it
# Names that are no results: those of drafts, and of unfinished files of earlier versions, which
# stay where they are.
UNFINISHED = re.compile(rf"\..+(\.[0-9a-f]{{8}}\.part|{re.escape(_ENDING)})|{re.escape(RUN)}")
_LONGEST = 64  # characters of a name that are repeated in the name of its draft
_locks: set[int] = set()


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """A new draft beside `path`, settled and removed at the end of the block.

    Whatever a failing disk prevents at that end, the next command does.
    """
    draft_folder = path.with_name(f".{path.name[:_LONGEST]}.{secrets.token_hex(4)}{_ENDING}")
    mark = None
    # Ctrl-C may come between any two calls. The folder is made inside the `try`, or it would stay.
    try:
        draft_folder.mkdir(parents=True)
        mark = _lock(draft_folder, os.O_CREAT | os.O_EXCL)
        yield draft_folder
    finally:
        with suppress(OSError):
            _end(draft_folder)
        _unlock(mark)


def finish_run(draft_folder: Path, old: Collection[Path]) -> None:
    """Exchange the draft of a run, which is complete; if that fails, it stays to be resumed."""
    mark = _lock(draft_folder)
    try:
        exchange(draft_folder, old)
    finally:
        with suppress(OSError):
            _end(draft_folder)
        _unlock(mark)


def exchange(draft_folder: Path, old: Collection[Path]) -> None:
    """Put everything in `new`, which is complete, into the folder around a draft, in place of the
    files `old`.

    A `MismatchError`, and nothing changes, if other files appear among the old ones meanwhile.
    """
    folder = draft_folder.parent
    old_names = {path.relative_to(folder) for path in old}
    for name in sorted({path.parts[0] for path in old_names}):
        inside = {Path(name) / path for path in files_in(folder / name)}
        # A folder of which nothing stays goes as a whole, with a single rename.
        moved = [Path(name)] if inside <= old_names else sorted(inside & old_names)
        for path in moved:
            (draft_folder / _OLD / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).rename(draft_folder / _OLD / path)
    strange = sorted(files_in(draft_folder / _OLD) - old_names)
    if strange:
        raise MismatchError(
            f"{folder / strange[0]} has appeared meanwhile, so nothing was replaced. "
            "Move it away, and run the command again."
        )
    (draft_folder / NEW).rename(draft_folder / _READY)
    try:
        settle(draft_folder)
    except OSError as error:
        raise MismatchError(
            f"What is new in {folder} is complete, but could not be moved into place "
            f"({error.strerror}). The next command that writes there does it."
        ) from error


def settle(draft_folder: Path) -> None:
    """Undo the replacement that a draft stands for, or finish it if all that goes has been moved
    aside.
    """
    if _mode(draft_folder / _READY) is None:
        _move(draft_folder / _OLD, draft_folder.parent, over=False)
    else:
        _move(draft_folder / _READY, draft_folder.parent, over=True)


def remove_unfinished(folder: Path, beginning: str = "") -> None:
    """Settle and remove the drafts directly in a folder whose processes are gone, except that of a
    run to be resumed.

    With `beginning`, only of names that start with it, where other processes write to the same
    folder.
    """
    if not _is_folder(folder):
        return
    for draft_folder in sorted(folder.glob(f".{beginning}*{_ENDING}")):
        if _is_folder(draft_folder):
            clear(draft_folder)


def finish_exchanges(folder: Path) -> None:
    """Settle what was replaced by processes that are gone, for a reader: it does not hold the
    folder.
    """
    for draft_folder in folder.glob(f".*{_ENDING}"):
        with suppress(OSError):  # it may not write here
            if _is_folder(draft_folder) and _is_folder(draft_folder / _OLD):
                clear(draft_folder)


def clear(draft_folder: Path) -> None:
    """Settle and remove a draft if it has our mark and its process is gone; the draft of a run
    stays to be resumed.
    """
    try:
        mark = _lock(draft_folder)
    except FileNotFoundError:  # killed before there was a mark
        with suppress(OSError):
            draft_folder.rmdir()
        return
    except BlockingIOError:
        return
    try:
        _end(draft_folder)
    finally:
        _unlock(mark)


def is_begun(new: Path) -> bool:
    """Whether something has been written into the `new` of a draft."""
    return _is_folder(new) and any(new.iterdir())


def _end(draft_folder: Path) -> None:
    """Settle a draft and remove it.

    `ready` goes after `old`, whose files it forbids to move back, and the mark last: a kill must
    not leave files that nobody may remove.
    """
    settle(draft_folder)
    if draft_folder.name == RUN and is_begun(draft_folder / NEW):
        return
    last = [draft_folder / _READY, draft_folder / MARK]
    first = [path for path in draft_folder.iterdir() if path not in last]
    for path in first + last:
        if _is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    draft_folder.rmdir()


def _move(source: Path, target: Path, *, over: bool) -> None:
    """Move everything in a folder, if it exists, into another: over files of the same name, or
    beside all others.
    """
    if not _is_folder(source):
        return
    for path in list(source.iterdir()):
        there = target / path.name
        if _is_folder(path) and _is_folder(there):
            _move(path, there, over=over)
        elif over or _mode(there) is None:
            path.replace(there)
        else:
            raise FileExistsError(f"{there} is in the way of {path}")


def files_in(path: Path) -> set[Path]:
    """The files in a folder, relative to it; a file has itself."""
    if _is_folder(path):
        return {file.relative_to(path) for file in path.rglob("*") if not _is_folder(file)}
    if _mode(path) is None:
        return set()
    return {Path()}


def _is_folder(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    """The mode of a file, None without one; any other failure is an error, since it does not say
    that there is none.
    """
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lock(draft_folder: Path, create: int = 0) -> int:
    """Open the mark of a draft and lock it; a `BlockingIOError` if its process lives."""
    mark = os.open(draft_folder / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o666)
    _locks.add(mark)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # A file system may have no locks, and can be written to all the same.
        # A new draft needs none: its name is random, so nobody else has it.
        if not create:
            _unlock(mark)
            raise
    return mark


def _unlock(mark: int | None) -> None:
    """Close a mark, which releases its lock; a child that was forked meanwhile has closed it."""
    if mark in _locks:
        _locks.discard(mark)
        os.close(mark)


def _forget() -> None:
    """A forked child must not keep the drafts of its parent alive."""
    for mark in _locks:
        os.close(mark)
    _locks.clear()


os.register_at_fork(after_in_child=_forget)
