"""Rounded and replaced values, in a few columns whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import stored_values
from tests.diagnosis.samples import SampleColumns


def sample_of(logq_T: np.ndarray, logp_T: np.ndarray, counts_T=None) -> SampleColumns:
    """Tokens in responses of ten."""
    tokens = len(logq_T)
    counts_T = np.ones(tokens, dtype=bool) if counts_T is None else counts_T
    index_N = np.flatnonzero(counts_T)
    return SampleColumns(
        logq_T=logq_T,
        logp_T=logp_T,
        counts_T=counts_T,
        index_N=index_N,
        d_N=(logp_T - logq_T)[index_N],
        response_T=np.arange(tokens) // 10,
        num_responses=-(-tokens // 10),
    )


def computed(tokens: int) -> np.ndarray:
    """Log-probabilities with all their digits."""
    return np.random.default_rng(0).uniform(-6.0, -1.0, tokens).astype(np.float32).astype(float)


@pytest.mark.parametrize("decimals", [1, 2, 3, 4])
def test_the_fewest_decimals_that_hold_a_column(decimals):
    rounded_N = np.round(computed(300), decimals).astype(np.float32).astype(float)
    assert stored_values._decimals_of(rounded_N) == decimals
    assert stored_values._decimals_of(computed(300)) is None
    assert stored_values._decimals_of(np.round(computed(300), 5)) is None


@pytest.mark.parametrize(
    ("rounded", "zeros", "others", "decimals"),
    [(200, 50, 0, 2), (199, 50, 0, None), (294, 0, 6, 2), (293, 0, 7, None)],
)
def test_ninety_eight_per_cent_of_two_hundred_values_that_are_not_0(
    rounded, zeros, others, decimals
):
    own_N = np.concatenate(
        [np.round(computed(rounded), 2), np.zeros(zeros), np.round(computed(others), 2) + 0.00123]
    )
    assert stored_values._decimals_of(own_N) == decimals


def test_values_that_would_be_rounded_to_0_are_not_rounded():
    """1e-9 is nearly a whole number of tenths, which is none."""
    assert stored_values._decimals_of(np.full(300, -1e-9)) is None
    for off, decimals in ((2.5e-6, 1), (3.5e-6, None)):
        near_N = np.round(computed(300), 1) * (1 + off)
        assert stored_values._decimals_of(near_N) == decimals


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (-65504.0, "the smallest float16"),
        (-3.4028234663852886e38, "the smallest float32"),
        (-3.3895313892515355e38, "the smallest bfloat16"),
        (-1e4, "−1e4"), (-1e5, "−1e5"), (-1e6, "−1e6"), (-1e8, "−1e8"), (-1e9, "−1e9"),
        (-1e10, "−1e10"), (-9999.0, "−9999"),
        *[(-k * 2.302585092994046, f"log 1e−{k}") for k in (5, 6, 7, 8, 9, 10, 12, 15, 16, 20, 30)],
    ],
)  # fmt: skip
def test_a_constant_that_code_writes_is_named(value, name):
    other_T = np.full(10, -1.0)
    own_T = np.where(np.arange(10) == 4, value, other_T)
    for side, columns in (("logp_rollout", (own_T, other_T)), ("logp_trainer", (other_T, own_T))):
        (stored,) = stored_values._constants(sample_of(*columns))
        assert (stored.side, stored.kind, stored.tokens) == (side, f"{name}, a constant", 1)
        np.testing.assert_array_equal(stored.left_N, [0.0] * 4 + [np.nan] + [0.0] * 5)


@pytest.mark.parametrize(("off", "count"), [(2.9e-7, 1), (-2.9e-7, 1), (3.2e-7, 0), (-3.2e-7, 0)])
def test_a_constant_is_exact_to_float32(off, count):
    own_T, other_T = np.array([-1.0, -1e4 * (1 + off)]), np.array([-1.0, -9.0])
    assert len(list(stored_values._constants(sample_of(own_T, other_T)))) == count


def test_a_constant_near_the_other_side_is_its_value():
    """log 1e−5, which is −11.51: a nat from it, or less."""
    value = np.log(1e-5)
    for apart, count in ((1.01, 1), (0.99, 0)):
        sample = sample_of(np.array([value, -1.0]), np.array([value + apart, -1.0]))
        assert len(list(stored_values._constants(sample))) == count


def test_rounding_leaves_what_is_beyond_half_a_step():
    rounded_T = np.round(computed(300), 1)
    other_T = rounded_T + np.resize([0.03125, -0.04375, 0.21235, -0.35715], 300)
    (stored,) = stored_values._rounded(sample_of(rounded_T, other_T))
    assert (stored.side, stored.kind, stored.tokens) == (
        "logp_rollout",
        "rounded to 1 decimal",
        300,
    )
    assert stored.left_N == pytest.approx(np.resize([0.0, 0.0, 0.16235, -0.30715], 300))
    (stored,) = stored_values._rounded(sample_of(other_T, np.round(computed(300), 2)))
    assert (stored.side, stored.kind) == ("logp_trainer", "rounded to 2 decimals")


def test_what_explains_most_is_named_with_the_share_of_its_tokens():
    """Three tokens of −1e9 beside a column of one decimal: the constants have more of the gap."""
    logq_T = np.round(computed(400), 1)
    logp_T = logq_T + np.resize([0.01235, -0.02235], 400)
    logp_T[[4, 7, 33]] = -1e9
    counts_T = np.arange(400) < 300
    sample = sample_of(logq_T, logp_T, counts_T)
    finding = stored_values.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.status, finding.effect) == ("stored-values", "found", 0.01)
    assert finding.measure == "share of tokens"
    assert finding.sentence == ("3 tokens of the sample: logp_trainer is −1e9, a constant.")
    assert finding.evidence == (
        ("logp_trainer: −1e9, a constant", 3),
        ("logp_rollout: rounded to 1 decimal", 300),
    )
    assert np.flatnonzero(np.isnan(finding.left_N)).tolist() == [4, 7, 33]
    assert np.flatnonzero(finding.part.inside_S).tolist() == [0, 3]
    assert finding.part.among_S.tolist() == [s < 30 for s in range(40)]
    spoiled_T = stored_values.spoiled_T(SimpleNamespace(sample=sample))
    assert np.flatnonzero(spoiled_T).tolist() == [4, 7, 33]


def test_tokens_outside_the_loss_are_not_counted():
    logq_T = computed(40)
    logp_T = logq_T.copy()
    logp_T[[5, 12]] = -1e9
    sample = sample_of(logq_T, logp_T, np.arange(40) > 8)
    spoiled_T = stored_values.spoiled_T(SimpleNamespace(sample=sample))
    assert np.flatnonzero(spoiled_T).tolist() == [12]


@pytest.mark.parametrize(
    ("values", "decimals"), [(200, ", or a column of ≤ 4 decimals"), (199, "")]
)
def test_what_would_have_been_found_takes_values_that_are_not_0(values, decimals):
    """On both sides."""
    logq_T, logp_T = computed(250), computed(250)
    logq_T[values:] = 0.0
    finding = stored_values.check(SimpleNamespace(sample=sample_of(logq_T, logp_T)))
    assert (finding.status, finding.effect) == ("clear", 0.0)
    assert finding.reason == f"would have found one constant that code writes{decimals}"
