"""Responses with far larger gaps than the others, and subsets of responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mismatch_cli.diagnosis.far_responses import Subset, find_far_responses, responses_with
from mismatch_cli.diagnosis.sample import Sample
from tests.diagnosis.samples import few_responses


def with_gaps(gaps: Sequence[float], lengths: Sequence[int] | int = 8) -> Sample:
    """Responses with these mean gaps, in typical ones."""
    lengths = [lengths] * len(gaps) if isinstance(lengths, int) else list(lengths)
    sample = few_responses(lengths)
    vars(sample)["u_N"] = np.array(gaps, dtype=float)[sample.response_N]
    return sample


def far(gaps: Sequence[float], lengths: Sequence[int] | int = 8) -> list[int] | None:
    subset = find_far_responses(with_gaps(gaps, lengths))
    return None if subset is None else np.flatnonzero(subset.inside_S).tolist()


def test_five_responses_may_be_far_and_five_others_usual():
    assert far([0.1] * 5 + [1.0] * 5) == [5, 6, 7, 8, 9]
    assert far([1.0] * 5 + [0.1] * 5) == [0, 1, 2, 3, 4]
    assert far([0.1] * 5 + [1.0] * 4) is None
    assert far([0.1] * 6 + [1.0] * 4) is None
    assert far([0.1] * 4 + [1.0] * 6) is None


def test_a_fifth_of_the_responses_are_usual():
    """Of thirty, six; fewer others are those of certain tokens."""
    assert far([0.1] * 6 + [0.35] * 24) == list(range(6, 30))
    assert far([0.1] * 5 + [0.35] * 25) is None
    # A cut within the far ones would leave them as few as it likes
    assert far([0.1] * 5 + [1.0] * 25) is None
    assert far([0.1] * 5 + np.linspace(0.9, 1.1, 25).tolist()) is None


def test_far_is_three_times_the_gap_of_the_others():
    assert far([0.1] * 5 + [0.301] * 5) == [5, 6, 7, 8, 9]
    assert far([0.1] * 5 + [0.299] * 5) is None


def test_far_is_four_standard_deviations_within_either_part():
    """Two logarithms on either side of each mean: their spread is that within."""
    for spread, is_far in ((0.29, True), (0.31, False)):
        usual = 0.1 * np.exp([-spread, spread] * 3)
        assert (far([*usual, *(usual * np.e**1.2)]) is not None) == is_far


def test_responses_of_eight_tokens_decide_and_shorter_ones_do_not():
    """One token has three typical gaps at most, and a response a thousandth of one at least."""
    lengths = [8] * 5 + [9] * 5 + [7] * 3
    sample = with_gaps([0.1] * 5 + [1.0] * 5 + [5.0] * 3, lengths)
    subset = find_far_responses(sample)
    assert subset.inside_S.tolist() == [False] * 5 + [True] * 5 + [False] * 3
    assert subset.among_S.tolist() == [True] * 10 + [False] * 3
    capped = with_gaps([0.1] * 10)
    u_N = np.full(80, 0.01)
    u_N[40::8] = 10.0
    vars(capped)["u_N"] = u_N
    # 10 typical gaps count as 3, in eight tokens
    assert find_far_responses(capped) is not None
    u_N[:40] = 0.12
    u_N[40:] = 0.0
    u_N[40::8] = 10.0
    assert find_far_responses(capped).inside_S.tolist() == [False] * 5 + [True] * 5
    u_N[:40] = 0.13
    assert find_far_responses(capped) is None
    assert (
        far([0.0] * 5 + [0.0031] * 5) == [5, 6, 7, 8, 9] and far([0.0] * 5 + [0.0029] * 5) is None
    )


def test_the_cut_is_where_the_variance_between_is_largest(rng):
    """Of three levels, the two lower ones are nearer to each other."""
    gaps = np.array([0.1] * 6 + [0.12] * 7 + [2.0] * 8)
    order = rng.permutation(len(gaps))
    result = far(gaps[order].tolist())
    assert result == sorted(np.flatnonzero(order >= 13).tolist())
    assert far([0.1] * 6 + [1.7] * 7 + [2.0] * 8) == list(range(6, 21))


@pytest.mark.parametrize(("lowest", "low", "middle", "high", "is_far"), [
    (2, 10, 0.8, 8, False), (2, 10, 0.9, 20, False), (2, 10, 1.0, 8, True),
    (2, 20, 1.0, 30, True), (10, 10, 0.93, 20, True),
])  # fmt: skip
def test_one_between_two_groups_is_in_the_one_that_leaves_more_between(
    lowest, low, middle, high, is_far
):
    """The lower group has mostly logarithms of −0.6 and 0, the upper one of 2; the cut is in the
    middle between both.
    """
    logs = np.array([*[2.0] * high, middle, *[0.0] * low, *[-0.6] * lowest])
    assert far((0.1 * np.exp(logs)).tolist()) == list(range(high + is_far))


def test_a_subset_is_a_part_if_others_could_be_in_it():
    inside_S, every_S = np.array([True, False, False]), np.ones(3, dtype=bool)
    assert Subset(inside_S, every_S).is_part
    assert not Subset(every_S, every_S).is_part and not Subset(~every_S, every_S).is_part
    assert not Subset(inside_S, inside_S).is_part
    assert Subset(inside_S, every_S).where == "in 1 of 3 responses"
    assert Subset(inside_S, every_S, "all of rank 2").where == "in 1 of 3 responses, all of rank 2"


def test_responses_are_chosen_by_their_tokens():
    sample = few_responses([2, 3, 1, 2])
    for chosen in (np.array([1, 4]), np.isin(np.arange(8), [1, 4])):
        subset = responses_with(chosen, np.arange(8) < 6, sample)
        assert subset.inside_S.tolist() == [True, True, False, False]
        assert subset.among_S.tolist() == [True, True, True, False]
