"""Constants of whole responses, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import constant_offset
from tests.diagnosis.samples import SampleColumns

EVERY = np.ones(10, dtype=bool)


def sample_of(logq_T, logp_T, lengths: list[int], counts_T=None) -> SampleColumns:
    offsets = np.cumsum([0, *lengths]).tolist()
    response_T = np.repeat(np.arange(len(lengths)), lengths)
    counts_T = np.ones(len(logq_T), dtype=bool) if counts_T is None else counts_T
    index_N = np.flatnonzero(counts_T)
    return SampleColumns(
        logq_T=logq_T,
        logp_T=logp_T,
        counts_T=counts_T,
        abs_d_T=np.abs(logp_T - logq_T),
        d_N=(logp_T - logq_T)[index_N],
        index_N=index_N,
        response_T=response_T,
        num_responses=len(lengths),
        group_N=response_T[index_N] % 128,
        half_N=response_T[index_N] % 2,
        spans=lambda: (slice(*bounds) for bounds in pairwise(offsets)),
    )


def test_each_half_of_a_response_loses_the_constant_of_the_other():
    """0.31 at even places and 0.29 at odd ones; one token has a gap of its own, and one does not
    count.
    """
    d_T = np.array([0.31, 0.29, 0.31, 0.29, 0.31, 0.29, 0.31, 0.29, 0.8, 5.0])
    counts_T = np.arange(10) < 9
    constant, left_T = constant_offset._fit_constant(np.full(10, -7.0), d_T - 7.0, counts_T)
    assert constant == pytest.approx(0.31)
    assert left_T == pytest.approx(np.where(np.arange(10) % 2, d_T - 0.31, d_T - 0.29))


@pytest.mark.parametrize(
    ("gaps", "constant"),
    [
        ([0.0041] * 6, 0.0041),
        ([-0.0041] * 6, -0.0041),
        ([0.0039] * 6, None),
        ([0.3] * 5, None),
        ([0.3] * 6 + [0.241, 0.359, 0.1, 0.9], 0.3),
        ([0.3] * 5 + [0.1, 0.9, 0.1, 0.1, 0.1], None),
        ([0.3] * 4 + [0.241, 0.359, 0.05, 0.05, 0.6, 0.6], 0.3),
        ([0.3] * 4 + [0.239, 0.359, 0.05, 0.05, 0.6, 0.6], None),
    ],
    ids=["least", "negative", "less", "five tokens", "eight of ten", "five of ten", "six of ten",
         "not near"],
)  # fmt: skip
def test_a_response_has_a_constant_if_six_tenths_of_its_tokens_are_near_it(gaps, constant):
    """Within a fifth."""
    d_T = np.array(gaps)
    fit = constant_offset._fit_constant(np.full(len(d_T), -7.0), d_T - 7.0, d_T != 0)
    assert fit == (constant and (pytest.approx(constant), pytest.approx(fit and fit[1])))


@pytest.mark.parametrize(("far", "has_constant"), [(1.79, True), (1.81, False)])
def test_a_constant_explains_half_of_the_gap(far, has_constant):
    """Two of ten tokens have more: of 2.4 + 2 · far, 2 · far − 0.6 is left."""
    d_T = np.array([0.3] * 8 + [far, far])
    fit = constant_offset._fit_constant(np.full(10, -7.0), d_T - 7.0, EVERY)
    assert (fit is not None) == has_constant


def test_clipped_tokens_do_not_set_the_constant():
    """At 0 on either side; where one half has no other, the constant of all is used."""
    logq_T = np.array([-1.0] * 12)
    logp_T = logq_T + 0.3
    logp_T[1::2] = 0.0
    logq_T[1::2] = -0.2
    constant, left_T = constant_offset._fit_constant(logq_T, logp_T, np.ones(12, dtype=bool))
    assert constant == pytest.approx(0.3) and left_T == pytest.approx(0.0)
    unclipped_T = constant_offset._unclipped_T(
        np.array([0.0, -1.0, -1.0, -1.0]), np.array([-1.0, 0.0, -1.0, -1.0]), np.arange(4) < 3
    )
    assert unclipped_T.tolist() == [False, False, True, False]


def test_responses_with_a_constant_are_named_with_their_quantiles(monkeypatch):
    """Four of ten responses have 0.1 to 0.4; the last has only five tokens."""
    rng = np.random.default_rng(0)
    lengths = [8] * 9 + [5]
    response_T = np.repeat(np.arange(10), lengths)
    constant_S = np.array([0.1, 0.0, 0.2, 0.0, 0.3, 0.0, 0.4, 0.0, 0.0, 0.0])
    logq_T = -rng.uniform(3.0, 5.0, 77)
    noise_T = np.where(constant_S[response_T] > 0, 0.0, 0.1 * rng.normal(size=77))
    counts_T = np.arange(77) != 3
    sample = sample_of(logq_T, logq_T + constant_S[response_T] + noise_T, lengths, counts_T)
    monkeypatch.setattr(constant_offset, "mixture_in", lambda _: None)
    finding = constant_offset.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.status, finding.effect) == ("constant-offset", "found", 0.4)
    assert finding.measure == "share of responses"
    low, high = 0.1 + 0.05 * 0.3, 0.4 - 0.05 * 0.3
    assert finding.evidence == (
        ("responses", 4),
        ("the constant, 5 % quantile, nats", pytest.approx(low)),
        ("median", pytest.approx(0.25)),
        ("95 % quantile", pytest.approx(high)),
    )
    assert "In 4 of 10 responses log π − log μ is the same number" in finding.sentence
    assert finding.sentence.endswith("(median +0.25 nats).")
    assert finding.left_N == pytest.approx(noise_T[counts_T])
    assert finding.part.inside_S.tolist() == (constant_S > 0).tolist()
    assert finding.part.among_S.tolist() == [True] * 9 + [False]
    for name, why in (("mixture_in", lambda _: "a floor"), ("renormalised", lambda *_: True)):
        with monkeypatch.context() as patch:
            patch.setattr(constant_offset, name, why)
            clear = constant_offset.check(SimpleNamespace(sample=sample))
            assert (clear.status, clear.effect) == ("clear", 0.4)


def test_a_response_could_show_a_constant_in_six_tokens_that_are_not_clipped():
    logq_T = np.full(14, -1.0)
    logq_T[[6, 13]] = 0.0
    logp_T = np.full(14, -1.0)
    logp_T[12] = 0.0
    sample = sample_of(logq_T, logp_T, [7, 7])
    assert constant_offset._testable_S(sample).tolist() == [True, False]


def test_one_response_with_a_constant_is_chance(monkeypatch):
    monkeypatch.setattr(constant_offset, "mixture_in", lambda _: None)
    logq_T = np.full(80, -2.0)
    logp_T = logq_T + np.resize([0.1, -0.1], 80)
    logp_T[:8] = -1.7
    finding = constant_offset.check(SimpleNamespace(sample=sample_of(logq_T, logp_T, [8] * 10)))
    assert (finding.status, finding.effect) == ("clear", 0.1)
    assert finding.reason == "would have found ≥ 0.5 nats in half of the responses"
    alone = constant_offset.check(SimpleNamespace(sample=sample_of(logq_T[:8], logp_T[:8], [8])))
    assert (alone.status, alone.effect) == ("clear", 1.0)


def test_the_constant_that_would_have_been_found_is_five_times_a_responses_gaps():
    """60 % of 0.1 … 1 are below 0.64, and of ten times these below 6.4; the median is of both."""
    gaps_T = np.concatenate([np.linspace(0.1, 1.0, 10), np.linspace(1, 10, 10), np.full(5, 99.0)])
    sample = sample_of(np.full(25, -200.0), gaps_T - 200.0, [10, 10, 5])
    assert constant_offset.power(sample) == "≥ 18 nats in half of the responses"
    sample.abs_d_T = np.zeros(25)
    assert constant_offset.power(sample) == "≥ 0.004 nats in half of the responses"
    sample.abs_d_T = np.where(np.arange(25) % 10 < 5, np.nan, 1.0)
    assert constant_offset.power(sample) == "no power: no response has 6 tokens"


@pytest.mark.parametrize(
    ("constants", "beside", "renormalised"),
    [
        ([-0.1, -0.3, -0.2], -0.011, True),
        ([-0.1, -0.3, -0.2], -0.009, False),
        ([-0.1, -0.3, 0.2], -0.05, False),
        ([-0.1, -0.3, -0.2], 0.05, False),
    ],
)
def test_constants_are_of_truncation_if_the_other_responses_lean_by_a_twentieth(
    constants, beside, renormalised
):
    """Of the median constant, 0.2; forty other responses of eight tokens."""
    constant_S = np.array([*constants, *[0.0] * 40])
    d_T = np.repeat(np.where(constant_S, constant_S, beside), 8)
    sample = sample_of(np.full(len(d_T), -2.0), d_T - 2.0, [8] * 43)
    sample.d_N = d_T + 1e-5 * np.random.default_rng(0).normal(size=len(d_T))
    assert constant_offset.renormalised(sample, constant_S) == renormalised
