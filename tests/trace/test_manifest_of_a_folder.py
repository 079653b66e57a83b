"""Where the trace of a run is, also after a kill while it was replaced."""

from __future__ import annotations

import shutil

import pytest

from mismatch_cli.places import bundled
from mismatch_cli.trace.drafts import MARK
from mismatch_cli.trace.manifest import trace_folder


@pytest.mark.parametrize("depth", ["run", "run/trace"])
def test_a_reader_puts_back_what_a_killed_process_had_moved_aside(depth, tmp_path):
    trace = tmp_path / depth
    draft = trace / f".manifest.json.0a1b2c3d{MARK}.part"
    shutil.copytree(bundled("traces") / "float32", draft / "old")
    (draft / MARK).touch()
    assert trace_folder(tmp_path / depth) == trace
    assert (trace / "manifest.json").is_file() and not draft.exists()
