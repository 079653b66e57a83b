"""The bias of one token, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import biased_token
from tests.diagnosis.samples import SampleColumns


def test_an_id_is_frequent_from_eight_occurrences_under_four_prompts_on():
    """The last has eight under three prompts, and one has seven under seven."""
    id_M = np.repeat([5, 7, 3, 9], [8, 7, 9, 8])
    group_M = np.concatenate([[0, 1, 2, 3] * 2, range(7), [4] * 6 + [5, 6, 7], [0, 1, 2, 0] * 2])
    order = np.random.default_rng(0).permutation(len(id_M))
    assert biased_token.frequent_ids(id_M[order], group_M[order]).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("own", "others", "near"),
    [
        ([1.0] * 10, 0.24, 1.0),
        ([1.0] * 10, 0.26, None),
        ([-1.0] * 10, 0.24, 1.0),
        ([0.051] * 10, 0.01, 1.0),
        ([0.049] * 10, 0.01, None),
        ([1.0] * 9 + [2.0], 0.2, 0.9),
        ([1.0] * 8 + [2.0, 0.0], 0.2, None),
        ([1.0] * 8 + [1.29, 0.71], 0.2, 1.0),
        ([1.0] * 8 + [1.31, 0.71], 0.2, 0.9),
        ([-1.0] * 8 + [-1.29, -0.69], 0.2, 0.9),
        ([2.0] * 8 + [2.59, 1.41], 0.2, 1.0),
    ],
)
def test_a_bias_is_near_all_occurrences_and_four_times_the_gap_of_other_tokens(own, others, near):
    """Nine tenths within 30 % of it; 80 % of the other tokens stay below `others`."""
    gap_M = np.array(own + [others, -others] * 40 + [9.0] * 10)
    id_M = np.array([7] * 10 + list(range(100, 190)))
    bias = biased_token.largest_bias(gap_M, id_M, np.array([7]))
    if near is None:
        assert bias is None
    else:
        assert (bias.token, bias.occurrences) == (7, 10)
        assert (bias.nats, bias.near) == pytest.approx((np.median(own), near))


def test_of_two_biases_the_larger_is_taken():
    gap_M = np.array([1.0] * 8 + [-2.0] * 9 + [0.01] * 200)
    id_M = np.array([7] * 8 + [3] * 9 + [0] * 200)
    assert biased_token.largest_bias(gap_M, id_M, np.array([3, 7])).token == 3
    assert biased_token.largest_bias(gap_M, id_M, np.array([], dtype=int)) is None


def test_the_gap_of_others_is_their_eightieth_percentile():
    assert biased_token._typical(np.linspace(-1, 0, 11)) == pytest.approx(0.8)
    assert biased_token._typical(np.zeros(0)) == np.inf


@pytest.mark.parametrize("nats", [0.7, -0.7])
def test_a_bias_moves_its_own_token_exactly_and_others_by_what_it_takes(nats):
    """Two ids with 0.6 and 0.4: with the first at higher odds, the second has what remains. A third
    token of 0.4 moved by half of that, and a fourth to the other side.
    """
    moved = 0.6 * np.exp(nats) / (0.6 * np.exp(nats) + 0.4)
    logq_T = np.log([0.6, 0.4, 0.4, 0.4, 0.4])
    own_N = np.array([True, False, False, False, False])
    least = np.log(1 - moved)
    half = (least + logq_T[1]) / 2
    logp_T = np.array([np.log(moved) + 0.1, least, half, 0, 0])
    logp_T[3] = logq_T[3] + 0.2 * np.sign(nats)
    logp_T[4] = least - 0.2 * np.sign(nats)
    sample = SampleColumns(logq_T=logq_T, logp_T=logp_T, index_N=np.arange(5))
    bias = biased_token._Bias(7, nats, 10, 1.0)
    left_N = biased_token._left(sample, bias, own_N)
    sign = np.sign(nats)
    assert left_N == pytest.approx([0.1, 0.0, 0.0, 0.2 * sign, -0.2 * sign])


def sample_of(nats: float, near: int = 20, prompts: int = 8) -> SampleColumns:
    """Two hundred tokens of p = 0.3, of which each tenth is the id 7: `near` of these have a bias."""
    tokens = 200
    is_own_T = np.arange(tokens) % 10 == 4
    odds_T = np.full(tokens, np.log(0.3 / 0.7))
    moved_T = odds_T + 0.01 * np.resize([1.0, -1.0], tokens)
    moved_T[np.flatnonzero(is_own_T)[:near]] += nats
    logq_T, logp_T = -np.logaddexp(0, -odds_T), -np.logaddexp(0, -moved_T)
    return SampleColumns(
        response_ids_T=np.where(is_own_T, 7, 1000 + np.arange(tokens)),
        logq_T=logq_T,
        logp_T=logp_T,
        d_N=logp_T - logq_T,
        index_N=np.arange(tokens),
        group_N=np.arange(tokens) // 10 % prompts,
    )


@pytest.mark.parametrize(
    ("nats", "near", "phrase", "direction"),
    [(0.8, 20, "all its", "higher"), (-0.8, 19, "95 % of its", "lower")],
)
def test_the_biased_token_is_named(nats, near, phrase, direction):
    finding = biased_token.check(SimpleNamespace(sample=sample_of(nats, near)))
    assert (finding.check, finding.status) == ("biased-token", "found")
    assert finding.effect == pytest.approx(0.8, abs=0.02) and finding.at_most
    assert finding.measure == "nats on one token's logit"
    assert finding.evidence == (
        ("token id", 7),
        ("its occurrences, neither certain nor impossible", 20),
        ("share of them within 30 % of the bias", near / 20),
        ("typical log-odds gap of the others, nats", pytest.approx(0.01)),
    )
    assert finding.sentence.startswith(f"In {phrase} 20 occurrences the log-odds of token 7 are 0.")
    assert f"nats {direction} in the trainer" in finding.sentence
    assert np.abs(finding.left_N).mean() < 0.02


def test_without_a_bias_the_least_that_would_have_been_found_is_named():
    finding = biased_token.check(SimpleNamespace(sample=sample_of(0.0)))
    assert (finding.check, finding.status, finding.effect) == ("biased-token", "clear", 0.0)
    assert finding.reason == "would have found a bias of ≥ 0.05 nats on one of 1 ids"
    assert biased_token._power(np.full(9, 0.1), 2) == "a bias of ≥ 0.4 nats on one of 2 ids"
    rare = biased_token.check(SimpleNamespace(sample=sample_of(0.8, prompts=3)))
    assert (rare.status, rare.reason) == (
        "untested",
        "no power: no token occurs 8 times, under 4 prompts, between certain and impossible",
    )
    without = sample_of(0.8)
    without.response_ids_T = None
    finding = biased_token.check(SimpleNamespace(sample=without))
    assert (finding.check, finding.reason) == ("biased-token", "the trace has no token ids")
