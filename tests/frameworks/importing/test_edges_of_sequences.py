"""Whole sequences by hand: which are cut, and where."""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.rows import HOLES, NO_MASK, UNEQUAL
from mismatch_cli.frameworks.importing.sequences import NOT_MOVED
from tests.frameworks.importing.layouts import imported, write_lines


@pytest.mark.parametrize(
    ("tokens", "fits"),
    [
        ([1, 2], True),
        ([1, 2, 3], True),
        ([1, 2, 4], False),
        ([1, 3], False),
        ([1], False),
        ([1, 2, 3, 4], False),
        ([], False),
    ],
)
def test_each_target_is_the_token_after_it(tmp_path, tokens, fits):
    """Targets 2 and 3: the token of the last one may be missing, but may be no other."""
    side = {"loss_mask": [0, 1], "logp_rollout": [0.0, -0.5]}
    records = [
        {"token_ids": [7, 8], "target_ids": [8, 9]} | side,
        {"token_ids": tokens, "target_ids": [2, 3]} | side,
    ]
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    prompts, responses = ([[7, 8], [1, 2]], [[9], [3]])
    assert table.column("prompt_ids").to_pylist() == prompts[: 1 + fits]
    assert table.column("response_ids").to_pylist() == responses[: 1 + fits]
    assert table.column("logp_rollout").to_pylist() == [[-0.5]] * (1 + fits)
    assert about["left_out"] == ({} if fits else {NOT_MOVED: 1})


def test_targets_without_tokens_and_tokens_without_targets_do_not_fit(tmp_path):
    side = {"loss_mask": [0, 1], "logp_rollout": [0.0, -0.5]}
    records = [{"token_ids": [7, 8], "target_ids": [8, 9]} | side]
    for tokens, targets in (([1], []), ([], [1]), ([1, 2], None), (None, [2, 3])):
        records.append({"token_ids": tokens, "target_ids": targets} | side)
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.column("response_ids").to_pylist() == [[9]]
    assert about["left_out"] == {NOT_MOVED: 4}


@pytest.mark.parametrize("moved", [True, False])
def test_one_advantage_applies_to_the_whole_response_of_a_sequence(tmp_path, moved):
    """As a number or as a list of one, with a mask; by itself it does not show where to cut."""
    whole = {"token_ids": [1, 2, 3, 4], "logp_rollout": [0.0, 0.0, -0.5, -0.25]}
    if moved:
        whole = {
            "token_ids": [1, 2, 3],
            "target_ids": [2, 3, 4],
            "logp_rollout": [0.0, -0.5, -0.25],
        }
    mask = {"loss_mask": [0, 0, 1, 1][moved:]}
    each = {"advantage": [0.0, 0.0, 0.25, -2.0][moved:]}
    records = [whole | mask | {"advantage": one} for one in (0.5, None)]
    for number, advantages in enumerate((0.5, [0.5])):
        records[0] = whole | mask | {"advantage": advantages}
        path = write_lines(tmp_path / f"{number}.jsonl", records)
        table, about = imported(path, into=tmp_path / f"trace-{number}")
        assert table.column("response_ids").to_pylist() == [[3, 4], [3, 4]]
        assert table.column("advantage").to_pylist() == [[0.5, 0.5], None]
        assert not about["left_out"]
    path = write_lines(tmp_path / "each.jsonl", [whole | mask | each])
    table, _ = imported(path, into=tmp_path / "each")
    assert table.column("advantage").to_pylist() == [[0.25, -2.0]]
    path = write_lines(tmp_path / "none.jsonl", [whole | {"advantage": 0.5}])
    with pytest.raises(MismatchError, match="nothing says where the response begins"):
        imported(path, into=tmp_path / "none")


def test_a_token_that_either_mask_clears_is_outside_the_loss(tmp_path):
    """The response begins with the response mask; a sequence may have both, one, or neither."""
    side = {"token_ids": [1, 2, 3, 4, 5], "logp_rollout": [0.0, -0.5, -1.0, -1.5, -2.0]}
    response_mask, loss_mask = [0, 1, 1, 0, 1], [0, 0, 1, 1, 1]
    records = [
        side | {"response_mask": response_mask, "loss_mask": loss_mask},
        side | {"response_mask": response_mask},
        side | {"loss_mask": loss_mask},
        side,
        side | {"response_mask": response_mask, "loss_mask": loss_mask[1:]},
        side | {"response_mask": response_mask, "loss_mask": [0, None, 1, 1, 1]},
    ]
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.column("prompt_ids").to_pylist() == [[1], [1], [1, 2]]
    assert table.column("response_ids").to_pylist() == [[2, 3, 4, 5], [2, 3, 4, 5], [3, 4, 5]]
    assert table.column("loss_mask").to_pylist() == [
        [False, True, False, True],
        [True, True, False, True],
        [True, True, True],
    ]
    assert table.column("logp_rollout").to_pylist() == [[-0.5, -1, -1.5, -2]] * 2 + [[-1, -1.5, -2]]
    reasons = (NO_MASK, UNEQUAL.format(name="loss_mask"), HOLES.format(name="loss_mask"))
    assert about["left_out"] == dict.fromkeys(reasons, 1)


def test_a_sequence_ends_with_the_last_1_of_its_response_mask(tmp_path):
    """As a padded response does; a loss mask says nothing about padding."""
    side = {"token_ids": [1, 2, 3, 4, 0], "logp_rollout": [0.0, -0.5, -1.0, -1.5, 0.0]}
    records = [
        side | {"response_mask": [0, 1, 0, 1, 0], "loss_mask": [1, 1, 1, 0, 0]},
        side | {"response_mask": [0, 0, 1, 1, 1]},
        side | {"loss_mask": [0, 1, 0, 1, 0]},
        side | {"response_mask": [0, 0, 0, 0, 0]},
        side | {"response_mask": [0, 0, 0, 1, 1, 1]},
    ]
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.column("response_ids").to_pylist() == [[2, 3, 4], [3, 4, 0], [2, 3, 4, 0]]
    assert table.column("logp_rollout").to_pylist() == [
        [-0.5, -1.0, -1.5],
        [-1.0, -1.5, 0.0],
        [-0.5, -1.0, -1.5, 0.0],
    ]
    assert table.column("loss_mask").to_pylist() == [
        [True, False, False],
        [True, True, True],
        [True, False, True, False],
    ]
    assert about["left_out"] == {NO_MASK: 1, UNEQUAL.format(name="loss mask"): 1}
