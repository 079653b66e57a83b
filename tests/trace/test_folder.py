"""May a command write here? What is ours, who holds the folder, and where links lead."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.drafts import NEW, RUN
from mismatch_cli.trace.files import replacing_folder
from mismatch_cli.trace.ownership import first_foreign, first_result, remove_results
from mismatch_cli.trace.recording_folder import (
    begun_replacement,
    drop_replacement,
    replacing_run,
    replacing_when_complete,
)
from mismatch_cli.trace.run_folder import claim_folder, report_folder, run_folder, training_folder
from tests.folders import contents, write_files
from tests.leftovers import leave_draft
from tests.paths import ROOT

FLOAT32 = str(bundled("traces") / "float32")
DUMP = str(bundled("dumps"))
# Files of the user under names that are ours.
OF_THE_USER = {
    "summary.json": '{"mine": 1}',
    "report.html": "<h1>my thesis about mismatch-cli</h1>",
    "plots/loss.png": "\x89PNG mine",
    "clipstats/notes.md": "mine",
    "clipstats/summary.json": '{"format": "mine"}',
    "diagnosis/report.html": "mine",
    "tokens.csv": "token,count\na,1\n",
    "tokens.parquet": "mine",
    "responses.jsonl": '{"text": "mine"}\n',
    "perfectible.jsonl": '{"problem": "mine"}\n',
    "trace/shard-00000.parquet": "mine",
    "trace/manifest.json": "{}",
    "held-out/vocab.parquet": "mine",
    "distributions/notes.txt": "mine",
    "log/hf.log": "mine",
    ".lock": "mine",
    "trace.part/data": "mine",
    "thesis.txt": "mine",
}
WRITERS = {
    "probe": ["probe", "--engine", "hf"],
    "curate": ["curate", "--engine", "hf"],
    "import": ["import", DUMP],
    "rescore": ["rescore"],
    "train": ["train"],
}
REPORTERS = {
    "report": ["report", FLOAT32, "--export", "csv"],
    "clipstats": ["clipstats", FLOAT32, "-a", "pg-is"],
    "compare": ["compare"],
    "diagnose": ["diagnose", FLOAT32],
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> Path:
    """A run folder with everything that reading commands make of a trace."""
    folder = tmp_path_factory.mktemp("reported") / "run"
    shutil.copytree(FLOAT32, folder / "trace")
    with pytest.MonkeyPatch.context() as patch:
        from tests import pictures

        pictures.leave_blank(patch)
        for kind in ("csv", "parquet", "jsonl"):
            words = ["report", str(folder), "-q", "--export", kind, "--plots", "png"]
            assert run(words) == 0
        for command in (["clipstats", "-a", "pg-is"], ["diagnose"]):
            assert run([*command, str(folder), "-q"]) == 0
    return folder


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_no_run_replaces_a_file_of_the_user_whatever_its_name(command, force, tmp_path, capfd):
    if command == "train" and force:
        return  # it has no --force
    for number, (name, text) in enumerate(OF_THE_USER.items()):
        folder = tmp_path / str(number)
        write_files(folder, {name: text})
        before = contents(folder)
        assert run([*WRITERS[command], "-q", "-o", str(folder), *force]) == 1, name
        said = capfd.readouterr().err
        assert contents(folder) == before and said.count("\n") == 1, (name, said)
        assert "--output" in said, said


@pytest.mark.parametrize("command", REPORTERS)
def test_a_report_is_written_beside_the_files_of_the_user_and_never_over_them(
    command, tmp_path, capfd, monkeypatch
):
    from tests import pictures

    pictures.leave_blank(monkeypatch)
    for name, text in OF_THE_USER.items():
        write_files(tmp_path / "proj", {name: text})
    before = contents(tmp_path / "proj")
    for force in ([], ["--force"]):
        assert run([*REPORTERS[command], "-q", "-o", str(tmp_path / "proj"), *force]) == 1
        assert contents(tmp_path / "proj") == before and "Traceback" not in capfd.readouterr().err
    for name in (".lock", "summary.json", "report.html", "plots/loss.png", "tokens.csv"):
        (tmp_path / "proj" / name).unlink()
        before.pop(name)
    assert run([*REPORTERS[command], "-q", "-o", str(tmp_path / "proj"), "--force"]) == 0
    after = contents(tmp_path / "proj")
    assert before.items() <= after.items() and "report.html" in after


def test_everything_that_commands_write_is_known_as_ours_and_a_new_run_removes_it(
    reported, tmp_path
):
    folder = shutil.copytree(reported, tmp_path / "run")
    assert first_foreign(folder) is None
    write_files(folder, {"log/hf.log": "mismatch-cli: log\n"})
    draft = leave_draft(folder, "trace")
    remove_results(folder)
    assert sorted(path.name for path in folder.iterdir()) == [draft.name, "log"]
    assert first_foreign(folder) is None and first_result(folder) is None


def test_a_run_that_replaces_another_keeps_the_lock_and_the_logs(reported, tmp_path):
    folder = shutil.copytree(reported, tmp_path / "run")
    write_files(folder, {"log/hf.log": "mismatch-cli: log\n"})
    with claim_folder(folder, lambda: None):
        with replacing_run(folder) as new:
            write_files(new, {"trace/manifest.json": "{}"})
        assert sorted(contents(folder)) == [".lock", "log/hf.log", "trace/manifest.json"]


def test_a_file_that_cannot_be_read_now_is_not_taken_for_that_of_another(
    reported, tmp_path, monkeypatch
):
    """Neither left out when ours are replaced, nor told as a file of the user."""
    folder, read = shutil.copytree(reported, tmp_path / "run"), Path.read_text

    def fail(path, *arguments, **named):
        if path.name == "summary.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", fail)
    for reader in (first_foreign, remove_results):
        with pytest.raises(
            MismatchError, match=r"summary.json cannot be read \(Stale file handle\)"
        ):
            reader(folder)


def test_a_run_is_not_recorded_through_a_link(reported, tmp_path, capfd):
    folder, elsewhere = shutil.copytree(reported, tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / RUN).symlink_to(elsewhere)
    assert run(["rescore", "-q", "-o", str(folder), "--force"]) == 1
    assert "which mismatch-cli did not write" in capfd.readouterr().err and not list(
        elsewhere.iterdir()
    )


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-2", "traces/step-1"])
def test_a_training_run_is_not_resumed_through_a_link(tmp_path, name):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_files(folder, {"config.toml": "same"})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(elsewhere)
    held = training_folder(folder, "config.toml", lambda text: text == "same", resume=True)
    with pytest.raises(MismatchError, match=f"{name} is a link"), held:
        raise AssertionError
    assert not list(elsewhere.iterdir())


def test_a_folder_that_is_a_link_is_not_replaced(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write_files(elsewhere, {"mine.txt": "mine"})
    (tmp_path / "model").symlink_to(elsewhere)
    refused = pytest.raises(MismatchError, match="Too many levels of symbolic links")
    with refused, replacing_folder(tmp_path / "model") as new:
        (new / "theirs.txt").write_text("theirs")
    assert contents(elsewhere) == {"mine.txt": b"mine"} and (tmp_path / "model").is_symlink()


def test_force_replaces_our_run_but_no_foreign_file_in_it(reported, tmp_path, capfd):
    folder = shutil.copytree(reported, tmp_path / "run")
    assert run(["import", DUMP, "-q", "-o", str(folder)]) == 1
    assert "already exists. Replace it with --force" in capfd.readouterr().err
    for name in ("plots/mine.png", "trace/notes.txt", "clipstats/mine/figure.png", "tokens.csv"):
        old = (folder / name).read_bytes() if (folder / name).exists() else None
        write_files(folder, {name: "mine"})
        before = contents(folder)
        assert run(["import", DUMP, "-q", "-o", str(folder), "--force"]) == 1
        held = name if name.count("/") < 2 else name.rpartition("/")[0]
        assert f"it contains {held}, which mismatch-cli did not write" in " ".join(
            capfd.readouterr().err.split()
        )
        assert contents(folder) == before
        (folder / name).unlink()
        if old is not None:
            (folder / name).write_bytes(old)
        elif name.count("/") == 2:
            (folder / name).parent.rmdir()
    assert run(["import", DUMP, "-q", "-o", str(folder), "--force"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["trace"]


LINKS = (
    "summary.json",
    "report.html",
    "plots",
    "plots/a.png",
    ".lock",
    "log",
    "log/hf.log",
    "trace",
    "tokens.csv",
)
LINKS += (
    "summary.json.part",
    ".summary.json.0123abcd.part",
    "trace.part",
    "clipstats",
    "distributions",
)
LINKS += ("checkpoints", "metrics.jsonl", "config.toml", "model", "traces")


@pytest.mark.slow
@pytest.mark.parametrize("hard", [False, True], ids=["symbolic", "hard"])
def test_nothing_is_written_through_a_link(hard, tmp_path, capfd, monkeypatch):
    """Whatever a command does about a link in its folder: the link's target stays as it was."""
    from tests import pictures

    pictures.leave_blank(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    train = ["train", "--engine", "hf", "--model", str(tmp_path / "none"), "--resume"]
    for number, name in enumerate(LINKS):
        for command in (["import", DUMP, "--force"], ["diagnose", FLOAT32, "--force"], train):
            folder, elsewhere = (
                tmp_path / f"{number}-{command[0]}",
                tmp_path / f"{number}-{command[0]}-elsewhere",
            )
            precious = ("inside/precious.txt", "precious.txt")
            write_files(elsewhere, dict.fromkeys(precious, "precious"))
            (folder / name).parent.mkdir(parents=True)
            is_folder = "." not in name
            if hard and is_folder:
                continue
            target = elsewhere if is_folder else elsewhere / "precious.txt"
            (os.link if hard else os.symlink)(target, folder / name)
            before = contents(elsewhere)
            code = run([*command, "-q", "-o", str(folder)])
            said = capfd.readouterr().err
            assert code in (0, 1, 2) and said.count("\n") == min(code, 1) and "bug" not in said, (
                name,
                command,
                said,
            )
            assert contents(elsewhere) == before, (name, command)


def test_two_processes_cannot_hold_one_folder_and_the_refused_one_changes_nothing(
    tmp_path, capfd, monkeypatch
):
    from tests import pictures

    pictures.leave_blank(monkeypatch)
    folder = tmp_path / "run"
    shutil.copytree(FLOAT32, folder / "trace")
    draft = leave_draft(folder, "trace")
    with held_by_another(folder):
        before = contents(folder)
        for command in (
            *WRITERS.values(),
            *REPORTERS.values(),
            ["clipstats", str(folder)],
            ["report", str(folder)],
        ):
            own = command[-1] == str(folder)
            arguments = [] if own else ["-o", str(folder)]
            for flag in ([], ["--force"], ["--resume"]):
                if "--resume" in flag and command[0] not in ("probe", "curate", "rescore", "train"):
                    continue
                if flag == ["--force"] and command[0] == "train":
                    continue
                assert run([*command, "-q", *arguments, *flag]) in (1, 2), command
                said = capfd.readouterr().err
                assert "is being written by another process" in said or (
                    not own and "--force" not in flag
                ), said
                assert contents(folder) == before and draft.is_dir()
    assert run(["report", str(folder), "-q"]) == 0
    assert not (folder / ".lock").exists() and not draft.exists()


@contextmanager
def held_by_another(folder: Path) -> Iterator[None]:
    """A process that holds a folder until the block ends, and is then killed."""
    # The test's unfinished folder must stay: what a claim clears is not the subject here.
    # A child that outlives the holder does not hold the folder.
    script = """
import sys, os, time; from pathlib import Path; from mismatch_cli.trace import run_folder as folder
folder.remove_unfinished = lambda _: None
with folder.claim_folder(Path(sys.argv[1]), lambda: None):
    os.fork() or time.sleep(60)
    print('held', flush=True); time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout.readline() == b"held\n"
        yield
    finally:
        process.kill()
        process.wait()
        os.killpg(process.pid, 0)  # its child is there still
        with claim_folder(folder / "another", lambda: None):
            pass
        with claim_folder(folder, lambda: None):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_refused_folder_with_a_writer_is_refused_for_its_writer(tmp_path):
    """What it holds may be unfinished; without a writer, its content is the reason."""
    folder = tmp_path / "run"
    reason = MismatchError("holds something else")

    def refuse() -> None:
        raise reason

    with (
        claim_folder(folder, lambda: None),
        pytest.raises(MismatchError, match="another process"),
        claim_folder(folder, refuse),
    ):
        pass
    for name in (".lock", "notes.txt"):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
        with pytest.raises(MismatchError, match="holds something else"):
            claim_folder(folder, refuse).__enter__()


def test_the_lock_of_a_removed_folder_does_not_count(tmp_path):
    """After a holder removes the folder with its lock, no other process believes that it holds
    it.
    """
    import fcntl

    folder = tmp_path / "run"
    with claim_folder(folder, lambda: None):
        # Another process has opened it, and now comes the removal
        stale = os.open(folder / ".lock", os.O_RDWR)
    assert not folder.exists()
    fcntl.flock(stale, fcntl.LOCK_EX)
    with (
        claim_folder(folder, lambda: None),
        pytest.raises(MismatchError, match="another process"),
        claim_folder(folder, list),
    ):
        pass
    os.close(stale)
    assert not folder.exists()


def test_a_refused_folder_is_not_made_and_a_failed_one_is_removed(tmp_path):
    with (
        pytest.raises(MismatchError),
        run_folder(tmp_path / "a" / "b" / "c", resume=False, force=False),
    ):
        raise MismatchError("no")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(MismatchError, match="is a file"),
        report_folder(tmp_path / "file", "x", force=True),
    ):
        pass
    (tmp_path / "file").unlink()
    with report_folder(tmp_path, "mismatch-cli x", force=False):
        (tmp_path / "summary.json").write_text(json.dumps({"format": "mismatch-cli x"}))
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_drafts_of_processes_that_are_gone_are_removed_in_the_run_and_in_its_own_draft(tmp_path):
    """A kill while a shard is written leaves a draft where the shard goes: in a new run, that is
    inside the draft of the run.
    """
    folder = tmp_path / "run"
    places = [folder / "trace", folder / RUN / NEW / "trace"]
    left = [leave_draft(place, "shard-0.parquet") for place in places]
    with claim_folder(folder, lambda: None):
        assert not any(draft.exists() for draft in left)


def test_a_run_that_has_begun_beside_another_is_there_to_be_resumed_until_it_is_dropped(tmp_path):
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    with replacing_when_complete(tmp_path):
        assert begun_replacement(tmp_path) is None, "nothing is recorded yet"
    with replacing_when_complete(tmp_path) as work:
        (work / "trace").mkdir()
    assert begun_replacement(tmp_path) == work == tmp_path / RUN / NEW
    drop_replacement(tmp_path)
    assert begun_replacement(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
