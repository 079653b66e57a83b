"""A recorder inside a run: what it is given is a trace, and nothing that goes wrong reaches the run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.record import Recorder
from mismatch_cli.trace.reader import Trace


def response(rng: np.random.Generator, step: int = 0, prompt: int = 0, sample: int = 0) -> dict[str, Any]:
    logq_T = -rng.exponential(1.0, 5).astype(np.float32)
    return {
        "step": step, "prompt_id": prompt, "sample_index": sample, "prompt_ids": [1, 2, prompt],
        "response_ids": rng.integers(0, 500, 5), "logp_rollout": logq_T, "logp_trainer": logq_T - 0.01,
        "advantage": 0.5, "reward": 1.0, "finish_reason": "stop",
    }  # fmt: skip


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [row for table in Trace.open(folder).tables() for row in table.to_pylist()]


def test_what_is_added_is_a_trace(tmp_path):
    rng = np.random.default_rng(0)
    given = [response(rng, step, prompt, sample) for step in range(2) for prompt in range(3) for sample in range(2)]
    recorder = Recorder(tmp_path / "run", manifest={"config": {"sampling": {"temperature": 1.0}}})
    for row in given:
        recorder.add(**row)
    recorder.close()
    found = recorded(tmp_path / "run")
    assert len(found) == len(given) and recorder.counts == {"given": 12, "left to chance": 0, "lost": 0}
    for row, expected in zip(found, given, strict=True):
        assert row["response_ids"] == expected["response_ids"].tolist() and row["advantage"] == [0.5] * 5
        np.testing.assert_array_equal(np.float32(row["logp_rollout"]), expected["logp_rollout"])
        assert (row["step"], row["prompt_id"], row["sample_index"]) == tuple(
            expected[name] for name in ("step", "prompt_id", "sample_index")
        )


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_padded_matrices_on_either_side_lose_their_padding(tmp_path, kind):
    prompt_ids, prompt_mask = [[0, 0, 7, 8], [0, 4, 5, 6]], [[0, 0, 1, 1], [0, 1, 1, 1]]
    response_ids, response_mask = [[1, 2, 3], [9, 0, 0]], [[1, 1, 1], [1, 0, 0]]
    logp = [[-0.1, -0.2, -0.3], [-0.4, 0.0, 0.0]]
    recorder = Recorder(tmp_path / "run")
    recorder.add_padded(
        step=3, prompt_ids=kind(prompt_ids), response_ids=kind(response_ids), prompt_mask=kind(prompt_mask),
        response_mask=kind(response_mask), logp_rollout=kind(logp), logp_trainer=kind(logp),
        advantage=kind([1.0, -1.0]),
    )  # fmt: skip
    recorder.close()
    first, second = recorded(tmp_path / "run")
    assert (first["prompt_ids"], second["prompt_ids"]) == ([7, 8], [4, 5, 6])
    assert (first["response_ids"], second["response_ids"]) == ([1, 2, 3], [9])
    np.testing.assert_allclose(second["logp_rollout"], [-0.4])
    assert first["advantage"] == [1.0] * 3 and second["advantage"] == [-1.0] and first["step"] == 3


def test_what_cannot_be_recorded_is_counted_and_the_run_goes_on(tmp_path, caplog):
    rng = np.random.default_rng(0)
    recorder = Recorder(tmp_path / "run", vocabulary=500)
    good = response(rng)
    for change in (
        {"logp_rollout": [-0.1]}, {"response_ids": [1.5] * 5}, {"response_ids": [900] * 5}, {"nonsense": 1},
        {"prompt_ids": None}, {"logp_rollout": "text"}, {"step": "one"},
    ):  # fmt: skip
        recorder.add(**good | change)
    recorder.add(**good)
    recorder.close()
    recorder.add(**good)
    assert len(recorded(tmp_path / "run")) == 1 and recorder.counts["lost"] == 1
    note = json.loads((tmp_path / "run" / "recorder-00000.json").read_text())
    assert sum(note["left_out"].values()) == 7 and note["closed"]


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(tmp_path / "file" / "run")
        for _ in range(3):
            recorder.add(**response(np.random.default_rng(0)))
        recorder.flush()
        recorder.close()
    assert len(caplog.records) == 1 and "Training goes on" in caplog.text and recorder.counts["lost"] >= 3


def test_all_ranks_choose_the_same_prompts(tmp_path):
    rng = np.random.default_rng(0)
    rows = [response(rng, step, prompt, sample) for step in range(20) for prompt in range(20) for sample in range(2)]
    chosen = []
    for rank in range(2):
        recorder = Recorder(tmp_path / str(rank), every=4)
        for row in rows:
            recorder.add(**row)
        recorder.close()
        chosen.append({(row["step"], row["prompt_id"]) for row in recorded(tmp_path / str(rank))})
        assert len(recorded(tmp_path / str(rank))) == 2 * len(chosen[-1])  # whole groups
    assert chosen[0] == chosen[1] and 70 <= len(chosen[0]) <= 130


def test_two_recorders_of_one_rank_do_not_mix(tmp_path, caplog):
    first, second = Recorder(tmp_path / "run"), Recorder(tmp_path / "run")
    for recorder in (first, second):
        recorder.add(**response(np.random.default_rng(0)))
        recorder.close()
    assert "being recorded by another process" in caplog.text
    assert len(recorded(tmp_path / "run")) == 1 and second.counts["lost"] == 2


def test_ranks_share_a_folder(tmp_path):
    for rank in range(3):
        recorder = Recorder(tmp_path / "run", rank=rank)
        recorder.add(**response(np.random.default_rng(rank), prompt=rank))
        recorder.close()
    assert sorted(row["prompt_id"] for row in recorded(tmp_path / "run")) == [0, 1, 2]


def test_a_killed_run_keeps_what_was_flushed(tmp_path):
    script = (
        "import os, sys, numpy as np; from mismatch_cli.record import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "for step in range(3):\n"
        "    recorder.add(step=step, prompt_ids=[1], response_ids=[2, 3], logp_rollout=[-0.1, -0.2])\n"
        "    if step < 2: recorder.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=False)
    assert [row["step"] for row in recorded(tmp_path / "run")] == [0, 1]


def test_samples_of_a_prompt_are_numbered_where_nobody_does(tmp_path):
    for rank in range(2):
        recorder = Recorder(tmp_path / "run", rank=rank)
        for step, prompt in ((0, 5), (0, 5), (1, 5), (0, 6), (0, 5)):
            recorder.add(**response(np.random.default_rng(0), step, prompt) | {"sample_index": None})
        recorder.close()
    rows = recorded(tmp_path / "run")
    keys = [(row["step"], row["prompt_id"], row["sample_index"]) for row in rows]
    assert len(set(keys)) == len(keys) == 10
    assert keys[:5] == [(0, 5, 0), (0, 5, 1), (1, 5, 0), (0, 6, 0), (0, 5, 2)]


def test_a_run_that_is_restarted_counts_nothing_twice(tmp_path):
    rng = np.random.default_rng(0)
    for steps in (range(4), range(2, 6)):  # from the checkpoint of step 2
        recorder = Recorder(tmp_path / "run")
        for step in steps:
            recorder.add(**response(rng, step))
            recorder.flush()
        recorder.close()
    assert [row["step"] for row in recorded(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]
    note = json.loads((tmp_path / "run" / "recorder-00000.json").read_text())
    assert list(note["shard_rows"].values()) == [1] * 6 and "there before" in " ".join(note["left_out"])


def test_a_trace_that_grows_is_read_and_said_to_be_unfinished(tmp_path):
    recorder = Recorder(tmp_path / "run")
    recorder.add(**response(np.random.default_rng(0)))
    recorder.flush()
    assert len(recorded(tmp_path / "run")) == 1
    assert "still being recorded" in " ".join(Trace.open(tmp_path / "run").completeness.reasons)
    recorder.add(**response(np.random.default_rng(0), step=1))
    recorder.close()
    assert not Trace.open(tmp_path / "run").completeness.partial
    next((tmp_path / "run").glob("shard-*")).unlink()
    assert "1 of 2 shards are there" in " ".join(Trace.open(tmp_path / "run").completeness.reasons)


def test_it_needs_numpy_and_pyarrow_alone():
    script = (
        "import sys, mismatch_cli.record\n"
        "print(sorted(m for m in ('torch', 'typer', 'rich', 'pandas', 'orjson', 'matplotlib') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"
