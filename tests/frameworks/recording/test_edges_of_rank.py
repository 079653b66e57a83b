"""Which runs are the same, and which folder a rank takes first."""

from __future__ import annotations

import json

import pytest

from mismatch_cli.frameworks.recording._folder_choice import candidate_folders
from mismatch_cli.frameworks.recording._rank import _differing_sections

RUN = {"rollout": {"model": "m", "dtype": "a"}, "trainer": {"model": None}, "config": {"t": 1}}


@pytest.mark.parametrize(
    ("change", "of_the_first", "of_others"),
    [
        ({}, [], []),
        ({"rollout": {"model": "m", "dtype": "b"}}, ["rollout"], []),
        ({"rollout": {"model": "n", "dtype": "a"}}, ["rollout"], ["rollout"]),
        ({"rollout": {"model": None, "dtype": "a"}}, ["rollout"], []),
        ({"trainer": {"model": "n"}}, ["trainer"], []),
        ({"config": {"t": 2}}, ["config"], []),
    ],
)
def test_another_run_has_another_description(change, of_the_first, of_others):
    """Of ranks other than the first only the models count, if both state one."""
    assert _differing_sections(RUN, RUN | change, rank=0) == of_the_first
    assert _differing_sections(RUN, RUN | change, rank=1) == of_others
    assert _differing_sections({}, {"rollout": {"model": "m"}}, rank=1) == []


def test_the_first_candidate_is_the_newest_recording_or_one_without_responses(tmp_path):
    """`run` and `run-3` are recordings, `run-2` is empty, `run-4` a probe's, and there is no
    `run-5`.
    """
    requested = tmp_path / "run"
    folders = [requested, *(tmp_path / f"run-{number}" for number in (2, 3, 4))]
    for folder in folders:
        folder.mkdir()
    for folder in (folders[0], folders[2]):
        (folder / "shard-00000-000000.parquet").touch()
        (folder / "recorder-00000.json").touch()
    (folders[1] / "recorder-00001.json").touch()
    (folders[3] / "manifest.json").write_text(json.dumps({"command": "probe"}), encoding="utf-8")
    new = tmp_path / "run-5"
    assert list(candidate_folders(requested, 0, resume=False)) == [folders[1], new]
    assert not list(folders[1].iterdir()) and (folders[3] / "manifest.json").exists()
    resumed = list(candidate_folders(requested, 1, resume=True))
    assert resumed == [folders[2], folders[0], folders[1], new]
