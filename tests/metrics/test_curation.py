"""Accuracy by problem, and the range of a curation."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.curation import Curation, accuracy_by_prompt
from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard


def write_trace(folder, shards):
    """Shards of (prompt_id, reward); the responses have one token each."""
    folder.mkdir()
    write_manifest(folder, {})
    for index, rows in enumerate(shards):
        columns = {
            **{name: [0] * len(rows) for name in ("step", "epoch", "minibatch", "version_rollout")},
            "prompt_id": [prompt for prompt, _ in rows],
            "sample_index": list(range(len(rows))),
            "prompt_ids": [[1]] * len(rows),
            "response_ids": [[2]] * len(rows),
            "finish_reason": ["stop"] * len(rows),
            "loss_mask": [np.ones(1, dtype=bool)] * len(rows),
            "logp_rollout": [np.zeros(1, dtype=np.float32)] * len(rows),
        }
        if rows[0][1] is not None:
            columns["reward"] = [reward for _, reward in rows]
        write_shard(shard_path(folder, index), rows_to_table(columns))
    return Trace.open(folder)


def test_a_problem_may_lie_in_several_shards(tmp_path):
    trace = write_trace(tmp_path / "t", [[(3, 1.0), (7, 0.0), (3, 0.0)], [(3, 0.0), (3, 0.0), (7, 0.5)]])
    assert accuracy_by_prompt(trace) == {3: 0.25, 7: 0.25}


def test_without_rewards_there_is_no_accuracy(tmp_path):
    with pytest.raises(MismatchError, match="has no rewards"):
        accuracy_by_prompt(write_trace(tmp_path / "t", [[(0, None)]]))


def test_both_ends_of_the_range_are_kept():
    accuracy = {0: 7 / 40, 1: 8 / 40, 2: 0.5, 3: 32 / 40, 4: 33 / 40}
    held_out = {1: 7 / 40, 2: 8 / 40, 3: 33 / 40}
    curation = Curation((0.2, 0.8), 40, 40, accuracy, held_out)
    assert curation.kept == [1, 2, 3]
    assert curation.confirmed == [2]
