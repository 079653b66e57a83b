"""What may be replaced, and that only one process writes."""

from __future__ import annotations

import pytest

from mismatch_cli.errors import MismatchError
from mismatch_cli.recording.folder import check_run_folder, clear_run, locked


def test_only_a_run_is_cleared_and_its_log_stays(tmp_path):
    for name in ("trace", "plots", "log"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "summary.json").write_text("{}")
    check_run_folder(tmp_path)
    clear_run(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]


def test_a_folder_with_anything_else_is_refused(tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(MismatchError, match=r"holds notes\.md"):
        check_run_folder(tmp_path)
    with pytest.raises(MismatchError, match="is a file"):
        check_run_folder(tmp_path / "notes.md")


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(MismatchError, match="another process"), locked(tmp_path / "run"):
        pass
    with locked(tmp_path / "run"):
        check_run_folder(tmp_path / "run")
