"""A batch of two responses by hand: what is cut, chosen and counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mismatch_cli.frameworks.importing.rows import text_key
from mismatch_cli.frameworks.recording import _responses
from mismatch_cli.frameworks.recording._responses import (
    Padded,
    copy_to_host,
    count_responses,
    count_tokens,
    extractors,
    sample_prompts,
)


def padded(**changes) -> Padded:
    columns = {
        "step": 3,
        "prompt_ids": np.array([[0, 1], [2, 3]]),
        "response_ids": np.array([[5, 6, 0], [0, 0, 7]]),
        "logp_rollout": [[-1.0, -2.0], [-3.0]],
        "advantage": np.array([[0.5], [-0.5]]),
        "topk_ids": np.arange(12).reshape(2, 3, 2),
        "reward": (1.0, None),
        "finish_reason": "stop",
    }
    masks = (np.array([[0, 1], [1, 1]]), [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    return Padded(columns | changes, *masks)


def plain(row: dict) -> dict:
    """The values of a response as Python's."""
    arrays = {name: value.tolist() for name, value in row.items() if hasattr(value, "tolist")}
    return row | arrays


def test_a_response_of_a_batch_has_its_own_values_without_padding():
    batch = padded()
    assert (len(batch), count_responses(batch), count_tokens(batch)) == (2, 2, 3)
    first, second = (plain(extract()) for extract in extractors([batch]))
    assert first == {
        "step": 3,
        "prompt_ids": [1],
        "response_ids": [5, 6],
        "logp_rollout": [-1.0, -2.0],
        "advantage": [0.5],
        "topk_ids": [[0, 1], [2, 3]],
        "reward": 1.0,
        "finish_reason": "stop",
    }
    assert second == {
        "step": 3,
        "prompt_ids": [2, 3],
        "response_ids": [7],
        "logp_rollout": [-3.0],
        "advantage": [-0.5],
        "topk_ids": [[10, 11]],
        "reward": None,
        "finish_reason": "stop",
    }
    (last,) = extractors([batch.select(np.array([False, True]))])
    assert plain(last()) == second
    row = {"step": 1, "response_ids": [5, 6]}
    assert (count_responses(row), count_tokens(row)) == (1, 2)
    assert (count_responses({}), count_tokens({"step": 1})) == (0, 0)
    assert [extract() for extract in extractors([row, row])] == [row, row]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp_rollout": np.ones((2, 4))}, "a matrix of width 4 with a mask of width 3"),
        ({"prompt_ids": [[1], [2]]}, "prompt_ids has 1 values, but its mask 2 tokens"),
        ({"response_ids": [[5, 6], [7, 8]]}, "response_ids has 2 values, but its mask 1 tokens"),
    ],
)
def test_a_matrix_of_another_width_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        padded(**change).row(1)
    with pytest.raises(ValueError, match="reward has 3 rows, but response_mask has 2"):
        padded(reward=[1.0, 2.0, 3.0])


def test_the_prompts_of_a_batch_are_chosen_one_by_one(monkeypatch):
    """By the step, and by the prompt's id, its name, or its tokens; the same as a single row."""
    chosen = []

    def is_sampled(step: int, prompt_key: int, every: int) -> bool:
        chosen.append((step, prompt_key, every))
        return len(chosen) % 2 == 0

    monkeypatch.setattr(_responses, "_is_sampled", is_sampled)
    of_tokens = [_responses._prompt_key(np.array(ids), None) for ids in ([1], [2, 3])]
    assert len(set(of_tokens)) == 2
    assert len(sample_prompts(padded(), 5)) == 1
    assert len(sample_prompts(padded(step=[3, 4], prompt_id=[7, "a"]), 5)) == 1
    row = {"step": 9, "prompt_ids": [2, 3], "response_ids": [5]}
    assert sample_prompts(row, 5) == {}
    assert sample_prompts(row | {"prompt_id": "a"}, 5) == row | {"prompt_id": "a"}
    assert chosen == [
        (3, of_tokens[0], 5),
        (3, of_tokens[1], 5),
        (3, 7, 5),
        (4, text_key("a"), 5),
        (9, of_tokens[1], 5),
        (9, text_key("a"), 5),
    ]


def test_the_choice_of_a_prompt_is_that_of_earlier_recordings():
    """A run that is resumed, and each of its ranks, must choose the same prompts."""
    sampled = [prompt for prompt in range(20) if _responses._is_sampled(1, prompt, 3)]
    assert sampled == [1, 2, 6, 9, 10, 15, 19]
    assert all(_responses._is_sampled(1, prompt, 1) for prompt in range(20))


def test_what_the_run_hands_over_is_copied_to_the_host():
    tensor = torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    array, rows = np.array([1.0, 2.0]), [[1, 2], (3,)]
    copies = [copy_to_host(value) for value in (tensor, array, rows, (1, 2), "text", None, 7)]
    with torch.no_grad():
        tensor.zero_()
    array[:] = 0
    rows[0][0] = 0
    assert copies[0].tolist() == [[1.5, 2.0]] and copies[0].dtype == np.float32
    assert copies[1].tolist() == [1.0, 2.0]
    assert copies[2:] == [[[1, 2], [3]], [1, 2], "text", None, 7]
    whole = copy_to_host(torch.tensor([2**40]))
    assert whole.dtype == np.int64 and whole.tolist() == [2**40]
