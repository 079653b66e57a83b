"""How samples are put into blocks."""

from __future__ import annotations

import pytest
import torch

from mismatch_cli.frameworks.importing import samples as samples_module
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import NOTE
from mismatch_cli.frameworks.importing.samples import (
    NO_IDS,
    NO_LENGTH,
    NO_NUMBER,
    NORMALISED,
    OTHER_TYPES,
    WRONG_TOTAL,
)


def test_a_block_ends_with_the_sample_that_fills_it(monkeypatch):
    """With four tokens in a block: 3 + 1, then 3 + 2, then the rest."""
    monkeypatch.setattr(samples_module, "TOKENS_PER_BLOCK", 4)
    sizes = [3, 1, 3, 2, 1]
    samples = [{"tokens": list(range(size)), "response_length": 1} for size in sizes]
    blocks = list(samples_module.tables(samples, 0, Tally(), "a file"))
    assert [block.num_rows for block in blocks] == [2, 2, 1]


def test_a_newer_trainer_has_the_version_after_the_oldest_that_sampled():
    """Without a version of the sampler, the trainer's is the first after 0."""
    sample = {"tokens": [1, 2], "response_length": 1, "newer_trainer": True}
    for versions, trainer in ((["3", "4"], 4), (None, 1)):
        (table,) = samples_module.tables(
            [sample | {"weight_versions": versions}], 0, Tally(), "a file"
        )
        assert table.column("version_trainer").to_pylist() == [trainer]


def test_samples_of_every_form_in_one_block():
    """Singular and plural names, masks and rewards of all kinds, and values that some lack."""
    samples = [
        {
            "tokens": [1, 2, 5, 6, 7],
            "response_length": 3,
            "total_length": 5,
            "loss_mask": [1, 0, 1],
            "rollout_log_probs": [-1.0, -2.0, -3.0],
            "log_probs": [-1.5, -2.5, -3.5],
            "reward": 0.5,
            "rewards": 9.0,
            "truncated": 0,
            "index": 4,
            "sample_index": 8,
            "weight_versions": ["7", "12", "default", "5"],
        },
        {
            "tokens": torch.tensor([3, 8]),
            "response_lengths": 1,
            "total_lengths": 2,
            "rollout_log_probs": torch.tensor([-4.0]),
            "train_log_probs": [-4.5],
            "log_probs": [-9.0],
            "old_log_probs": [-4.25],
            "raw_reward": 2.0,
            "reward": 9.0,
            "truncated": True,
            "status": "completed",
            "sample_index": 6,
            "weight_versions": ("default",),
        },
        {
            "tokens": [9, 4, 4, 4],
            "response_length": 3,
            "loss_masks": [1, 1, 0],
            "remove_sample": True,
            "rewards": -1.0,
            "status": "truncated",
        },
        {"tokens": [2], "response_length": 1, "reward": "good", "status": "aborted"},
        {"tokens": [2, 3], "response_length": 0, "status": "completed", "reward": None},
    ]
    (table,) = samples_module.tables(samples, 11, Tally(), "a file")
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    assert columns == {
        "prompt_ids": [[1, 2], [3], [9], [], [2, 3]],
        "response_ids": [[5, 6, 7], [8], [4, 4, 4], [2], []],
        "step": [11] * 5,
        "finish_reason": ["stop", "length", "length", "aborted", "stop"],
        "reward": [0.5, 2.0, -1.0, None, None],
        NOTE + NO_NUMBER: [0, 0, 0, 1, 0],
        NOTE + NORMALISED: [0, 0, 1, 0, 0],
        "loss_mask": [[True, False, True], [True], [False] * 3, [True], []],
        "logp_rollout": [[-1.0, -2.0, -3.0], [-4.0], None, None, None],
        "logp_trainer": [[-1.5, -2.5, -3.5], [-4.5], None, None, None],
        "logp_recomputed": [None, [-4.25], None, None, None],
        "sample_index": [4, 6, None, None, None],
        "version_rollout": [5, None, None, None, None],
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": None}, NO_IDS),
        ({"tokens": []}, NO_IDS),
        ({"response_length": None}, NO_LENGTH),
        ({"response_length": -1}, WRONG_TOTAL),
        ({"response_length": 4}, WRONG_TOTAL),
        ({"response_length": 3}, None),
        ({"response_length": 0}, None),
        ({"total_length": 2}, WRONG_TOTAL),
        ({"total_lengths": 4}, WRONG_TOTAL),
        ({"total_length": 3}, None),
        ({"response_length": "2"}, OTHER_TYPES),
        ({"response_length": 2**31}, OTHER_TYPES),
        ({"rollout_log_probs": ["x", "y"]}, OTHER_TYPES),
        ({"index": 2**31}, OTHER_TYPES),
    ],
)
def test_a_sample_is_left_out_for_what_it_lacks(change, reason):
    good = {"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-1.0, -2.0]}
    tally = Tally()
    tables = list(samples_module.tables([good | change, good], 0, tally, "a file"))
    assert sum(table.num_rows for table in tables) == (1 if reason else 2)
    assert tally.left_out == ({reason: 1} if reason else {})
    assert set(tally.first.values()) == ({"a file"} if reason else set())


def test_a_null_does_not_hide_the_value_under_another_name():
    lengths = {"response_length": None, "response_lengths": 2, "total_length": None}
    sample = {"tokens": [1, 5, 6], "index": None, "sample_index": 4, **lengths}
    samples = [
        sample | {"raw_reward": None, "reward": 2.0},
        sample | {"raw_reward": None, "reward": None, "rewards": 0.5},
        sample | {"total_lengths": 9},
    ]
    tally = Tally()
    (table,) = samples_module.tables(samples, 0, tally, "a file")
    assert table.column("response_ids").to_pylist() == [[5, 6], [5, 6]]
    assert table.column("sample_index").to_pylist() == [4, 4]
    assert table.column("reward").to_pylist() == [2.0, 0.5]
    assert table.column(NOTE + NORMALISED).to_pylist() == [0, 1]
    assert tally.left_out == {WRONG_TOTAL: 1}
