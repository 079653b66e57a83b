"""A mixture with a uniform distribution, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import uniform_mixture
from tests.diagnosis.samples import SampleColumns

PLAIN = np.log(np.tile([0.5, 0.3, 0.2, 1e-5, 2e-6], 40))


def sample_of(logq_T: np.ndarray, logp_T: np.ndarray) -> SampleColumns:
    tokens = len(logq_T)
    return SampleColumns(
        logq_T=logq_T,
        logp_T=logp_T,
        d_N=logp_T - logq_T,
        index_N=np.arange(tokens),
        half_N=np.repeat([0, 1], [tokens // 2, tokens - tokens // 2]),
    )


def mixed(epsilon: float, floor: float) -> np.ndarray:
    return np.log((1 - epsilon) * np.exp(PLAIN) + floor)


def test_a_mixture_is_named_with_its_share_and_its_floor():
    """A tenth is spread over 10,000 tokens: forty of 1e-5 and forty of 2e-6 are rare."""
    sample = sample_of(PLAIN, mixed(0.1, 1e-5))
    finding = uniform_mixture.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.status) == ("uniform-mixture", "found")
    assert finding.effect == pytest.approx(0.1) and finding.measure == "share of the probability"
    assert finding.evidence == (
        ("mixed side", "logp_trainer"),
        ("ε, its share", pytest.approx(0.1)),
        ("floor under every token, ε / V", pytest.approx(1e-5)),
        ("V, by these two", pytest.approx(1e4)),
        ("tokens that are rarer than five times the floor", 80),
    )
    assert finding.sentence == (
        "logp_trainer fits a distribution of which 10 % is spread evenly: likely tokens lose 10 %, "
        "and the 80 rare tokens stay above 1e-05."
    )
    assert finding.left_N == pytest.approx(0.0, abs=1e-6)


def test_each_half_is_fitted_by_the_other():
    """A tenth is mixed in the first half, three tenths in the second."""
    epsilon_N = np.repeat([0.1, 0.3], 100)
    own_N = np.log((1 - epsilon_N) * np.exp(PLAIN) + 1e-5)
    sample = sample_of(PLAIN, own_N)
    left_N = uniform_mixture._left_of_halves(sample, own_N, PLAIN)
    by_other_N = np.log((1 - epsilon_N[::-1]) * np.exp(PLAIN) + 1e-5)
    assert left_N == pytest.approx(own_N - by_other_N, abs=1e-6)
    unlikely_N = np.where(np.arange(200) < 100, np.log(0.099), PLAIN)
    assert uniform_mixture._left_of_halves(sample, own_N, unlikely_N) is None
    likely_N = np.where(np.arange(200) == 3, np.log(0.101), unlikely_N)
    assert uniform_mixture._left_of_halves(sample, own_N, likely_N) is not None


def test_the_best_mixture_leaves_the_least():
    epsilon, floor = uniform_mixture._best(mixed(0.2, 1e-4), PLAIN)
    assert (epsilon, floor) == pytest.approx((0.2, 1e-4), rel=1e-6)
    off_N = np.where(PLAIN < -5, 0.5, 0.0)
    assert uniform_mixture._best(mixed(0.2, 1e-4) + off_N, PLAIN)[0] == pytest.approx(0.2, abs=1e-2)
    # Likely tokens gain, or are at the floor
    assert uniform_mixture._best(PLAIN + 0.1, PLAIN)[0] == 0.0
    assert uniform_mixture._best(np.full(200, np.log(1e-2)), PLAIN) == pytest.approx((1.0, 1e-2))


@pytest.mark.parametrize(
    ("rarest", "others", "tokens", "rises"),
    [
        ([0.3, -0.1, -0.1], -1.0, 10, True),
        ([0.3, -0.2, -0.2], 1.0, 10, False),
        ([0.3, 0.3, 0.3], 0.0, 2, False),
        ([0.3, 0.3, 0.3], 0.0, 3, True),
    ],
)
def test_the_three_rarest_tokens_are_more_probable_on_the_mixed_side(rarest, others, tokens, rises):
    other_N = np.array([-2.0, -1.0, -3.0, -2.5, -1.5, -0.5, -4.0, -9.0, -8.0, -8.5])
    rise_N = np.array([others] * 7 + rarest)
    if tokens < 10:
        other_N, rise_N = other_N[7:][:tokens], rise_N[7:][:tokens]
    assert uniform_mixture._rises(other_N + rise_N, other_N) == rises


@pytest.mark.parametrize(
    ("changed", "shows"),
    [
        ({}, True),
        ({"takes": 0.2}, True),
        ({"takes": 0.19}, False),
        ({"rare": 3}, True),
        ({"rare": 2}, False),
        ({"floor": 0.1 / 51}, True),
        ({"floor": 0.1 / 49}, False),
        ({"floor": 0.1 / 1.9e6}, True),
        ({"floor": 0.1 / 2.1e6}, False),
        ({"left_N": np.array([-0.69, 0.69, 5.0])}, True),
        ({"left_N": np.array([0.71, 0.71, 0.0])}, False),
    ],
)
def test_a_mixture_shows_at_both_ends(changed, shows):
    """Rare tokens keep at most 35 % of their gap; ε over the floor is a vocabulary."""
    mixture = uniform_mixture._Mixture("logp_trainer", 0.1, 1e-5, 10, np.zeros(3), 0.5)
    abs_d_N, rare_N = np.array([2.0, 2.0, 9.0]), np.array([True, True, False])
    assert uniform_mixture._shows(replace(mixture, **changed), abs_d_N, rare_N) == shows


def test_of_two_sides_the_one_that_explains_more_is_mixed(monkeypatch):
    def fit(_, side: str):
        takes = {"logp_trainer": 0.3, "logp_rollout": 0.6}[side]
        return uniform_mixture._Mixture(side, 0.1, 1e-5, 10, np.zeros(3), takes)

    monkeypatch.setattr(uniform_mixture, "_fit_mixture", fit)
    assert uniform_mixture.mixture_in(None).side == "logp_rollout"
    monkeypatch.setattr(uniform_mixture, "_fit_mixture", lambda *_: None)
    assert uniform_mixture.mixture_in(None) is None


def test_what_a_mixture_takes_is_its_share_of_the_gap():
    """One of the likely tokens has 0.3 nats more, of a gap of all 200 tokens."""
    own_N = mixed(0.1, 1e-5)
    own_N[0] += 0.3
    sample = sample_of(PLAIN, own_N)
    mixture = uniform_mixture._fit_mixture(sample, "logp_trainer")
    assert mixture.takes == pytest.approx(1 - 0.3 / np.abs(sample.d_N).sum(), abs=1e-6)
    assert mixture.rare == 80
    assert uniform_mixture._fit_mixture(sample, "logp_rollout") is None
    assert uniform_mixture._fit_mixture(sample_of(PLAIN, PLAIN), "logp_trainer") is None
    unlikely = sample_of(np.full(200, -5.0), np.full(200, -4.0))
    assert uniform_mixture._fit_mixture(unlikely, "logp_trainer") is None


@pytest.mark.parametrize(
    ("rare", "reason"),
    [
        (3, "would have found a share of ≥ 18 %"),
        (2, "no power: 2 tokens rarer than 1 %, which would show a floor"),
    ],
)
def test_the_share_that_would_have_been_found_is_of_twice_the_gap(rare, reason):
    logq_T = np.array([-1.0] * 8 + [-4.7] * rare + [-4.5])
    sample = sample_of(logq_T, logq_T + 0.1 * np.resize([1.0, -1.0], len(logq_T)))
    sample.logp_T[8:] = logq_T[8:] - 0.1
    finding = uniform_mixture.check(SimpleNamespace(sample=sample))
    assert finding.reason == reason
    if rare == 3:
        assert (finding.status, finding.effect) == ("clear", 0.0)
