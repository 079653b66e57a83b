"""Micro-batches: within the budget, the same for the same set, and truly another shape for the noise floor."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mismatch_cli.scoring.batches import ScoreRequest, micro_batches, other_shape, pad_right

REQUESTS = st.lists(
    st.builds(
        ScoreRequest,
        st.lists(st.integers(0, 9), min_size=1, max_size=5),
        st.lists(st.integers(0, 9), max_size=12),
    ),
    max_size=20,
)


def request_of(length: int) -> ScoreRequest:
    return ScoreRequest([1], [2] * length)


def test_longest_first_and_padded_size_within_the_budget() -> None:
    batches = micro_batches([request_of(n) for n in (3, 9, 2, 8, 0, 3)], token_budget=10)
    assert batches == [[1], [3], [0, 5, 2]]
    assert micro_batches([request_of(5), request_of(5)], token_budget=10) == [[0, 1]]


@given(REQUESTS, st.integers(1, 40))
def test_every_response_once_and_none_over_the_budget(requests: list[ScoreRequest], budget: int) -> None:
    batches = micro_batches(requests, budget)
    assert sorted(i for batch in batches for i in batch) == [i for i, r in enumerate(requests) if r.response_ids]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(requests[i].num_fed for i in batch) <= budget


@given(REQUESTS, st.integers(1, 40), st.randoms())
def test_composition_does_not_depend_on_the_order(requests: list[ScoreRequest], budget: int, random: object) -> None:
    shuffled = list(requests)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def content(of: list[ScoreRequest]) -> list[list[tuple[list[int], list[int]]]]:
        return [[(of[i].prompt_ids, of[i].response_ids) for i in batch] for batch in micro_batches(of, budget)]

    assert content(requests) == content(shuffled)


@given(REQUESTS, st.integers(1, 40))
def test_no_response_keeps_its_shape(requests: list[ScoreRequest], budget: int) -> None:
    batches = micro_batches(requests, budget)
    others = other_shape(batches)
    size = {i: len(batch) for batch in batches for i in batch}
    assert {i for batch in others for i in batch} == set(size)
    for batch in others:
        for i in batch:
            assert (len(batch) == 1) == (size[i] > 1)


def test_lonely_responses_are_paired_and_the_last_with_itself() -> None:
    assert other_shape([[4], [2, 3], [1], [0]]) == [[2], [3], [4, 1], [0, 0]]


def test_the_last_token_is_not_fed() -> None:
    requests = [ScoreRequest([5, 6], [7, 8]), ScoreRequest([9], [1])]
    ids_BL, mask_BL = pad_right(requests, torch.device("cpu"))
    assert ids_BL.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert mask_BL.tolist() == [[1, 1, 1], [1, 0, 0]]
