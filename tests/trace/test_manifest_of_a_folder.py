"""Where the trace of a run is, also after a kill while it was replaced."""

from __future__ import annotations

import shutil

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.trace.manifest import trace_folder
from tests.leftovers import leave_draft


@pytest.mark.parametrize("depth", ["run", "run/trace"])
def test_a_reader_puts_back_what_a_killed_process_had_moved_aside(depth, tmp_path):
    trace = tmp_path / depth
    draft = leave_draft(trace, "manifest.json")
    shutil.copytree(bundled("traces") / "float32", draft / "old")
    assert trace_folder(tmp_path / depth) == trace
    assert (trace / "manifest.json").is_file() and not draft.exists()
