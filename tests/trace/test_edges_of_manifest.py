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


def test_a_run_whose_trace_is_whole_is_left_as_a_kill_left_it(write_trace):
    """Named by its own folder, in which the trace is."""
    folder = write_trace(row_columns())
    drafts = [leave_draft(place, "page") for place in (folder.parent, folder)]
    for draft in drafts:
        (draft / "old").mkdir()
    assert trace_folder(folder.parent) == folder
    assert all(draft.is_dir() for draft in drafts)
