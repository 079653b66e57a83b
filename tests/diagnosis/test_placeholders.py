"""Values that many tokens have exactly, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import placeholders
from mismatch_cli.diagnosis.counts import SideCounts, ZeroCounts
from mismatch_cli.diagnosis.sample import Sample
from tests.diagnosis.samples import sample_of


def in_tens(logq_T: np.ndarray, logp_T: np.ndarray, counts_T=None, length: int = 10) -> Sample:
    """Tokens in responses of ten; the last one may be shorter."""
    tokens = len(logq_T)
    lengths = np.bincount(np.arange(tokens) // length).tolist()
    counts_T = None if counts_T is None else np.array(counts_T, dtype=bool)
    return sample_of(logq_T, logp_T, lengths, counts_T)


def evidence_of(sample=None, sides=None, zeros=None, undone=()):
    counts = SimpleNamespace(sides=sides or {}, zeros=zeros or {})
    return SimpleNamespace(sample=sample, counts=counts, undone=undone)


def spread(tokens: int, seed: int = 0) -> np.ndarray:
    """Log-probabilities between −6 and −1, no two alike."""
    return np.random.default_rng(seed).uniform(-6.0, -1.0, tokens)


@pytest.mark.parametrize(
    ("times", "value", "tokens", "shows"),
    [
        (16, -8.0, 400, True),
        (15, -8.0, 400, False),
        (17, -8.0, 17000, True),
        (17, -8.0, 17001, False),
        (16, -0.051, 400, True),
        (16, -0.049, 400, False),
    ],
)
def test_a_value_repeats_sixteen_times_and_in_one_of_a_thousand_tokens(times, value, tokens, shows):
    other_N = spread(tokens)
    own_N = other_N + 0.1
    own_N[:times] = value
    answer = placeholders._most_suspicious(own_N, other_N)
    assert answer == ((value, times) if shows else (0.0, 0))


@pytest.mark.parametrize(("on_the_other_side", "shows"), [(4, True), (5, False)])
def test_a_value_that_the_other_side_has_as_well_is_of_a_grid(on_the_other_side, shows):
    """A quarter of twenty."""
    other_N = spread(400)
    own_N = other_N + 0.1
    own_N[:20] = -8.0
    other_N[300 : 300 + on_the_other_side] = -8.0
    own_N[300 : 300 + on_the_other_side] = -7.9
    assert placeholders._most_suspicious(own_N, other_N) == ((-8.0, 20) if shows else (0.0, 0))


@pytest.mark.parametrize(("apart", "shows"), [(0.51, True), (0.49, False)])
def test_a_placeholder_is_half_a_nat_from_the_other_side(apart, shows):
    """Elsewhere both sides agree."""
    other_N = spread(400)
    own_N = other_N.copy()
    own_N[:16] = -8.0
    other_N[:16] = -8.0 + apart * np.resize([0.9, 1.1], 16)
    assert (placeholders._most_suspicious(own_N, other_N)[1] == 16) == shows


@pytest.mark.parametrize(("beside", "shows"), [(0.66, True), (0.68, False)])
def test_a_placeholder_has_three_times_the_gap_of_its_neighbours(beside, shows):
    """Its own is 2 nats; values within half a nat on either side have `beside`."""
    own_N = np.concatenate([np.full(16, -3.0), np.linspace(-3.4, -2.6, 100)])
    other_N = own_N + 0.0
    other_N[:16] = -1.0 + 1e-3 * np.arange(-7.5, 8.5)
    other_N[16:] -= beside
    assert (placeholders._most_suspicious(own_N, other_N)[1] == 16) == shows


def test_the_value_with_the_largest_gap_in_all_is_named():
    """Thirty values of 4 nats, twenty of 5 and, more often, others that both sides have."""
    other_N = spread(800)
    own_N = other_N + 0.1
    own_N[:30], other_N[:30] = -20.0, -16.0 + 1e-3 * np.arange(30)
    own_N[30:50], other_N[30:50] = -30.0, -25.0 + 1e-3 * np.arange(20)
    own_N[50:250], other_N[50:250] = -40.0, -40.0
    assert placeholders._most_suspicious(own_N, other_N) == (-20.0, 30)


def test_neighbours_are_a_hundred_on_either_side_and_within_half_a_nat():
    """Gaps of 1 below and of 3 above the value; more distant ones have 100."""
    below = -2.0 - 0.001 * np.arange(1, 121)
    above = -2.0 + 0.001 * np.arange(1, 121)
    own_N = np.concatenate([above, [-2.0] * 3, below, [-2.6, -1.4]])
    d_N = np.concatenate([[3.0] * 100, [100.0] * 20, [50.0] * 3, [1.0] * 100, [100.0] * 20, [9, 9]])
    order = np.random.default_rng(0).permutation(len(own_N))
    own_N, other_N = own_N[order], (own_N - d_N)[order]
    assert placeholders._gap_of_neighbours(own_N, other_N, -2.0) == pytest.approx(2.0)
    few_N = np.array([-2.49, -2.0, -1.51, -1.49, -2.51])
    apart_N = few_N + np.array([1.0, 50.0, -2.0, 90.0, 90.0])
    assert placeholders._gap_of_neighbours(few_N, apart_N, -2.0) == pytest.approx(1.5)
    least = placeholders._gap_of_neighbours(few_N[:3], apart_N[:3], -2.0)
    assert least == pytest.approx(1.5)
    alone_N = np.array([-9.0, -2.0, -0.1])
    assert placeholders._gap_of_neighbours(alone_N, alone_N + 1, -2.0) == 0.0


def test_values_are_counted_on_the_other_side():
    times_V = placeholders._times_V(np.array([-3.0, -2.0, -1.0]), np.array([-1.0, -3.0, -1.0, 0]))
    assert times_V.tolist() == [1, 0, 2]


@pytest.mark.parametrize(("value", "is_clamp"), [(-3.0, False), (-9.0, True)])
@pytest.mark.parametrize("side", ["logp_rollout", "logp_trainer"])
def test_a_value_is_named_with_its_side_and_left_out(side, value, is_clamp):
    """Twenty of two hundred tokens, the first of responses 0 to 19; the least value is a clamp."""
    other_T = np.random.default_rng(0).uniform(-8.0, -7.0, 400)
    own_T = other_T + 0.05
    own_T[: 20 * 10 : 10] = value
    counts_T = np.arange(400) % 2 == 0
    logq_T, logp_T = (own_T, other_T) if side == "logp_rollout" else (other_T, own_T)
    sample = in_tens(logq_T, logp_T, counts_T)
    finding = placeholders.check(evidence_of(sample))
    assert (finding.check, finding.status, finding.effect) == ("placeholders", "found", 0.1)
    clamp = ", and none is below: the column is clamped" if is_clamp else ""
    assert finding.sentence == (
        f"20 sampled tokens have {side} = {value:g} exactly, whatever the other side's value{clamp}."
    )
    assert finding.evidence == (
        (f"{side}: the value, nats", value),
        ("tokens of the sample with it", 20),
    )
    assert finding.change == (placeholders.OF_A_CLAMP if is_clamp else "")
    has_it_N = own_T[sample.index_N] == value
    np.testing.assert_array_equal(finding.left_N, np.where(has_it_N, np.nan, sample.d_N))
    assert np.flatnonzero(finding.part.inside_S).tolist() == list(range(20))
    assert finding.part.among_S.all()


def test_without_a_value_its_least_share_is_named():
    """A zero would show in the three of ten tokens of which one side is uncertain."""
    logq_T, logp_T = np.full(10, -0.5), np.full(10, -0.6)
    logq_T[:2], logp_T[2:3], logp_T[3] = -1.1, -1.1, -0.99
    finding = placeholders.check(evidence_of(in_tens(logq_T, logp_T)))
    assert (finding.status, finding.effect, finding.measure) == ("clear", 0.0, "share of tokens")
    assert finding.reason == (
        "would have found one 0.0 in the 30 % of the tokens that are uncertain"
    )
    certain = in_tens(np.full(10, -0.001), np.full(10, -0.5))
    finding = placeholders.check(evidence_of(certain))
    assert finding.reason == "no power: 100 % of the tokens are certain"


SAMPLED = {"zeros": 40, "zeros_surprise": 40.0, "rest": 100, "rest_surprise": 100.0}


@pytest.mark.parametrize(
    ("last", "in_runs", "sampled", "check"),
    [
        (70, 0, False, "end-of-sequence"),
        (69, 0, False, "placeholders"),
        (0, 70, False, "masked-tokens"),
        (0, 69, False, "placeholders"),
        (0, 70, True, "placeholders"),
        (70, 70, False, "end-of-sequence"),
    ],
)
def test_zeros_are_of_the_kind_that_seven_tenths_of_them_are(last, in_runs, sampled, check):
    """Of 100 tokens on two sides."""
    rows = [(60, last // 2, in_runs // 2), (40, last - last // 2, in_runs - in_runs // 2)]
    sides = [
        SimpleNamespace(tokens=tokens, last=at_end, in_runs=runs, are_sampled=sampled)
        for tokens, at_end, runs in rows
    ]
    assert placeholders._kind(sides) == check
    sides[0].are_sampled = True
    if check == "masked-tokens":
        assert placeholders._kind(sides) == check


def zeros_of(**fields) -> SimpleNamespace:
    plain = {"tokens": 3, "last": 0, "in_runs": 0, "gap": 6.0, "are_legitimate": False}
    return SimpleNamespace(**plain | {"are_sampled": False} | fields)


def test_zeros_that_other_weights_explain_are_no_placeholders():
    zeros = {
        "logp_rollout": zeros_of(),
        "logp_trainer": zeros_of(are_legitimate=True),
        "logp_recomputed": zeros_of(tokens=0),
    }
    assert list(placeholders._placeholders(evidence_of(zeros=zeros))) == ["logp_rollout"]
    undone = evidence_of(zeros=zeros, undone=("forced-tokens",))
    assert placeholders._placeholders(undone) == {}
    other = evidence_of(zeros=zeros, undone=("retokenised",))
    assert list(placeholders._placeholders(other)) == ["logp_rollout"]


def zeros_evidence(**fields):
    """Of twenty tokens in two responses log μ has four zeros: two of them, one at the end of the
    first response, are uncertain on the other side.
    """
    logq_T, logp_T = np.full(20, -2.0), np.full(20, -2.1)
    logq_T[[3, 9, 12, 13]] = 0.0
    logp_T[[12, 13]] = -0.01, -0.03
    logp_T[15] = -0.04
    logq_T[19] = logp_T[19] = -0.01
    sides = {"logp_rollout": SideCounts(tokens=500), "logp_trainer": SideCounts(tokens=400)}
    zeros = {"logp_rollout": zeros_of(**fields), "logp_trainer": zeros_of(tokens=2, gap=5.0)}
    return evidence_of(in_tens(logq_T, logp_T), sides, zeros)


def test_zeros_of_both_sides_are_named_with_their_mean_gap():
    evidence = zeros_evidence()
    finding = placeholders.check(evidence)
    assert (finding.check, finding.status, finding.effect) == ("placeholders", "found", 0.01)
    assert finding.sentence == (
        "5 tokens have a log-probability of exactly 0.0 where the other side is far from certain."
    )
    assert finding.evidence == (
        ("logp_rollout: exactly 0.0, the other side uncertain", 3),
        ("logp_rollout: mean |Δlog p| there, nats", 2.0),
        ("logp_trainer: exactly 0.0, the other side uncertain", 2),
        ("logp_trainer: mean |Δlog p| there, nats", 2.5),
    )
    assert finding.change == ""
    is_zero_N = evidence.sample.logq_T == 0
    np.testing.assert_array_equal(np.isnan(finding.left_N), is_zero_N)
    assert finding.left_N[~is_zero_N] == pytest.approx(evidence.sample.d_N[~is_zero_N])
    assert finding.part.inside_S.tolist() == [True, False]
    assert finding.part.among_S.tolist() == [True, True]


def test_zeros_are_of_drafts_if_both_sides_were_sampled():
    """The counts of one side are enough to say that they were not."""
    evidence = zeros_evidence(are_sampled=True)
    assert placeholders.check(evidence).change == ""
    evidence.counts.zeros["logp_trainer"].are_sampled = True
    assert placeholders.check(evidence).change == placeholders.OF_DRAFTS
    evidence.counts.zeros["logp_rollout"].last = 3
    evidence.counts.zeros["logp_trainer"].last = 2
    at_the_end = placeholders.zeros_finding(evidence, "end-of-sequence")
    assert at_the_end.change == "" and at_the_end.part.among_S.tolist() == [True, False]
    assert placeholders.zeros_finding(evidence, "placeholders") is None
    assert placeholders.zeros_finding(evidence_of(), "placeholders") is None


def test_a_zero_at_the_end_is_of_the_responses_whose_last_token_shows_it():
    """The last token of the second response is nearly certain on the other side."""
    logq_T, logp_T = np.full(40, -2.0), np.full(40, -2.1)
    logq_T[[9, 19, 23]] = 0.0
    logp_T[19] = -0.04
    sample = in_tens(logq_T, logp_T)
    zero_T = logq_T == 0
    at_the_end = placeholders._part_with(zero_T, sample, at_the_end=True)
    assert at_the_end.inside_S.tolist() == [True, False, False, False]
    assert at_the_end.among_S.tolist() == [True, False, True, True]
    anywhere = placeholders._part_with(zero_T, sample, at_the_end=False)
    assert anywhere.inside_S.tolist() == [True, False, True, False]
    assert anywhere.among_S.all()
    sample.counts_T[9] = False
    outside = placeholders._part_with(zero_T, sample, at_the_end=True)
    assert outside.inside_S.tolist() == [False] * 4


def test_zeros_of_the_sample_are_those_of_a_side_with_one_beyond_a_nat():
    sample = in_tens(np.array([0.0, 0.0, -0.99, -3.0]), np.array([-1.01, -0.1, 0.0, 0.0]))
    sample.logp_T[3] = -3.0
    assert placeholders.zeros_T(sample).tolist() == [True, True, False, False]
    assert placeholders.spoiled_T(evidence_of(sample)).tolist() == [True, True, False, False]
    sample.logp_T[0] = -0.99
    assert not placeholders.zeros_T(sample).any()


def test_drafts_are_as_probable_as_the_rest():
    """What `are_sampled` compares: the mean surprise of zeros with that of other tokens."""
    assert ZeroCounts(**SAMPLED).are_sampled
    assert not ZeroCounts(**SAMPLED | {"zeros_surprise": 4000.0}).are_sampled
