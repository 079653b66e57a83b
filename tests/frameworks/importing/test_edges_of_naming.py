"""What fits a column, how a value is described, and how a batch is divided: small values by hand."""

from __future__ import annotations

import pytest

from mismatch_cli.frameworks.importing.naming import (
    as_option,
    fits,
    kind_and_length,
    parse_columns,
    responses,
)

NAN = float("nan")


@pytest.mark.parametrize("column", ["step", "prompt_id"])
def test_a_whole_number_has_at_most_63_bits(column):
    """As Arrow and numpy store it."""
    assert fits(column, 2**63 - 1) and fits(column, 1 - 2**63)
    assert not fits(column, 2**63)
    assert not fits(column, -(2**63) - 1)


FITTING = {
    "prompt_id": [None, 3, -3, 3.0, "a"],
    "group_id": [None, 3, "a"],
    "step": [None, 3, 3.0],
    "reward": [None, 0, -0.5, NAN, True],
    "finish_reason": [None, "stop"],
    "advantage": [None, 0.5, -1, [0.5], [0.5, None]],
    "response_ids": [None, [], [0, 5], [5.0, None]],
    "target_ids": [[0, 5]],
    "logp_rollout": [None, [], [-0.5, 0, NAN, None]],
    "loss_mask": [None, [0, 1, True, False, 1.0, None], [-100, 0, 7], [-100, -100]],
    "prompt_mask": [[0, 1]],
}
MISFITS = {
    "prompt_id": [True, 2.5, [3], NAN],
    "step": ["3", True, 2.5, NAN, float("inf"), [3]],
    "reward": ["good", [1.0], {}],
    "finish_reason": [3, ["stop"]],
    "advantage": [True, "0.5", [True], ["0.5"], [[0.5]]],
    "response_ids": [5, "5", [-1], [0.5], [True], ["5"], [[5]]],
    "target_ids": [[-1], 5],
    "logp_rollout": [-0.5, [True], ["-0.5"], [[-0.5]]],
    "loss_mask": [1, [2], [0.5], [-1, 1], [-100, -99], [5, 7], ["1"], [-100, 0.5]],
    "prompt_mask": [[2]],
}


@pytest.mark.parametrize("column", FITTING)
def test_a_value_of_our_kind_fits_a_column_and_no_other_does(column):
    for value in FITTING[column]:
        assert fits(column, value), value
    for value in MISFITS.get(column, ()):
        assert not fits(column, value), value


def test_a_list_fits_a_response_with_one_entry_per_token():
    """An advantage may also be a list of one; a prompt has a length of its own."""
    tokens = [5, 6]
    assert fits("logp_rollout", [-0.5, -1.0], tokens)
    assert not fits("logp_rollout", [-0.5], tokens)
    assert not fits("logp_rollout", [-0.5, -1.0, -2.0], tokens)
    assert fits("advantage", [0.5], tokens) and fits("advantage", [0.5, 1.0], tokens)
    assert not fits("advantage", [0.5, 1.0, 2.0], tokens) and fits("advantage", 0.5, tokens)
    assert fits("prompt_ids", [1, 2, 3], tokens) and fits("logp_rollout", None, tokens)
    assert fits("logp_rollout", [-0.5], None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "nothing"),
        (7, "a number"),
        (0.5, "a number"),
        (True, "true or false"),
        ("a", "text"),
        ({}, "an object"),
        ([], "0 values"),
        ([None], "1 value"),
        ([7], "1 whole number"),
        ([7, 8.0, None], "3 whole numbers"),
        ([7, 0.5], "2 numbers"),
        ([None, -0.5], "2 numbers"),
        (["a", "b"], "2 texts"),
        ([{}], "1 object"),
        ([True, False], "2 values"),
        ([[7]], "1 list of 1 whole number"),
        ([[7, 8], [9]], "2 lists of 1 to 2 whole numbers"),
        ([[7, 8], None, [9, 4]], "3 lists of 2 whole numbers"),
        ([[], [0.5, -0.5, 1.0]], "2 lists of 0 to 3 numbers"),
        ([[[7]], [[8]]], "2 lists of lists of lists"),
    ],
)
def test_a_value_has_a_kind_and_a_length(value, words):
    assert kind_and_length(value) == words


def test_a_batch_is_divided_by_its_ids():
    """What has a value for each response is divided; the rest is of them all."""
    batch = {
        "ids": [[1], [2, 3]],
        "reward": [0.5, 1.0],
        "prompt": [7, 8, 9],
        "step": 4,
        "name": "ab",
    }
    shared = {"prompt": [7, 8, 9], "step": 4, "name": "ab"}
    single = {"ids": [5, 6], "reward": [0.5, 1.0]}
    assert responses([single, batch, {"reward": 1.0}], "ids") == [
        single,
        shared | {"ids": [1], "reward": 0.5},
        shared | {"ids": [2, 3], "reward": 1.0},
        {"reward": 1.0},
    ]


def test_an_option_is_read_as_it_is_written():
    columns = {"response_ids": "a.*.0", "logp_rollout": "lp", "loss_mask": "?", "reward": "?"}
    option = as_option(columns)
    assert option == "response_ids=a.*.0,logp_rollout=lp,loss_mask=?,reward=?"
    assert parse_columns(option) == parse_columns(f" {option} , ") == columns
