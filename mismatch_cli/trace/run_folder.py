"""May a command write here? One rule for all: check, take the lock, check again, and hold it to the
end.

A process without the lock creates and deletes nothing; the system releases the lock of a process
that dies.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.trace.drafts import NEW, RUN, UNFINISHED, remove_unfinished
from mismatch_cli.trace.ownership import (
    FOLDERS,
    LOCK,
    LOG,
    PLOTS,
    REPORT,
    first_foreign,
    first_result,
    format_of,
    is_own_file,
    not_a_run_folder,
)
from mismatch_cli.trace.recording_folder import begun_replacement

_Key = tuple[int, int]  # of a file: device and inode
_held: dict[_Key, int] = {}  # the locks that this process holds
_OF_A_RUN = ("manifest.json", "trace/manifest.json", "metrics.jsonl")
_WRITTEN_IN = (*sorted(FOLDERS), "checkpoints", "traces/step-*")


def run_folder(
    folder: Path, *, resume: bool, force: bool, resumable: bool = True
) -> AbstractContextManager[None]:
    """Hold a folder to record into: a new one, or one of ours that may be replaced or resumed."""
    return claim_folder(
        folder, lambda: check_run_folder(folder, replaced=resume or force, resumable=resumable)
    )


def check_run_folder(folder: Path, *, replaced: bool, resumable: bool = True) -> None:
    """A `MismatchError` for a folder with foreign files, or with an old run that may not be
    replaced.
    """
    foreign = first_foreign(folder)
    if foreign:
        raise not_a_run_folder(folder, foreign)
    if not replaced and (first_result(folder) or begun_replacement(folder)):
        choices = "Continue it with --resume, replace" if resumable else "Replace"
        raise MismatchError(
            f"{folder} already exists. {choices} it with --force, or choose another --output."
        )


def report_folder(
    folder: Path, report_format: str, *, force: bool, own: bool = False, files: tuple[str, ...] = ()
) -> AbstractContextManager[None]:
    """Hold a folder to report into: a new one, one whose report has this format and is replaced, or
    the run's `own`.

    `force` writes into any other folder, but never replaces a file that is not ours. `files` are
    written beside the report.
    """

    def check() -> None:
        check_report_folder(folder, {report_format}, force=force or own)
        _check_free(folder, LOCK, *REPORT, *files)

    return claim_folder(folder, check)


def check_report_folder(
    folder: Path, renewed: Container[str] | None = None, *, force: bool
) -> None:
    """Refuse a folder with anything but a report in one of the formats to be `renewed`: by
    default, in any.
    """
    if force or all(_is_temporary(path) or _has_only_pictures(path) for path in folder.glob("*")):
        return
    report_format = format_of(folder)
    if report_format is None:
        raise MismatchError(
            f"{folder} holds other files. Write the report beside them with --force, or choose "
            "another --output."
        )
    if renewed is not None and report_format not in renewed:
        raise MismatchError(
            f"{folder} already exists. Replace its report with --force, or choose another --output."
        )


def picture_folder(folder: Path, *, force: bool) -> AbstractContextManager[None]:
    """Hold a folder to put a picture into its `plots/`: a new one, or one with a report of ours in
    any format, which stays.
    """

    def check() -> None:
        check_report_folder(folder, force=force)
        _check_free(folder, LOCK, PLOTS)

    return claim_folder(folder, check)


def training_folder(
    folder: Path, settings_file: str, is_same: Callable[[str], bool], *, resume: bool
) -> AbstractContextManager[None]:
    """Hold the folder of a training run, whose settings are those that `is_same` recognises.

    Nothing is ever overwritten; a resumed run has the same settings.
    """

    def check() -> None:
        _check_settings(folder, folder / settings_file, is_same, resume=resume)
        for pattern in ("*", "checkpoints/*", "traces/*"):
            for path in folder.glob(pattern):
                if path.is_symlink():
                    raise MismatchError(
                        f"{path} is a link: files written there would end up elsewhere. Remove the link."
                    )
        _check_free(folder, *REPORT, LOG, LOCK, "metrics.parquet")

    return claim_folder(folder, check)


def _check_settings(
    folder: Path, settings: Path, is_same: Callable[[str], bool], *, resume: bool
) -> None:
    """A `MismatchError` for a folder with other files, for a run that is not to be resumed, and for
    one with other settings.
    """
    if settings.is_file():
        same = is_same(settings.read_text(encoding="utf-8", errors="replace"))
        if resume and not same:
            raise UsageError(
                f"{settings} has different settings. Resume with the flags of that run, or choose "
                "another --output."
            )
        if not resume:
            how = "Continue it with --resume, or choose" if same else "Its settings differ. Choose"
            raise MismatchError(f"{folder} already exists. {how} another --output.")
        return
    if folder.exists() and not all(
        _is_temporary(path) or path.name == LOG for path in folder.iterdir()
    ):
        fault = "already exists, but contains no training run"
        if resume:
            fault = "contains no training run to resume"
        raise MismatchError(f"{folder} {fault}. Choose another --output.")


def folder_of_runs(folder: Path, report_format: str) -> AbstractContextManager[None]:
    """Hold the folder of several runs, for reports on all of them; each run has its own folder
    inside.
    """

    def check() -> None:
        report = () if format_of(folder) == report_format else REPORT
        for name in ("trace", "metrics.jsonl", *report):
            if os.path.lexists(folder / name):
                raise MismatchError(
                    f"{folder} is not a folder of runs: it contains {name}. Choose another "
                    "--output."
                )
        _check_free(folder, LOCK, *REPORT)

    return claim_folder(folder, check)


def check_file(path: Path, force: bool) -> None:
    """Refuse a file that cannot be written, before anything is read; an empty one, as CI makes
    it, may be replaced.
    """
    if not force and (path.is_dir() or (path.exists() and path.stat().st_size)):
        raise MismatchError(
            f"{path} already exists. Replace it with --force, or name another file."
        )
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise MismatchError(
            f"{path} cannot be written: {folder} is not a writable folder. Name another file."
        )


def _check_free(folder: Path, *names: str) -> None:
    """Refuse to write where one of these files, or a file in one of these folders, exists and is
    not ours.
    """
    for name in names:
        paths = [folder / name]
        if not paths[0].is_symlink():
            paths += [path for path in sorted(paths[0].glob("*")) if not _is_temporary(path)]
        for path in paths:
            if os.path.lexists(path) and not is_own_file(path, folder):
                raise MismatchError(
                    f"{path} is in the way, and mismatch-cli did not write it. "
                    "Move it away, or choose another --output."
                )


def check_apart(folder: Path, read: Path) -> None:
    """Refuse to write a run into a folder that is read, into a folder inside it, or into one
    that contains it.
    """
    output, source = folder.resolve(), read.resolve()
    if output.is_relative_to(source) or source.is_relative_to(output):
        raise MismatchError(
            f"--output {folder} overlaps the input {read}. Choose another --output."
        )


def _has_only_pictures(path: Path) -> bool:
    """Whether this is the `plots/` of a report, as `report --figure` writes it alone."""
    if path.name != PLOTS or not path.is_dir():
        return False
    return all(is_own_file(entry, path.parent) for entry in (path, *path.iterdir()))


def _is_temporary(path: Path) -> bool:
    """Whether a file is there only while something is being written."""
    return path.name == LOCK or UNFINISHED.fullmatch(path.name) is not None


@contextmanager
def claim_folder(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Hold `folder` exclusively for the block; `check`, called before and after locking, raises
    where we may not write.

    Inside a run, the writer of the run itself is kept out too. At the end the lock, and new folders
    that stayed empty, are removed.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise MismatchError(f"{folder} is a file. Choose another --output.")
    try:
        check()  # a refused folder stays as it is
    except MismatchError:
        if (folder / LOCK).is_file():
            with _locked(folder, fcntl.LOCK_EX):
                pass  # no writer: the folder's content is the reason
        raise
    with ExitStack() as stack:
        stack.callback(_remove_empty, _make(folder))
        outer = folder.resolve().parent
        if any((outer / name).is_file() for name in _OF_A_RUN):
            stack.enter_context(_locked(outer, fcntl.LOCK_SH))
        stack.enter_context(_locked(folder, fcntl.LOCK_EX))
        for root in (folder, folder / RUN / NEW):
            folders = [root]
            for pattern in _WRITTEN_IN:
                folders += root.glob(pattern)
            for written_in in folders:
                remove_unfinished(written_in)
        check()  # another process may have written before it released the lock
        yield


def _make(folder: Path) -> list[Path]:
    """Make the folder; returns what was made, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Hold the lock of a folder, exclusively or shared; a lock that this process already holds
    is enough.
    """
    file, key = _lock(folder, kind)
    if file is None:
        yield
        return
    _held[key] = file
    try:
        yield
    finally:
        # A child that was forked meanwhile has closed the lock: its parent still holds the folder.
        if _held.pop(key, None) is not None:
            _let_go(folder / LOCK, file)


def _lock(folder: Path, kind: int) -> tuple[int | None, _Key]:
    """Lock the file that has the lock's name now; no file if this process holds the lock already,
    and a shared one is wanted.
    """
    path = folder / LOCK
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            _make(folder)  # the previous holder removed it, because it was empty
            continue
        except OSError as error:
            raise _unwritable(path if path.is_symlink() else folder, error) from error
        key = _key(os.fstat(file))
        try:
            if kind == fcntl.LOCK_SH and key in _held:
                os.close(file)
                return None, key
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            # A lock is a file that its holder may remove, also between our opening and locking it.
            # A lock on a file that has lost the name excludes nobody: then a new one is opened.
            with suppress(FileNotFoundError):
                if _key(os.lstat(path)) == key:
                    return file, key
        except BlockingIOError as error:
            os.close(file)
            raise MismatchError(
                f"{folder} is being written by another process. Wait for it, or choose another "
                "--output."
            ) from error
        except OSError as error:
            os.close(file)
            raise _unwritable(folder, error) from error
        os.close(file)


def _let_go(path: Path, file: int) -> None:
    """Remove the lock file if nobody shares it and it is only a lock, then release it."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(file)
        if status.st_nlink == 1 and not status.st_size and _key(os.lstat(path)) == _key(status):
            path.unlink()
    os.close(file)


def _key(status: os.stat_result) -> _Key:
    return status.st_dev, status.st_ino


def _forget() -> None:
    """A forked child must not hold a folder after its parent has gone."""
    for file in _held.values():
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def _unwritable(path: Path, error: OSError) -> MismatchError:
    reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
    return MismatchError(f"{path} cannot be written ({reason}). Choose another --output.")
