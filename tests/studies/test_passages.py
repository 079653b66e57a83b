"""Which tokens fit a page: compared with sets of tokens, one by one."""

from __future__ import annotations

from itertools import pairwise, zip_longest

import numpy as np
import pytest

from mismatch_cli.studies.exploration import passages as module
from mismatch_cli.studies.exploration.passages import WINDOW, Leader, passages, tokens_at

Tokens = set[tuple[int, int]]


def brute_force(lists: list[list[Leader]], length_S: list[int], most: int) -> Tokens:
    """The tokens of a page that does not have room for all of them."""
    leaders = [leader for turn in zip_longest(*lists) for leader in turn if leader is not None]
    page: Tokens = set()
    for response, _, length in leaders:
        whole = {(response, position) for position in range(length)}
        if len(page | whole) <= most // 2:
            page |= whole
    for response, position, length in leaders:
        near = {
            (response, at) for at in range(length) if position - WINDOW <= at <= position + WINDOW
        }
        if len(page | near) > most:
            break
        page |= near
    for response, length in enumerate(length_S):
        whole = {(response, position) for position in range(length)}
        if len(page | whole) <= most:
            page |= whole
    return page


def random_lists(rng: np.random.Generator, length_S: list[int]) -> list[list[Leader]]:
    filled = [response for response, length in enumerate(length_S) if length]
    lists = []
    for number in rng.integers(0, 12, rng.integers(1, 5)).tolist():
        responses = rng.choice(filled, number).tolist()
        lists.append([Leader(r, int(rng.integers(0, length_S[r])), length_S[r]) for r in responses])
    return lists


@pytest.mark.parametrize("seed", range(60))
def test_passages_are_those_of_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    length_S = rng.integers(0, rng.choice([40, 300, 1500]), rng.integers(2, 30)).tolist()
    most = int(rng.integers(200, 3000))
    monkeypatch.setattr(module, "MOST_TOKENS", most)
    lists = random_lists(rng, [*length_S[:-1], length_S[-1] + 1])
    length_S[-1] += 1
    passage_P = passages(lists, length_S, sum(length_S))
    expected = (
        brute_force(lists, length_S, most)
        if sum(length_S) > most
        else {(r, at) for r, length in enumerate(length_S) for at in range(length)}
    )
    rows = passage_P.tolist()
    covered = [(r, at) for r, start, tokens in rows for at in range(start, start + tokens)]
    assert covered == sorted(expected or covered) and len(covered) <= most
    for (r, start, tokens), (following, later, _) in pairwise(rows):
        assert (r, start + tokens) < (following, later)  # neither overlap nor touch
    for leading in lists:
        index = tokens_at(passage_P, leading).tolist()
        places = [(leader.response, leader.position) for leader in leading]
        assert [covered[t] for t in index] == places[: len(index)]
        assert len(index) == len(places) or places[len(index)] not in expected


def test_windows_that_touch_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOKENS", 1000)
    width = 2 * WINDOW + 1
    leaders = [Leader(0, at, 5000) for at in (300, 300 + width, 302 + 2 * width)]
    assert passages([leaders], [5000], 5000).tolist() == [
        (0, 300 - WINDOW, 2 * width),
        (0, 302 + 2 * width - WINDOW, width),
    ]


def test_windows_end_with_their_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOKENS", 1000)
    leaders = [Leader(0, 3, 5000), Leader(0, 4999, 5000)]
    assert passages([leaders], [5000], 5000).tolist() == [
        (0, 0, 4 + WINDOW),
        (0, 4999 - WINDOW, WINDOW + 1),
    ]


def test_a_list_ends_before_the_first_leader_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it has the largest gaps, and that a sample is fair."""
    monkeypatch.setattr(module, "MOST_TOKENS", 300)
    leaders = [Leader(0, at, 5000) for at in (100, 2000, 4000, 101)]
    passage_P = passages([leaders], [5000], 5000)
    assert tokens_at(passage_P, leaders).tolist() == [WINDOW, 3 * WINDOW + 1]


def test_equal_policies_have_no_leaders_and_the_first_response_is_cut() -> None:
    assert passages([], [300_000, 300_000], 600_000).tolist() == [(0, 0, module.MOST_TOKENS)]
    assert passages([], [300_000, 5], 300_005).tolist() == [(1, 0, 5)]


def test_no_more_responses_than_a_page_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RESPONSES", 4)
    leaders = [Leader(response, 0, 10) for response in (7, 9)]
    chosen = passages([leaders], [10] * 4, 100)["response"].tolist()
    assert chosen == [0, 1, 7, 9]
