"""Batches by hand: what is divided among their responses, and what is of all of them."""

from __future__ import annotations

import pytest

from mismatch_cli.frameworks.importing.padded import NO_BATCH, OTHER_SIZE
from tests.frameworks.importing.layouts import imported, write_records

BATCH = {
    "prompt_ids": [1, 2],
    "response_ids": [[5, 6], [7], [8, 9, 4]],
    "logp_rollout": [[-1.0, -2.0], [-3.0], [-0.5, -0.25, -4.0]],
}


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (0.5, [[0.5, 0.5], [0.5], [0.5, 0.5, 0.5]]),
        ([0.5, -1.0, 2.0], [[0.5, 0.5], [-1.0], [2.0, 2.0, 2.0]]),
        ([[0.5], [-1.0], [2.0]], [[0.5, 0.5], [-1.0], [2.0, 2.0, 2.0]]),
        ([[0.5, 1.5], [-1.0], [2.0, 3.0, 4.0]], [[0.5, 1.5], [-1.0], [2.0, 3.0, 4.0]]),
    ],
)
def test_an_advantage_of_a_batch_has_any_form(tmp_path, way, advantage, expected):
    """One for all responses, one for each, or one for each token."""
    path = write_records(tmp_path / f"d.{way}", [BATCH | {"advantage": advantage}])
    table, about = imported(path, into=tmp_path / "trace")
    assert table.column("advantage").to_pylist() == expected
    assert table.column("prompt_ids").to_pylist() == [[1, 2]] * 3
    assert not about["left_out"]


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_batches_of_unequal_size_are_divided_in_order(tmp_path, way):
    """The second has no log π, the third no ids, and the fourth a row too few."""
    first = BATCH | {"logp_trainer": BATCH["logp_rollout"], "reward": [1.0, 2.0, 3.0], "step": 4}
    second = {
        "prompt_ids": [3],
        "response_ids": [[2]],
        "logp_rollout": [[-8.0]],
        "logp_trainer": None,
        "reward": [5.0],
        "step": 6,
    }
    third = first | {"response_ids": None}
    fourth = first | {"logp_rollout": BATCH["logp_rollout"][:2]}
    last = first | {"step": 7, "reward": [6.0, 7.0, 8.0]}
    path = write_records(tmp_path / f"d.{way}", [first, second, third, fourth, last])
    table, about = imported(path, into=tmp_path / "trace")
    assert table.column("step").to_pylist() == [4, 4, 4, 6, 7, 7, 7]
    assert table.column("reward").to_pylist() == [1, 2, 3, 5, 6, 7, 8]
    assert table.column("response_ids").to_pylist() == [
        *BATCH["response_ids"],
        [2],
        *BATCH["response_ids"],
    ]
    logp = BATCH["logp_rollout"]
    assert table.column("logp_trainer").to_pylist() == [*logp, None, *logp]
    assert table.column("prompt_ids").to_pylist() == [[1, 2]] * 3 + [[3]] + [[1, 2]] * 3
    assert about["left_out"] == {NO_BATCH: 1, OTHER_SIZE.format(name="logp_rollout"): 1}
