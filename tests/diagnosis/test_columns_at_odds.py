"""One side's columns beside each other, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import columns_at_odds
from tests.diagnosis.samples import SampleColumns


def sample_of(topk_d_T, d_T=None, counts_T=None, **columns: object) -> SampleColumns:
    """Tokens in responses of two."""
    topk_d_T = np.array(topk_d_T)
    tokens = len(topk_d_T)
    d_T = np.full(tokens, 0.3) if d_T is None else np.array(d_T)
    counts_T = np.ones(tokens, dtype=bool) if counts_T is None else np.array(counts_T)
    index_N = np.flatnonzero(counts_T)
    plain = {"topk_logp_TK": None} | columns
    return SampleColumns(
        topk_d_T=topk_d_T,
        logq_T=np.full(tokens, -1.0),
        logp_T=d_T - 1.0,
        d_N=d_T[index_N],
        counts_T=counts_T,
        index_N=index_N,
        response_T=np.arange(tokens) // 2,
        num_responses=tokens // 2,
        **plain,
    )


def checked(rollout: tuple[int, int, float], trainer: tuple[int, int, float], sample=None):
    """By how many tokens were compared, how many are at odds, and by how much in all."""
    sides = {}
    for side, (compared, at_odds, difference) in (("rollout", rollout), ("trainer", trainer)):
        sides[side] = SimpleNamespace(compared=compared, at_odds=at_odds, difference=difference)
    sample = sample or sample_of([0.1, 0.1, 0.3, 0.3], topk_logp_TK="here")
    evidence = SimpleNamespace(own_columns=SimpleNamespace(sides=sides), sample=sample)
    return columns_at_odds.check(evidence)


def test_the_side_with_more_tokens_at_odds_is_named():
    finding = checked((1000, 2, 1.0), (2000, 10, 4.0))
    assert (finding.check, finding.status, finding.effect) == ("columns-at-odds", "found", 0.005)
    assert finding.measure == "share of tokens"
    assert finding.sentence == (
        "10 of 2,000 sampled tokens of the trainer contradict the trainer's own top-K column."
    )
    assert finding.evidence == (
        ("rollout: sampled tokens among the ranks", 1000),
        ("rollout: with another value", 2),
        ("rollout: mean difference there, nats", 0.5),
        ("trainer: sampled tokens among the ranks", 2000),
        ("trainer: with another value", 10),
        ("trainer: mean difference there, nats", 0.4),
    )
    assert finding.part.inside_S.tolist() == [True, False]
    assert finding.left_N is None


def test_a_thousandth_of_the_tokens_is_at_odds():
    for at_odds, status in ((1, "found"), (0, "clear")):
        assert checked((1000, at_odds, 0.1), (0, 0, 0.0)).status == status
    finding = checked((1001, 1, 0.1), (5000, 0, 0.0))
    assert (finding.status, finding.effect) == ("clear", 1 / 1001)
    assert finding.reason == "would have found it in ≥ 0.1 % of 1,001 tokens"
    assert len(finding.evidence) == 5
    without = checked((0, 0, 0.0), (0, 0, 0.0))
    assert (without.check, without.status) == ("columns-at-odds", "untested")
    assert without.reason == "needs top-K log-probabilities"


@pytest.mark.parametrize(
    ("apart", "same", "topk_logp", "settled"),
    [
        (4, 96, None, True),
        (5, 95, None, False),
        (4, 96, "here", False),
        (1, 0, None, False),
        (0, 1, None, True),
        (0, 0, None, False),
    ],
)
def test_columns_are_settled_if_a_twentieth_is_apart_once_the_rest_is_undone(
    apart, same, topk_logp, settled
):
    """By a twentieth of a nat; a token whose ranks do not have it says nothing."""
    values = [0.351] * apart + [0.349, 0.251] * (same // 2) + [0.3] * (same % 2) + [np.nan] * 11
    sample = sample_of(values, topk_logp_TK=topk_logp)
    assert columns_at_odds.settled(SimpleNamespace(sample=sample)) == settled
    sample.topk_d_T = None
    assert not columns_at_odds.settled(SimpleNamespace(sample=sample))


def test_settled_columns_are_clear():
    sample = sample_of([0.3] * 6)
    assert checked((1000, 500, 9.0), (1000, 0, 0.0), sample).status == "clear"


def test_the_gap_of_the_ranks_is_taken_if_it_is_less_than_half():
    """Of 1.2 nats on the tokens that count; where the ranks do not have a token, its own remains."""
    for ranks, left in (
        ([0.2, 9.0, -0.09, np.nan, 0.0], [0.2, -0.09, 0.3, 0.0]),
        ([0.2, 9.0, -0.11, np.nan, 0.0], None),
    ):
        sample = sample_of(ranks, [0.3, 0.3, 0.3, 0.3, 0.3], [True, False, True, True, True])
        by_topk_N = columns_at_odds._left_by_topk(sample)
        assert by_topk_N == (left and pytest.approx(left))
    sample.topk_d_T = None
    assert columns_at_odds._left_by_topk(sample) is None
    assert columns_at_odds._part_at_odds(sample) is None


def test_responses_at_odds_are_those_with_a_token_that_differs_by_a_twentieth():
    """Of those with a token that counts and is in the ranks."""
    sample = sample_of(
        [0.351, 0.3, 0.349, 0.3, np.nan, np.nan, 0.249, np.nan, 0.3, 0.3],
        counts_T=[True] * 8 + [False] * 2,
    )
    part = columns_at_odds._part_at_odds(sample)
    assert part.inside_S.tolist() == [True, False, False, True, False]
    assert part.among_S.tolist() == [True, True, False, True, False]
