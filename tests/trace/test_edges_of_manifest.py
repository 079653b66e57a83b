"""What opening a trace leaves alone."""

from __future__ import annotations

from mismatch_cli.trace.manifest import trace_folder
from tests.leftovers import leave_draft
from tests.trace.conftest import row_columns


def test_only_the_reader_of_a_trace_without_manifest_settles_what_a_kill_left(write_trace):
    folder = write_trace(row_columns())
    draft = leave_draft(folder, "manifest.json")
    (draft / "old").mkdir()
    assert trace_folder(folder) == folder
    assert draft.is_dir()
    (folder / "manifest.json").rename(draft / "old" / "manifest.json")
    assert trace_folder(folder) == folder
    assert not draft.exists()
