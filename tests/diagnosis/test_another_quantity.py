"""Other quantities in a column, in a few responses whose answer is computed by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import another_quantity
from tests.diagnosis.samples import sample_of

NAMES = (
    "minus the entropy", "that of the most probable token", "the mean over its response",
    "the sum over its response", "a running sum", "a running sum from the end",
)  # fmt: skip


def test_the_quantities_are_means_sums_and_running_sums_of_tokens_that_count():
    """Two responses of three and two tokens; the second token of the first does not count."""
    other_T = np.array([-1.0, -9.0, -2.0, -4.0, -6.0])
    sample = sample_of(
        other_T, other_T, [3, 2], np.array([1, 0, 1, 1, 1]) > 0,
        entropy_T=np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        topk_logq_TK=np.array([[-2, -1], [-3, np.nan], [-np.inf, -6], [-5, -4], [0, -9]]),
        topk_logp_TK=np.full((5, 2), -7.0),
    )  # fmt: skip
    quantities = dict(another_quantity._quantities(sample, other_T, "logp_trainer"))
    assert tuple(quantities) == NAMES
    expected = (
        [-1, -2, -3, -4, -5],
        [-1, -3, -6, -4, np.nan],
        [-1.5, -1.5, -1.5, -5, -5],
        [-3, -3, -3, -10, -10],
        [-1, -1, -3, -4, -10],
        [-3, -2, -2, -10, -6],
    )
    for name, values in zip(NAMES, expected, strict=True):
        np.testing.assert_allclose(quantities[name], values, err_msg=name)
    of_rollout = dict(another_quantity._quantities(sample, other_T, "logp_rollout"))
    assert of_rollout[NAMES[1]].tolist() == [-7.0] * 5
    sample = replace(sample, entropy_T=None, topk_logq_TK=None)
    names = [name for name, _ in another_quantity._quantities(sample, other_T, "logp_trainer")]
    assert tuple(names) == NAMES[2:]


def test_a_response_without_counted_tokens_has_a_mean_of_0():
    sample = sample_of(np.full(4, -2.0), np.full(4, -2.0), [2, 2], np.array([1, 1, 0, 0]) > 0)
    mean = next(another_quantity._sums(sample, sample.logq_T))
    assert mean.value_T.tolist() == [-2.0, -2.0, 0.0, 0.0]


def test_a_mean_is_over_the_chosen_tokens_of_each_response():
    sample = sample_of(np.zeros(5), np.zeros(5), [2, 1, 2])
    chosen_T = np.array([True, True, False, False, True])
    count_S, mean_S = another_quantity._mean_S(
        sample, np.array([1.0, 4.0, 9.0, 9.0, 3.0]), chosen_T
    )
    assert count_S.tolist() == [2, 0, 1] and mean_S.tolist() == [2.5, 0.0, 3.0]


def test_a_token_tells_if_the_quantity_is_a_tenth_from_the_other_side_and_from_0():
    value_T = np.array([-1.0, -1.0, -1.0, -0.09, -0.11])
    other_T = np.array([-1.11, -1.09, -0.89, -1.0, -1.0])
    assert another_quantity._tells_T(value_T, other_T).tolist() == [True, False, True, False, True]


def greedy(left: float, telling: int = 6, broken: int = 20, apart: float = 1.0):
    """Forty responses of ten tokens, of which log π of the first `broken` is that of the most
    probable token, up to `left`; in `telling` tokens that is `apart` from log μ, in others equal.
    """
    rng = np.random.default_rng(0)
    lengths = [10] * 40
    place_T = np.tile(np.arange(10), 40)
    best_T = rng.uniform(-0.7, -0.5, 400)
    logq_T = np.where(place_T < telling, best_T - apart, best_T)
    is_broken_T = np.repeat(np.arange(40) < broken, 10)
    logp_T = np.where(is_broken_T, best_T - np.where(place_T < telling, left, 0.0), logq_T)
    ranks_TK = np.stack([best_T, best_T - 3], axis=1)
    return sample_of(logq_T, logp_T, lengths, topk_logq_TK=ranks_TK)


def greedy_match(sample, side: str = "logp_trainer"):
    matches = {match.quantity: match for match in another_quantity._matches(sample, side)}
    return matches.get("that of the most probable token")


def test_a_response_is_a_quantity_if_that_leaves_fifteen_per_cent(monkeypatch):
    """Of the gap to the other side, or of the quantity where that is smaller: 0.6 ± 0.1 here."""
    monkeypatch.setattr(another_quantity, "real_gap", lambda _: 0.3)
    for left, fits in ((0.07, True), (0.11, False)):
        match = greedy_match(greedy(left))
        assert (match is not None) == fits
        if match is not None:
            assert match.side == "logp_trainer"
            assert np.flatnonzero(match.inside_S).tolist() == list(range(20))
            places = np.tile(np.arange(10), 40)[:200]
            assert match.left_T[:200] == pytest.approx(np.where(places < 6, -left, 0.0))
    assert greedy_match(greedy(0.0, telling=5)) is None
    assert greedy_match(greedy(0.0, broken=1)) is None
    assert greedy_match(greedy(0.0, broken=2)).inside_S.sum() == 2
    monkeypatch.setattr(another_quantity, "real_gap", lambda _: 0.65)
    assert greedy_match(greedy(0.0)) is None


def test_a_response_with_few_tokens_that_tell_is_one_of_them_if_all_fit(monkeypatch):
    """The first has five tokens that tell, and fits; the second fits no better than 20 %."""
    monkeypatch.setattr(another_quantity, "real_gap", lambda _: 0.3)
    sample = greedy(0.0)
    for s in (0, 1):
        own = slice(10 * s, 10 * s + 10)
        sample.logq_T[own] = sample.topk_logq_TK[own, 0]
        sample.logq_T[10 * s : 10 * s + 5] -= 1.0
    sample.logp_T[10:15] -= 0.2
    match = greedy_match(sample)
    assert match.inside_S[:20].tolist() == [True, False, *[True] * 18]
    assert not match.inside_S[20:].any()


def test_a_token_without_ranks_has_no_most_probable_one(monkeypatch):
    """Its response holds the quantity on all others."""
    monkeypatch.setattr(another_quantity, "real_gap", lambda _: 0.3)
    sample = greedy(0.0)
    sample.topk_logq_TK[9::10] = np.nan
    match = greedy_match(sample)
    assert np.flatnonzero(match.inside_S).tolist() == list(range(20))
    assert np.isnan(match.left_T[9::10]).all() and np.isfinite(match.left_T[:9]).all()


def test_the_rollout_may_hold_a_quantity_of_the_trainer(monkeypatch):
    monkeypatch.setattr(another_quantity, "real_gap", lambda _: 0.3)
    sample = greedy(0.0)
    sample = replace(
        sample,
        logq_T=sample.logp_T,
        logp_T=sample.logq_T,
        topk_logq_TK=None,
        topk_logp_TK=sample.topk_logq_TK,
    )
    assert greedy_match(sample) is None
    assert greedy_match(sample, "logp_rollout").side == "logp_rollout"
    finding = another_quantity.check(SimpleNamespace(sample=sample))
    assert finding.evidence == (
        ("column", "logp_rollout"),
        ("is", "that of the most probable token"),
        ("responses", 20),
    )


def test_the_quantity_that_most_responses_hold_is_named():
    sample = greedy(0.0)
    finding = another_quantity.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.status, finding.effect) == ("another-quantity", "found", 0.5)
    assert finding.measure == "share of responses"
    assert finding.sentence == (
        "In 20 of 40 responses logp_trainer is that of the most probable token, and not the "
        "sampled token's log-probability."
    )
    is_broken_T = np.arange(400) < 200
    assert finding.left_N == pytest.approx(np.where(is_broken_T, 0.0, sample.d_N))
    assert finding.part.inside_S.tolist() == [s < 20 for s in range(40)]
    assert finding.part.among_S.all()
    spoiled_T = another_quantity.spoiled_T(SimpleNamespace(sample=sample))
    assert spoiled_T.tolist() == is_broken_T.tolist()


def test_of_two_quantities_that_of_more_responses_is_taken(monkeypatch):
    def matches(_, side: str):
        responses = {"logp_trainer": (2, 3), "logp_rollout": (5, 4)}[side]
        for count in responses:
            yield another_quantity._Match(side, str(count), np.arange(9) < count, np.zeros(9))

    monkeypatch.setattr(another_quantity, "_matches", matches)
    largest = another_quantity._largest(None)
    assert (largest.side, largest.quantity) == ("logp_rollout", "5")


def test_without_a_quantity_the_responses_that_could_show_one_are_counted():
    """Six tokens of thirty responses are a tenth from their mean; of ten, five."""
    logq_T = np.tile([-1.0, -1.0, -1.0, -2.0, -2.0, -2.0, -1.5, -1.5, -1.5, -1.5], 40)
    logq_T[: 10 * 10 : 10] = -1.5
    logq_T[3 : 10 * 10 : 10] = -1.5
    logq_T[5 : 10 * 10 : 10] = -2.0
    sample = sample_of(logq_T, logq_T + 0.01, [10] * 40)
    testable_S = another_quantity._testable_S(sample)
    assert testable_S.tolist() == [s >= 10 for s in range(40)]
    finding = another_quantity.check(SimpleNamespace(sample=sample))
    assert (finding.status, finding.effect) == ("clear", 0.0)
    assert "the 30 responses that can show it" in finding.reason
    assert not another_quantity.spoiled_T(SimpleNamespace(sample=sample)).any()
