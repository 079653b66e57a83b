"""One-sided gaps, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import truncated_support
from mismatch_cli.diagnosis.checks.truncated_support import OneSided
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from tests.diagnosis.samples import SampleColumns


def test_the_mean_ratio_is_that_of_the_probabilities_up_to_ten():
    """And the steep part is that of tokens at which π is less than half of μ."""
    d_N = np.array([0.5, -0.2, -0.8, -1.0, 2.9, 3.5])
    group_N = np.array([0, 1, 2, 3, 4, 4])
    one_sided = OneSided.of(d_N, group_N)
    ratio_N = [np.exp(0.5), np.exp(-0.2), np.exp(-0.8), np.exp(-1.0), 10.0, 10.0]
    assert one_sided.ratio == mean_over_prompts(np.array(ratio_N), group_N)
    assert one_sided.gap == pytest.approx(8.9 / 6)
    assert one_sided.steep == pytest.approx(1.8 / 8.9)
    none = OneSided.of(np.zeros(0), np.zeros(0, dtype=int))
    assert (none.gap, none.steep) == (0.0, 0.0)
    high = OneSided.of(np.array([2.0, 2.2]), np.array([0, 1]))
    assert high.ratio.value == pytest.approx((np.exp(2.0) + np.exp(2.2)) / 2)


@pytest.mark.parametrize(
    ("ratio", "error", "steep", "renormalised", "no_distribution"),
    [
        (0.95, 0.001, 0.0, True, False),
        (0.961, 0.001, 0.0, False, False),
        (0.95, 0.0101, 0.0, False, False),
        (0.95, 0.001, 0.19, True, False),
        (0.95, 0.001, 0.21, False, False),
        (1.05, 0.001, 0.0, False, True),
        (1.039, 0.001, 0.0, False, False),
        (1.05, 0.0101, 0.0, False, False),
        (1.05, 0.001, 0.5, False, True),
    ],
)
def test_a_gap_is_one_sided_by_two_fifths_and_five_standard_errors(
    ratio, error, steep, renormalised, no_distribution
):
    """Of a gap of 0.1 nats, so that the mean ratio is 0.04 from 1, below or above."""
    one_sided = OneSided(Mean(ratio, error, 10**6, 10**6), 0.1, steep)
    assert one_sided.renormalised == renormalised
    assert one_sided.is_no_distribution == no_distribution
    without_gap = OneSided(Mean(ratio, error, 10**6, 10**6), 0.0, steep)
    assert not without_gap.renormalised and not without_gap.is_no_distribution


@pytest.mark.parametrize(
    ("gap", "error", "power"),
    [
        (0.1, 0.001, "a kept mass of ≤ 0.96"),
        (0.1, 0.1, "a kept mass of ≤ 0.5"),
        (0.1, 0.21, "no power: too few prompts to know the error of the mean ratio"),
        (0.1, np.inf, "no power: too few prompts to know the error of the mean ratio"),
    ],
)
def test_the_kept_mass_that_would_have_been_found(gap, error, power):
    assert OneSided(Mean(1.0, error, 100, 32), gap, 0.0).power == power


def test_the_lean_is_taken_off_the_gaps_below_0():
    """These are three times those above it."""
    left_N = truncated_support._without_lean(np.array([0.5, -1.0, -2.0, 0.5, 0.0]))
    assert left_N == pytest.approx([0.5, -1 / 3, -2 / 3, 0.5, 0.0])
    only_above = np.array([0.5, 0.0])
    assert truncated_support._without_lean(only_above).tolist() == [0.5, 0.0]
    assert truncated_support._without_lean(-only_above).tolist() == [0.0, 0.0]


def test_the_kept_mass_is_that_of_the_ranks_of_tokens_whose_ranks_end():
    """Of the two tokens whose last rank has probability 0 in the engine."""
    inf = np.inf
    q_TK = np.log([[0.7, 0.3, 1.0], [9.0, 9.0, 9.0], [0.6, 0.4, 1.0], [0.5, 0.3, 0.1]])
    q_TK[[0, 2], 2] = -inf
    p_TK = np.log([[0.5, 0.2, 0.1], [9.0, 9.0, 9.0], [0.5, 0.4, 0.05], [0.1, 0.1, 0.1]])
    sample = SampleColumns(topk_logq_TK=q_TK, topk_logp_TK=p_TK, index_N=np.array([0, 2, 3]))
    label = "tokens whose recorded ranks leave the support"
    assert truncated_support._kept_mass(sample) == (
        (label, 2),
        ("kept mass there, by the trainer", pytest.approx(0.8)),
    )
    sample.index_N = np.array([3])
    assert truncated_support._kept_mass(sample) == ((label, 0),)
    for name in ("topk_logq_TK", "topk_logp_TK"):
        without = SampleColumns(**{**vars(sample), name: None})
        assert truncated_support._kept_mass(without) == ()


@pytest.mark.parametrize(
    ("sampling", "outside", "d_N", "truncates"),
    [
        ({"top_p": 0.9}, 0, [-0.1], True),
        ({"top_k": 20}, 0, [-0.1], True),
        ({"min_p": 0.1}, 0, [-0.1], True),
        ({"top_p": 1, "top_k": -1, "min_p": 0}, 0, [0.1], False),
        ({"top_k": 0, "top_p": None}, 0, [0.1], False),
        ({}, 1, [0.1], True),
        ({}, 1, [-0.1], False),
        ({}, 1, [0.0], True),
        ({}, 1, [0.71, -0.29], True),
        ({}, 1, [0.69, -0.31], False),
    ],
)
def test_a_trainer_truncates_by_the_manifest_or_by_what_its_other_tokens_have(
    sampling, outside, d_N, truncates
):
    evidence = SimpleNamespace(
        sampling=sampling,
        counts=SimpleNamespace(out_of_support=outside),
        sample=SimpleNamespace(d_N=np.array(d_N)),
    )
    assert truncated_support.trainer_truncates(evidence) == truncates


def checked(d_N: np.ndarray, outside: int = 0, group_N=None):
    group_N = np.arange(len(d_N)) % 64 if group_N is None else group_N
    logq_T = np.full(len(d_N), -1.0)
    sample = SampleColumns(
        d_N=d_N,
        group_N=group_N,
        topk_logq_TK=None,
        logq_T=logq_T,
        logp_T=logq_T + d_N,
        index_N=np.arange(len(d_N)),
        half_N=np.arange(len(d_N)) // 20 % 2,
    )
    counts = SimpleNamespace(out_of_support=outside)
    return truncated_support.check(SimpleNamespace(sample=sample, counts=counts))


def test_an_engine_that_renormalised_is_named_with_its_kept_mass(monkeypatch):
    """Three of four tokens have 0.1 nats less in the trainer, the others 0.01 more."""
    d_N = np.resize([-0.1, -0.09, -0.11, 0.01], 640)
    monkeypatch.setattr(truncated_support, "mixture_in", lambda _: None)
    finding = checked(d_N)
    ratio = np.exp(d_N).mean()
    assert (finding.check, finding.status) == ("truncated-support", "found")
    assert (finding.effect, finding.measure) == (pytest.approx(ratio), "mean ratio")
    assert f"the mean ratio is {ratio:.4g}: the engine renormalised" in finding.sentence
    values = [value for _, value in finding.evidence]
    error = mean_over_prompts(np.exp(d_N), np.arange(640) % 64).error
    assert values == pytest.approx([ratio, error, 0.75, 0.0])
    assert finding.left_N == pytest.approx(np.where(d_N < 0, d_N / 30, d_N))
    monkeypatch.setattr(truncated_support, "mixture_in", lambda _: "a floor")
    assert checked(d_N).status == "clear"


def test_noise_is_clear_of_truncation():
    finding = checked(np.resize([0.1, -0.1], 640), group_N=np.arange(640) // 10)
    assert finding.status == "clear" and finding.effect == pytest.approx(np.cosh(0.1))
    assert finding.reason == "would have found a kept mass of ≤ 0.96"
    assert len(finding.evidence) == 4


def test_tokens_that_the_trainer_calls_impossible_are_counted_with_its_kept_mass():
    """Three of 1,003; the lean is taken off the gaps above 0."""
    d_N = np.resize([0.3, 0.3, 0.3, -0.1], 1000)
    finding = checked(d_N, outside=3)
    assert (finding.check, finding.status, finding.measure) == (
        "truncated-support", "found", "kept mass"
    )  # fmt: skip
    assert finding.effect == pytest.approx(np.exp(-0.2))
    assert finding.evidence == (
        ("sampled tokens with π = 0", 3),
        ("mean Δlog p of the others, nats", pytest.approx(0.2)),
    )
    assert finding.sentence.startswith("3 sampled tokens have probability 0 in the trainer")
    assert finding.left_N == pytest.approx(np.where(d_N > 0, 0.1 / 3, -0.1))
    assert checked(-d_N, outside=3).status == "found"
    assert checked(-d_N, outside=3).measure == "mean ratio"
