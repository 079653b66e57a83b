"""The tail of a gap, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import heavy_tail
from tests.diagnosis.samples import SampleColumns

Tail = heavy_tail._Tail


def sample_of(d_N: np.ndarray, response_N: np.ndarray, typical: float = 0.1) -> SampleColumns:
    """Tokens that all count, with log μ of −1, −2, …, each response of another prompt."""
    logq_T = -1.0 - np.arange(len(d_N))
    return SampleColumns(
        d_N=d_N,
        u_N=np.minimum(np.abs(d_N) / typical, 10),
        typical_N=np.full(len(d_N), typical),
        logq_T=logq_T,
        logp_T=logq_T + d_N,
        response_T=response_N,
        index_N=np.arange(len(d_N)),
        num_responses=int(response_N.max()) + 1,
        group_N=response_N % 128,
    )


def tail_of(inside: int, tokens: int, count: int = 10, fewest: int = 10) -> Tail:
    """The first tokens, with half of the gap and 0.1 nats without them."""
    inside_N = np.arange(tokens) < inside
    return Tail(inside_N, count, f"{count} tokens", 0.5, fewest, np.full(tokens, -0.1))


def test_a_tail_has_a_share_of_the_gap_and_is_cut_to_what_is_typical():
    sample = sample_of(np.array([0.3, -2.0, 0.05, -0.65]), np.zeros(4, dtype=int))
    tail = heavy_tail._tail(sample, np.array([False, True, True, False]), 2, "token", 7)
    assert tail.inside_N.tolist() == [False, True, True, False]
    assert (tail.count, tail.phrase, tail.fewest) == (2, "2 tokens", 7)
    assert tail.share == pytest.approx(2.05 / 3.0)
    assert tail.left_N == pytest.approx([0.3, -0.1, 0.05, -0.65])
    assert tail.left == pytest.approx(1.1 / 4)
    sample.d_N = np.zeros(4)
    assert heavy_tail._tail(sample, np.ones(4, dtype=bool), 4, "token", 7).share == 0.0


def test_a_token_is_far_beyond_ten_typical_gaps():
    sample = sample_of(np.array([0.99, -1.01, 1.01, 0.1]), np.array([0, 0, 1, 1]))
    tail = heavy_tail._far_tokens(sample)
    assert tail.inside_N.tolist() == [False, True, True, False]
    assert (tail.count, tail.phrase, tail.fewest) == (2, "2 tokens", 10)


def test_all_tokens_of_a_far_response_are_in_the_tail():
    """The second response has five times the gap of the others."""
    response_N = np.repeat([0, 1, 2], 8)
    d_N = np.where(response_N == 1, 0.5, 0.1)
    d_N[8] = 0.0
    tail = heavy_tail._far_responses(sample_of(d_N, response_N))
    assert tail.inside_N.tolist() == (response_N == 1).tolist()
    assert (tail.count, tail.phrase, tail.fewest) == (1, "1 response", 3)


@pytest.mark.parametrize(("times", "far"), [(3.9, False), (4.1, True)])
def test_a_response_is_far_beyond_four_times_the_median(times, far):
    """Of two typical gaps."""
    response_N = np.repeat([0, 1, 2, 3, 4], [8, 9, 10, 8, 8])
    sample = sample_of(0.2 * np.array([1.0, times, 1.0, 2.0, 0.5])[response_N], response_N)
    assert heavy_tail.are_far_S(sample).tolist() == [False, far, False, False, False]


@pytest.mark.parametrize(("inside", "is_few"), [(0, False), (1, True), (20, True), (21, False)])
def test_a_fifth_of_the_tokens_are_few(inside, is_few):
    assert tail_of(inside, 100).is_few == is_few


@pytest.mark.parametrize(
    ("gaps", "is_apart"),
    [
        ([0.15] * 14 + [0.5] * 2, True),
        ([0.15] * 14 + [0.5] * 3, False),
        ([0.15] * 13 + [0.5] * 2, False),
        ([0.101] * 7 + [0.199] * 7 + [0.401, 0.799], True),
        ([0.099] * 7 + [0.199] * 7 + [0.401, 0.799], False),
        ([0.101] * 7 + [0.201] * 7 + [0.401, 0.799], False),
        ([0.15] * 7 + [0.5] + [0.399, 0.801, 5.0], True),
        ([0.15] * 7 + [0.5] + [0.401], False),
        ([-0.15] * 7 + [-0.5] * 2, False),
    ],
)
def test_far_tokens_are_apart_if_the_others_end_before_them(gaps, is_apart):
    """One to two typical gaps are the bulk; at four to eight it has ended if a seventh is there."""
    sample = sample_of(np.array(gaps), np.zeros(len(gaps), dtype=int))
    assert heavy_tail._is_apart(sample) == is_apart


def evidence_of(sample: SampleColumns, gap: float, high: float, family: str = "moe"):
    return SimpleNamespace(
        sample=sample,
        gap=SimpleNamespace(value=gap),
        expected=SimpleNamespace(high=high),
        family=family,
    )


@pytest.mark.parametrize(
    ("share", "gap", "inside", "tokens", "decides"),
    [
        (0.51, 0.21, 10, 100, True),
        (0.50, 0.21, 10, 100, True),
        (0.49, 0.21, 10, 100, False),
        (0.51, 0.19, 10, 100, False),
        (0.51, 0.21, 30, 100, False),
        (0.67, 0.19, 10, 1000, True),
        (0.66, 0.19, 10, 1000, False),
        (0.67, 0.19, 10, 999, False),
        (0.67, 0.19, 300, 1000, False),
    ],
)
def test_a_tail_decides_if_the_gap_is_too_large_by_it_or_nearly_all_of_it(
    share, gap, inside, tokens, decides
):
    """Up to 0.2 nats are expected, and 0.1 are left."""
    tail = replace(tail_of(inside, tokens), share=share)
    sample = SimpleNamespace(num_counted=tokens)
    assert heavy_tail._decides(evidence_of(sample, gap, 0.2), tail) == decides
    for left, still in ((0.2, share >= 0.5), (0.21, False)):
        beyond = replace(tail, left_N=np.full(tokens, left))
        if gap > 0.2 and inside == 10:
            assert heavy_tail._decides(evidence_of(sample, gap, 0.2), beyond) == still


@pytest.mark.parametrize(
    ("count", "share", "others", "more"),
    [
        (10, 0.31, 0.1, True),
        (9, 0.31, 0.1, False),
        (10, 0.29, 0.1, False),
        (10, 0.31, 5.0, False),
    ],
)
def test_a_tail_is_more_than_chance_by_its_count_and_its_share(count, share, others, more):
    """Of forty prompts each has one token in it with 0.1 nats, and one of `others`."""
    sample = sample_of(np.resize([-0.1, others], 80), np.repeat(np.arange(40), 2))
    tail = Tail(np.resize([True, False], 80), count, "", share, 10, np.zeros(80))
    assert heavy_tail._is_more_than_chance(sample, tail) == more


def test_the_range_of_both_sides_in_the_tail():
    sample = sample_of(np.array([0.5, -0.25, 0.75, 0.0]), np.zeros(4, dtype=int))
    tail = tail_of(3, 4)
    assert heavy_tail._values(sample, tail) == (
        ("log μ in the tail, from", -3.0),
        ("to", -1.0),
        ("log π in the tail, from", -2.25),
        ("to", -0.5),
    )
    assert heavy_tail._range_sentence(sample, tail) == (
        "There log μ is -3 to -1 and log π is -2.25 to -0.5."
    )
    assert heavy_tail._values(sample, tail_of(0, 4)) == ()


def tailed(far: float, tokens: int = 1200, everywhere: float = 0.0, family: str = "moe", **fields):
    """The finding for gaps of 0.1 nats, of which one in twenty has `far`, in 61 responses; and
    `everywhere` more in each fourth token.
    """
    response_N = np.arange(tokens) % 61
    d_N = np.resize([0.1, -0.1], tokens)
    d_N[::4] += everywhere
    d_N[7::20] = far
    sample = sample_of(d_N, response_N, fields.get("typical", 0.1))
    gap = float(np.abs(d_N).mean())
    return heavy_tail.check(evidence_of(sample, gap, fields.get("high", 1.0), family)), sample


def test_a_tail_in_tokens_is_named_with_its_share():
    """A twentieth of the tokens has 2 nats: 51 % of the gap."""
    finding, sample = tailed(far=2.0)
    share = 60 * 2.0 / (60 * 2.0 + 1140 * 0.1)
    assert (finding.check, finding.status) == ("heavy-tail", "found")
    assert finding.effect == pytest.approx(share) and not finding.beyond_expected
    assert finding.measure == "share of Σ|Δlog p| in the tail"
    assert finding.sentence == "60 tokens of the sample carry 51 % of the gap."
    assert finding.evidence[:4] == (
        ("tokens beyond 10 typical gaps", 60),
        ("share of Σ|Δlog p| on them", pytest.approx(share)),
        ("responses beyond 4 times the median response", 0),
        ("share of Σ|Δlog p| in them", 0.0),
    )
    assert len(finding.evidence) == 8
    assert finding.left_N == pytest.approx(np.where(sample.d_N == 2, 0.1, sample.d_N))


def test_a_tail_that_decides_says_what_the_gap_is_without_it():
    """Of a gap of 0.195 nats, where 0.15 are expected."""
    finding, _ = tailed(far=2.0, high=0.15)
    assert finding.status == "found" and finding.beyond_expected
    assert finding.sentence.startswith(
        "60 tokens of the sample carry 51 % of the gap, which is 0.1 nats without them. There log μ"
    )


@pytest.mark.parametrize(
    ("family", "experts", "replay"),
    [("moe", True, True), ("", True, True), ("dense", False, False)],
)
def test_experts_are_mentioned_unless_the_model_has_none(family, experts, replay):
    finding, _ = tailed(far=2.0, family=family)
    assert finding.status == "found"
    assert ("different experts" in finding.cause) == experts
    assert ("routing in the trainer" in finding.change) == replay


@pytest.mark.parametrize(
    ("family", "everywhere", "high", "status"),
    [
        ("moe", 0.0, 1.0, "found"),
        ("dense", 0.0, 1.0, "found"),
        ("dense", 0.0, 0.09, "clear"),
        ("moe", 0.0, 0.09, "found"),
        ("dense", 0.0, 0.15, "found"),
        ("dense", 0.45, 1.0, "clear"),
        ("moe", 0.45, 1.0, "found"),
    ],
    ids=["as expected", "dense", "too large without it", "by routing", "it decides",
         "the bulk reaches as far", "with experts"],
)  # fmt: skip
def test_a_tail_says_why_only_where_the_others_end_before_it(family, everywhere, high, status):
    finding, _ = tailed(far=3.0, everywhere=everywhere, family=family, high=high)
    assert finding.status == status
    if status == "clear":
        share = f"{100 * finding.effect:.0f} %"
        assert finding.reason == f"{share} of the gap is on 60 tokens: where it sits, not why"
        assert len(finding.evidence) == 8 and finding.left_N is not None


def test_without_a_tail_its_least_share_is_named():
    finding, _ = tailed(far=0.1)
    assert (finding.status, finding.effect) == ("clear", 0.0)
    assert finding.reason == "would have found ≥ 30 % of the gap on ≤ 20 % of the tokens"
    assert len(finding.evidence) == 4
    few, _ = tailed(far=2.0, tokens=980)
    assert (few.check, few.status) == ("heavy-tail", "untested")
    assert few.reason == "needs at least 1000 tokens to see a tail"
    small, _ = tailed(far=1.01, typical=0.1)
    assert small.status == "found"
    smaller, _ = tailed(far=0.8, typical=0.05)
    assert smaller.status == "clear" and smaller.effect == pytest.approx(48 / 162)


@pytest.mark.parametrize(("far", "tokens"), [(1.05, 240), (0.5, 0)])
def test_responses_are_named_if_they_have_as_much_of_the_gap_as_tokens(far, tokens):
    """Twelve of sixty responses, with gaps beyond ten typical ones or not."""
    response_N = np.arange(1200) % 60
    d_N = np.where(response_N < 12, far, 0.1)
    evidence = evidence_of(sample_of(d_N, response_N), float(d_N.mean()), 1.0, "dense")
    finding = heavy_tail.check(evidence)
    share = 12 * far / (12 * far + 4.8)
    assert finding.status == "found"
    assert finding.sentence.startswith(f"12 responses of the sample carry {100 * share:.0f} % of")
    assert finding.beyond_expected == (far == 1.05)
    assert [value for _, value in finding.evidence[:4]] == pytest.approx(
        [tokens, share if tokens else 0, 12, share]
    )


def test_responses_that_are_no_tail_are_clear():
    """More than a fifth of them."""
    response_N = np.arange(1200) % 60
    d_N = np.where(response_N < 13, 0.5, 0.1)
    evidence = evidence_of(sample_of(d_N, response_N), float(d_N.mean()), 1.0, "dense")
    assert heavy_tail.check(evidence).status == "clear"
