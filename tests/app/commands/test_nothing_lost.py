"""Commands that replace an older result, killed and failing; `lab/kills.py operations`
does it everywhere.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lab.nothing_lost import CASES, Trial
from lab.operations import KILL, Fault, attempt
from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.probe import rescore
from mismatch_cli.trace.reader import Trace
from tests.folders import contents, write_files


@pytest.mark.slow
def test_an_import_that_is_killed_while_it_replaces_leaves_the_older_run_or_the_new_one(tmp_path):
    trial = Trial.of(CASES["import over an older one"], tmp_path / "trial")
    changes = attempt(trial.act(), trial.prepare(), Fault(10**9, KILL)).operations
    begins = next(number for number, change in enumerate(changes, 1) if "/old" in change)
    assert begins < len(changes) - 8
    for at in range(begins, len(changes) + 1):
        assert trial.wrong_after(Fault(at, KILL)) == [], changes[at - 1]


def test_an_import_that_cannot_rename_leaves_the_older_run(tmp_path, monkeypatch, capfd):
    """A file that appears meanwhile, and a network file system that has lost the folder."""
    folder = tmp_path / "run"
    words = ["import", str(bundled("dumps")), "-q", "-o", str(folder), "--force"]
    assert run(words) == 0 and run(["report", str(folder), "-q", "--no-plots"]) == 0
    before, rename = contents(folder), Path.rename

    def rename_late(path: Path, target: Path) -> Path:
        if path.name == "trace":
            write_files(folder, {"trace/notes.txt": "mine"})
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    assert run(words) == 1
    assert (
        "trace/notes.txt has appeared meanwhile, so nothing was replaced" in capfd.readouterr().err
    )
    assert contents(folder) == before | {"trace/notes.txt": b"mine"}
    (folder / "trace/notes.txt").unlink()

    def lose(path: Path, target: Path) -> Path:
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "rename", lose)
    assert run(words) == 1
    assert "Could not write" in capfd.readouterr().err and contents(folder) == before


_RESCORE = ["rescore", "--noise-responses", "2", "--threads", "1", "--no-plots", "-q"]


@pytest.mark.slow
def test_an_older_run_stays_until_the_one_that_replaces_it_is_complete(
    tmp_path, monkeypatch, capfd
):
    folder = tmp_path / "run"
    words = [*_RESCORE, "-o", str(folder)]
    shutil.copytree(bundled("traces") / "fp8-kv", folder / "trace")
    before = contents(folder)
    assert run([*words]) == 1 and "Continue it with --resume" in capfd.readouterr().err

    def fail(*_: object) -> None:
        raise MismatchError("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(rescore, "score_shards", fail)
        assert run([*words, "--force"]) == 1
    assert {
        name: content for name, content in contents(folder).items() if not name.startswith(".")
    } == before
    assert run(["report", str(folder), "--no-plots", "-o", str(tmp_path / "report")]) == 0
    assert "This reads the older run" in " ".join(capfd.readouterr().err.split())
    assert run([*words]) == 1 and "Continue it with --resume" in capfd.readouterr().err
    assert run([*words, "--resume"]) == 0, capfd.readouterr().err
    assert Trace.open(folder).manifest["command"] == "rescore"
    assert sorted(path.name for path in folder.iterdir()) == [
        "report.html",
        "summary.json",
        "trace",
    ]
    assert run(["import", str(bundled("dumps")), "-q", "-o", str(folder), "--force"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["trace"]


def test_an_import_replaces_a_run_and_the_one_that_was_to_replace_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(bundled("traces") / "fp8-kv", folder / "trace")

    def fail(*_: object) -> None:
        raise MismatchError("The disk is full.")

    monkeypatch.setattr(rescore, "score_shards", fail)
    assert run([*_RESCORE, "-o", str(folder), "--force"]) == 1
    assert (
        json.loads(next(folder.glob(".run*/new/trace/manifest.json")).read_text())["command"]
        == "rescore"
    )
    assert run(["import", str(bundled("dumps")), "-q", "-o", str(folder), "--force"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["trace"]


def test_the_files_of_a_user_under_names_of_unfinished_ones_stay(tmp_path, monkeypatch):
    from tests import pictures

    pictures.leave_blank(monkeypatch)
    for name in (
        ".backup.20261122.part/photos/a.jpg",
        ".notes.20261122.part",
        "plots/.a.0123abcd.part",
    ):
        write_files(tmp_path / "d", {name: "mine"})
    before = contents(tmp_path / "d")
    for words in (["report"], ["clipstats", str(bundled("traces") / "float32"), "-a", "pg-is"]):
        for force in ([], ["--force"]):
            assert run([*words, "-q", "-o", str(tmp_path / "d"), *force]) in (0, 1)
            assert before.items() <= contents(tmp_path / "d").items()


@pytest.mark.parametrize("flags", [["--plots", "png"], [], ["--no-plots"]])
def test_a_report_is_replaced_all_at_once(flags, tmp_path, monkeypatch):
    from tests import pictures

    pictures.leave_blank(monkeypatch)
    words = [
        "clipstats",
        str(bundled("traces") / "float32"),
        "-a",
        "pg-is",
        "-q",
        "-o",
        str(tmp_path / "out"),
    ]
    assert run([*words, "--plots", "svg"]) == 0
    before = contents(tmp_path / "out")

    def fail(*_: object) -> None:
        raise MismatchError("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("mismatch_cli.report.html.write_html", fail)
        assert run([*words, "-a", "cispo", *flags]) == 1
    assert contents(tmp_path / "out") == before
    assert run([*words, "-a", "cispo", *flags]) == 0
    names = {path.suffix for path in (tmp_path / "out/plots").glob("*")}
    assert names == ({".png"} if "png" in flags else set())
