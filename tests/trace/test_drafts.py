"""Replacing files and folders: a kill or a failure before any operation leaves one of the two,
and nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.operations import KILL, attempt, faults
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.trace.drafts import draft, files_in, remove_unfinished
from mismatch_cli.trace.files import replacing, replacing_entries, replacing_folder, write_named
from mismatch_cli.trace.run_folder import claim_folder
from tests.folders import texts, write_files
from tests.leftovers import leave_draft
from tests.tiers import at_night

OLD = {
    "trace/a": "old",
    "trace/b": "old",
    "page": "old",
    "plots/x.png": "old",
    "plots/y.png": "old",
}
USERS = {"thesis.txt": "mine", "plots/mine.png": "mine", ".backup.20261122.part/a.jpg": "mine"}


def replace_file(folder: Path) -> None:
    with replacing(folder / "page") as new:
        new.write_text("new")


def replace_named(folder: Path) -> None:
    write_named(folder / "page", "new", replace=True)


def replace_folder(folder: Path) -> None:
    with replacing_folder(folder / "trace") as new:
        write_files(new, {"a": "new", "c": "new"})


def replace_entries(folder: Path) -> None:
    def old() -> list[Path]:
        return [folder / name for name in OLD if name != "page"]

    with replacing_entries(folder / "page", old) as new:
        write_files(new, {"trace/a": "new", "page": "new", "plots/x.svg": "new"})


NEW: dict[Callable[[Path], None], dict[str, str]] = {
    replace_file: OLD | {"page": "new"},
    replace_named: OLD | {"page": "new"},
    replace_folder: {name: text for name, text in OLD.items() if name != "trace/b"}
    | {"trace/a": "new", "trace/c": "new"},
    replace_entries: {"trace/a": "new", "page": "new", "plots/x.svg": "new"},
}


@pytest.mark.parametrize(
    "action",
    [replace_file, *at_night(*(action for action in NEW if action is not replace_file))],
    ids=lambda action: action.__name__,
)
@pytest.mark.parametrize("before", [OLD, *at_night({})], ids=["over an older one", "new"])
def test_one_of_the_two_is_complete_whenever_a_kill_or_a_failure_comes(action, before, tmp_path):
    folder, users = tmp_path / "run", USERS if before else {}
    after = NEW[action] if before else {k: v for k, v in NEW[action].items() if v == "new"}

    def act() -> int:
        try:
            action(folder)
        except (MismatchError, OSError):
            return 1
        return 0

    def prepare() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return write_files(folder, before | users)

    if action is replace_entries and not before:
        return  # it names what goes
    tried = 0
    for fault in faults(act, prepare):
        outcome = attempt(act, prepare(), fault)
        assert outcome.code in ((0, 1) if fault.what != KILL else (-9,)), (fault, outcome)
        with claim_folder(folder, lambda: None):
            contents = texts(folder)
        contents.pop(".lock")
        assert contents in (before | users, after | users), (fault, outcome)
        assert outcome.code or contents == after | users, (fault, outcome)
        tried += 1
    assert tried >= 20


def test_only_a_draft_with_our_mark_whose_process_is_gone_is_removed(tmp_path):
    theirs = [
        ".backup.20261122.part/photos/a.jpg",
        ".notes.0123abcd.part",
        ".x.0123abcd.mismatch-cli.part/a.jpg",
    ]
    write_files(tmp_path, dict.fromkeys(theirs, "mine"))
    (tmp_path / ".backup.20261123.part").mkdir()
    dead = leave_draft(tmp_path, "page")
    killed_before_its_mark = tmp_path / ".page.89abcdef.mismatch-cli.part"
    killed_before_its_mark.mkdir()
    with draft(tmp_path / "page") as alive:
        remove_unfinished(tmp_path)
        assert alive.is_dir() and not dead.exists() and not killed_before_its_mark.exists()
    assert not alive.exists()
    assert {*texts(tmp_path)} == {*theirs} and (tmp_path / ".backup.20261123.part").is_dir()


def test_a_process_that_was_forked_meanwhile_does_not_keep_a_draft_alive(tmp_path):
    script = (
        "import os, sys, time; from pathlib import Path; from mismatch_cli.trace.drafts import "
        "draft\n"
        "with draft(Path(sys.argv[1]) / 'page'):\n"
        "    os.write(1, b'forked\\n' if os.fork() else b'drafted\\n'); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    # Each has run what it does after a fork
    said = {process.stdout.readline() for _ in range(2)}
    assert said == {b"forked\n", b"drafted\n"}
    remove_unfinished(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    process.kill()
    process.wait()
    os.killpg(process.pid, 0)  # its child is there still
    remove_unfinished(tmp_path)
    os.killpg(process.pid, signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_a_file_that_appears_meanwhile_is_neither_replaced_nor_removed(tmp_path, monkeypatch):
    """Whether it comes before the old ones are listed, or between that and their renaming."""
    for moment in range(1, 4):
        folder, listed = write_files(tmp_path / str(moment), OLD), []

        def list_files(path: Path, folder=folder, listed=listed, moment=moment) -> set[Path]:
            listed.append(path)
            paths = files_in(path)
            if len(listed) == moment:
                write_files(folder, {"trace/notes.txt": "mine"})
            return paths

        monkeypatch.setattr("mismatch_cli.trace.drafts.files_in", list_files)
        try:
            replace_entries(folder)
            expected = NEW[replace_entries]
        except MismatchError as error:
            assert "trace/notes.txt has appeared meanwhile" in str(error)  # noqa: PT017 - either end is right
            expected = OLD
        assert texts(folder) == expected | {"trace/notes.txt": "mine"}, moment
        assert len(listed) >= moment


def test_an_interrupt_right_after_the_folder_was_made_leaves_nothing(tmp_path, monkeypatch):
    make = Path.mkdir

    def interrupted(path: Path, *arguments: object, **words: object) -> None:
        make(path, *arguments, **words)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), draft(tmp_path / "trace"):
        raise AssertionError("the draft was never begun")
    assert list(tmp_path.iterdir()) == []
