"""What a check would have found, to the number."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.diagnosis.group_estimates import Mean
from mismatch_cli.diagnosis.power import (
    clear,
    no_power,
    of_responses,
    of_tokens,
    of_values,
    percent,
    times_of,
    too_certain,
    varied_S,
)
from tests.diagnosis.samples import few_responses


def test_a_clear_answer_says_what_it_would_have_found_or_was_not_tested():
    left_N = np.zeros(2)
    finding = clear("credit", 0.5, "share", "it in 3", (("a", 1),), left_N)
    assert (finding.check, finding.status, finding.effect) == ("credit", "clear", 0.5)
    assert (finding.measure, finding.evidence) == ("share", (("a", 1),))
    assert finding.reason == "would have found it in 3" and finding.left_N is left_N
    without = clear("credit", 0.5, "share", no_power("too few"))
    assert (without.status, without.reason, without.effect) == (
        "untested",
        "no power: too few",
        None,
    )


@pytest.mark.parametrize(("share", "words"), [
    (0.0123, "1.2 %"), (0.5, "50 %"), (0.994, "99 %"), (0.996, "100 %"), (1.0, "100 %"), (1.5, "100 %"),
])  # fmt: skip
def test_shares_have_two_digits(share, words):
    assert percent(share) == words


@pytest.mark.parametrize(("testable", "count", "words"), [
    (2, 50, "it in ≥ 100 % of the 2 responses that can show it"),
    (1, 50, "no power: 1 of 50 responses could show it"),
    (8, 200, "it in ≥ 25 % of the 8 responses that can show it"),
    (8, 201, "it in ≥ 38 % of the 8 responses that can show it"),
    (2, 201, "no power: 2 of 201 responses could show it"),
    (2000, 3000, "it in ≥ 1.5 % of the 2,000 responses that can show it"),
])  # fmt: skip
def test_two_responses_or_one_in_a_hundred_are_more_than_chance(testable, count, words):
    assert of_responses(np.arange(count) < testable) == words


def test_tokens_and_values_are_named_with_their_share():
    sample = few_responses([4, 4], counts_T=np.arange(8) < 5)
    assert of_tokens(1.5, sample) == "it in ≥ 2 tokens (30 %)"
    assert of_tokens(1.0, sample) == "it in ≥ 1 token (20 %)"
    none = few_responses([2], counts_T=np.zeros(2, dtype=bool))
    assert of_tokens(1.0, none) == "it in ≥ 1 token (100 %)"
    assert of_values(1234) == "it in one of 1,234 values"


def test_certain_tokens_are_above_a_hundredth_of_a_nat():
    logq_T = np.array([-0.011, -0.009, 0.0, -0.001, -0.02])
    sample = few_responses([5], logq_T=logq_T, counts_T=np.arange(5) < 4)
    assert too_certain(sample) == "no power: 75 % of the tokens are certain"
    none = few_responses([2], counts_T=np.zeros(2, dtype=bool))
    assert too_certain(none) == "no power: 100 % of the tokens are certain"


def test_the_least_ratio_is_beyond_the_errors_of_both_means():
    """exp(2 × √(0.3² + 0.4²)) is e."""
    first, second = Mean(2.0, 0.6, 9), Mean(5.0, 2.0, 9)
    assert times_of(1.5, 2.0, first, second) == "2.7 times"
    assert times_of(3.0, 2.0, first, second) == "3 times"
    assert times_of(1.1, 2.0, first) == "1.8 times"
    # A mean of nothing has no error
    assert times_of(1.1, 2.0, first, Mean(0.0, 1.0, 9)) == "1.8 times"
    nothing = "no power: too few prompts to tell two means apart"
    assert times_of(1.5, 2.0, Mean(0.0, 1.0, 9)) == nothing
    assert times_of(1.5, 2.0, first, Mean(1.0, np.inf, 9)) == nothing
    assert times_of(1.5, 9.98, first) == "20 times"
    assert times_of(1.5, 9.99, first) == nothing
    assert times_of(1.1, 2.0, Mean(0.5, 0.15, 9)) == "1.8 times"


def test_responses_that_change_from_token_to_token_are_varied():
    """Steps of 0.5, of 3, which count as 2, and in the third to a token that does not count."""
    logq_T = -np.array(
        [1.0, 1.5, 1.0, 9.0, 1.0, 4.0, 4.5, 5.0, 1.0, 4.0, 1.0, 3.0, np.nan, 1.0, 1.0, 1.75]
    )
    counts_T = np.ones(16, dtype=bool)
    counts_T[9] = False
    sample = few_responses([3, 1, 4, 4, 2, 2], logq_T=logq_T, counts_T=counts_T)

    def varied(fewest: int, least: float) -> list[int]:
        return np.flatnonzero(varied_S(sample, fewest, least)).tolist()

    # Means of 0.5, none, 1, 2 and none, and of one step 0.75; none begins where a token does not
    # count
    assert varied(0, 0.49) == [0, 2, 3, 5] and varied(0, 0.51) == [2, 3, 5]
    assert varied(0, 0.99) == [2, 3] and varied(0, 1.01) == [3]
    assert varied(0, 1.99) == [3] and varied(0, 2.01) == []
    assert (
        varied(2, 0.0) == [0, 2, 3, 5]
        and varied(3, 0.0) == [0, 2]
        and varied(4, 0.0) == [2]
        and varied(5, 0.0) == []
    )
    assert varied(1, 0.0) == [0, 1, 2, 3, 4, 5]
