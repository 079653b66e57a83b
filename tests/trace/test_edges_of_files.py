"""Who may do what with a file that we write, and what is said if that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mismatch_cli.trace import files
from mismatch_cli.trace.files import open_to_append, write_atomically, write_named


def named(path: Path, text: str) -> None:
    write_named(path, text, replace=False)


def append(path: Path, text: str) -> None:
    with open_to_append(path) as file:
        file.write(text.encode())


@pytest.mark.parametrize("write", [write_atomically, named, append])
def test_a_text_file_may_be_read_and_written_but_not_executed(
    write: Callable[[Path, str], None], tmp_path: Path
) -> None:
    """By everybody, as any other program's: the user's umask takes rights away."""
    for umask, mode in ((0, 0o666), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            write(path := tmp_path / f"{umask}.txt", "text")
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_what_a_shell_has_opened_is_written_and_not_replaced(folder: str, tmp_path: Path) -> None:
    """As /dev/stdout after `> FILE`: the shell's file, whatever it holds."""
    if not Path(folder).is_dir():
        pytest.skip(f"there is no {folder}")
    with open(tmp_path / "out", "w+", encoding="utf-8") as file:
        file.write("older and longer")
        file.flush()
        named(Path(folder) / str(file.fileno()), "new")
        file.seek(0)
        assert file.read() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_only_our_own_name_of_a_file_grows(tmp_path: Path) -> None:
    """The file of the other name, a hard link, stays as it was."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.write_text("old\n", encoding="utf-8")
    os.link(theirs, ours)
    append(ours, "first\n")
    append(ours, "second\n")
    assert ours.read_text(encoding="utf-8") == "old\nfirst\nsecond\n"
    assert theirs.read_text(encoding="utf-8") == "old\n"
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


@pytest.mark.parametrize(
    ("free", "error", "reason"),
    [
        (2**16 - 1, RuntimeError("of a library"), os.strerror(errno.ENOSPC)),
        (2**16, RuntimeError("of a library"), "of a library"),
        (0, PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_a_librarys_error_on_a_full_disk_is_that_it_is_full(free, error, reason, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    sentence = str(files.could_not_write(Path("run/trace.parquet"), error))
    assert sentence.startswith(f"Could not write run/trace.parquet ({reason}). Existing files")
