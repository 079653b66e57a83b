"""Which packs of responses are tried, and on which of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.model import Hypothesis
from mismatch_cli.diagnosis.packs import after_neighbours
from tests.diagnosis.samples import few_responses


def tried(
    gaps: list[float], left: float = 1.0, places: list[int] | None = None, skipped: int = -1
) -> list[Hypothesis]:
    """Of responses with these gaps, each of one token more than the one before; one has no prompt."""
    lengths = [s + 2 for s in range(len(gaps))]
    gap_T = np.repeat(gaps, lengths)
    counts_T = np.ones(len(gap_T), dtype=bool)
    # The last token of each does not count
    counts_T[np.cumsum(lengths) - 1] = False
    gap_T[~counts_T] = 50.0
    sample = few_responses(lengths, logp_T=-1.0 - gap_T, counts_T=counts_T)
    places = places or list(range(len(gaps)))
    responses = [s for s in range(len(gaps)) if s != skipped]
    model = SimpleNamespace(responses=responses, place_of=dict(enumerate(places)))
    return list(after_neighbours(model, sample, lambda _: left))


def test_the_size_of_packs_is_that_whose_first_responses_are_as_recorded():
    """In packs of three, the second and third of each have a gap."""
    after_one, packs = tried([0.0, 1.0, 2.0, 0.1, 1.0, 1.5, 0.2, 3.0])
    assert after_one.name == "each response after the one before it"
    assert after_one.responses == (1, 2, 4, 5, 7) == packs.responses
    assert [after_one.before(place) for place in range(4)] == [1, 1, 1, 1]
    assert packs.name == "packs of 3"
    assert [packs.before(place) for place in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_half_of_the_median_gap_is_far():
    assert tried([1.0, 1.0, 1.0, 0.49])[0].responses == (1, 2)
    assert tried([1.0, 1.0, 1.0, 0.51])[0].responses == (1, 2, 3)


@pytest.mark.parametrize(("left", "sizes"), [(0.99, [2, 3, 4, 6, 8, 16]), (1.0, [])])
def test_all_sizes_are_tried_where_no_size_shows_and_a_neighbour_helps(left, sizes):
    after_one, *packs = tried([1.0] * 9, left)
    assert after_one.responses == tuple(range(1, 9))
    assert [pack.name for pack in packs] == [f"packs of {size}" for size in sizes]
    for size, pack in zip(sizes, packs, strict=True):
        assert pack.responses == tuple(s for s in range(1, 9) if s % size)


def test_responses_are_at_their_places_of_the_trace():
    """In the order 3, 0, 1, 2: 3 and 1 are the first of two, and the first has nobody before it."""
    after_one, packs = tried([1.0, 0.0, 1.0, 0.0], places=[1, 2, 3, 0])
    assert after_one.responses == (0, 2) == packs.responses and packs.name == "packs of 2"
    # What the model does not read neither counts nor is tried
    after_one, packs = tried([0.0, 1.0, 0.0, 1.0, 9.0], skipped=4)
    assert (packs.name, packs.responses) == ("packs of 2", (1, 3))


def test_without_a_response_after_another_there_is_no_pack():
    assert tried([1.0]) == [] and tried([0.0, 0.0, 0.0]) == []
    assert tried([0.1, 9.0, 0.1, 0.1], places=[1, 0, 2, 3])[0].responses == (0, 2, 3)
