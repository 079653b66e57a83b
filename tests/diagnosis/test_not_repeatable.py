"""Scores of the same tokens, on a few whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import not_repeatable
from mismatch_cli.diagnosis.checks.not_repeatable import Scatter
from mismatch_cli.diagnosis.model import SkippedReading
from mismatch_cli.diagnosis.readings import Reading
from tests.diagnosis.samples import SampleColumns


def responses_of(ids: list[str], prompts: list[int], steps: list[int], counts_T=None):
    """One token for each letter."""
    lengths = [len(text) for text in ids]
    stops = np.cumsum(lengths).tolist()
    spans = [slice(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]
    ids_T = np.array([ord(letter) for text in ids for letter in text])
    return SampleColumns(
        response_ids_T=ids_T,
        counts_T=np.ones(len(ids_T), dtype=bool) if counts_T is None else counts_T,
        step_S=np.array(steps),
        prompt_id_S=np.array(prompts),
        origin_S={},
        spans=lambda: iter(spans),
    )


def test_tokens_after_equal_contexts_are_paired_with_the_first_of_them():
    """Responses to another prompt, of another step or after another token are others."""
    sample = responses_of(["abc", "abd", "abc", "abc", "xbc"], [1, 1, 2, 1, 1], [0, 0, 0, 1, 0])
    assert list(not_repeatable._pairs(sample)) == [(3, 0), (4, 1)]
    sample = responses_of(
        ["ab", "ab", "ab"], [1, 1, 1], [0, 0, 0], np.array([0, 1, 1, 1, 1, 0]) > 0
    )
    assert list(not_repeatable._pairs(sample)) == [(3, 1), (4, 2)]
    sample.response_ids_T = None
    assert list(not_repeatable._pairs(sample)) == []
    long = responses_of(["a" * 20, "a" * 20], [1, 1], [0, 0])
    assert list(not_repeatable._pairs(long)) == [(20 + t, t) for t in range(16)]


def scored(trainer: list[float], certain: int = 0, correlated: bool = True):
    """Tokens read twice, moved by so many nats in the trainer and by 0.01 in the engine; the last
    ones are certain.
    """
    tokens = len(trainer)
    first = -np.linspace(1.0, 5.0, tokens)
    first[tokens - certain :] = -0.015
    logp_T = np.concatenate([first, first + np.array(trainer)])
    engine = first if correlated else first[::-1]
    logq_T = np.concatenate([engine, engine + 0.01])
    sample = SampleColumns(logp_T=logp_T, logq_T=logq_T, abs_d_T=np.abs(logp_T - logq_T))
    return sample, [(tokens + t, t) for t in range(tokens)]


def test_the_scatter_is_the_mean_difference_of_two_scores(monkeypatch):
    sample, pairs = scored([0.1, -0.2, 0.3, -0.4])
    monkeypatch.setattr(not_repeatable, "_pairs", lambda _: pairs)
    scatter = not_repeatable.scatter_of(sample)
    assert scatter == (4, pytest.approx(0.25), pytest.approx(0.01), pytest.approx(0.25), True)
    assert scatter.gap == pytest.approx(np.mean([0.09, 0.21, 0.29, 0.41]))
    monkeypatch.setattr(not_repeatable, "_pairs", lambda _: [])
    none = not_repeatable.scatter_of(sample)
    assert none == (0, 0.0, 0.0, 0.0, False) and isinstance(none.tokens, int)


@pytest.mark.parametrize(
    ("trainer", "certain", "correlated", "everywhere"),
    [
        ([0.1, 0.1, 0.1, 1.6], 0, True, True),
        ([0.1, 0.1, 0.1, 1.8], 0, True, False),
        ([0.1] * 8, 0, False, False),
        ([0.0, 0.0, 0.0, 0.1], 0, True, False),
        ([0.1, 0.1, 0.0, 0.0, 0.0, 0.0], 4, True, True),
        ([0.001, 0.001], 2, True, False),
    ],
    ids=["a fifth", "less", "uncorrelated", "a few", "certain ones do not move", "all certain"],
)
def test_dropout_moves_most_uncertain_tokens_and_leaves_each_near_its_value(
    trainer, certain, correlated, everywhere, monkeypatch
):
    sample, pairs = scored(trainer, certain, correlated)
    monkeypatch.setattr(not_repeatable, "_pairs", lambda _: pairs)
    assert not_repeatable.scatter_of(sample).everywhere == everywhere


@pytest.mark.parametrize(("noise", "high"), [(0.55, True), (0.85, False)])
def test_values_stay_near_if_their_correlation_is_above_four_fifths(noise, high):
    logq_T = np.resize([-1.0, -1.2], 40)
    logp_T = logq_T + 0.1 * noise * np.repeat([1.0, -1.0], 20)
    sample = SampleColumns(logq_T=np.append(logq_T, -99.0), logp_T=np.append(logp_T, 99.0))
    correlation = not_repeatable._correlation(sample, np.arange(40))
    assert correlation == pytest.approx(1 / np.sqrt(1 + noise**2))
    assert (correlation > not_repeatable._CORRELATED) == high
    sample.logp_T = np.full(41, -1.0)
    assert not_repeatable._correlation(sample, np.arange(40)) == 1.0


def evidence_of(gap: float = 0.2, too_large: bool = True, repeated=None, **fields):
    plain = {"readings": None, "model": None} | fields
    return SimpleNamespace(
        sample=SimpleNamespace(d_N=np.array([0.1, -0.3])),
        gap=SimpleNamespace(value=gap),
        gap_is_too_large=too_large,
        scale=SimpleNamespace(trainer_noise=repeated),
        **plain,
    )


@pytest.mark.parametrize(
    ("scatter", "repeated", "share"),
    [
        (Scatter(8, 0.12, 0.03, 0.3, True), None, 0.4),
        (Scatter(7, 0.12, 0.03, 0.3, True), None, 0.0),
        (Scatter(8, 0.12, 0.041, 0.3, True), None, 0.0),
        (Scatter(8, 0.12, 0.03, 0.3, False), None, 0.0),
        (Scatter(8, 0.12, 0.03, 0.0, True), None, 0.0),
        (Scatter(8, 0.12, 0.03, 0.3, True), 0.1, 0.5),
        (Scatter(8, 0.12, 0.03, 0.3, True), 0.06, 0.4),
        (Scatter(8, 0.12, 0.03, 0.3, True), 0.52, 0.4),
        (Scatter(8, 0.78, 0.03, 0.3, True), 0.02, 0.1),
        (Scatter(0, 0.0, 0.0, 0.0, False), 0.48, 2.4),
    ],
)
def test_the_share_is_the_larger_of_both_measurements_that_the_gap_can_hold(
    scatter, repeated, share
):
    """In scores of the same tokens, and in a second pass; of a gap of 0.2 nats."""
    assert not_repeatable._share(evidence_of(), scatter, repeated) == pytest.approx(share)
    assert not_repeatable._share(evidence_of(gap=0.0), scatter, 0.1) <= 0.4


@pytest.mark.parametrize(
    ("share", "too_large", "status"),
    [(0.51, True, "found"), (0.49, True, "clear"), (0.51, False, "clear")],
)
def test_a_scatter_of_half_of_a_gap_that_is_too_large_is_the_trainers(
    share, too_large, status, monkeypatch
):
    scatter = Scatter(20, share * 0.3, 0.01, 0.3, True)
    monkeypatch.setattr(not_repeatable, "scatter_of", lambda _: scatter)
    finding = not_repeatable.check(evidence_of(too_large=too_large, repeated=0.02))
    assert (finding.check, finding.status) == ("not-repeatable", status)
    assert finding.effect == pytest.approx(share)
    assert finding.evidence == (
        ("tokens scored in several responses", 20),
        ("mean |Δlog p| of the trainer between them, nats", scatter.trainer),
        ("of the engine, nats", 0.01),
        ("their mean gap, nats", 0.3),
        ("mean |Δlog p| of the trainer in its second pass, nats", 0.02),
    )
    if status == "found":
        assert finding.sentence.endswith("between two scores is 51 % of the gap.")
        assert finding.left_N == pytest.approx(np.array([0.1, -0.3]) * (1 - 0.51 / np.sqrt(2)))
    else:
        assert finding.reason == "would have found scores that differ by half of the gap"


def test_a_scatter_takes_eight_tokens_or_a_second_pass(monkeypatch):
    for tokens, repeated, status in ((7, None, "untested"), (8, None, "clear"), (7, 0.0, "clear")):
        scatter = Scatter(tokens, 0.0, 0.0, 0.3, True)
        monkeypatch.setattr(not_repeatable, "scatter_of", lambda _, scatter=scatter: scatter)
        finding = not_repeatable.check(evidence_of(repeated=repeated))
        assert (finding.check, finding.status) == ("not-repeatable", status)


def test_a_share_beyond_the_gap_leaves_nothing():
    assert not not_repeatable._left(evidence_of(), 2.0).any()


class Skipped:
    @property
    def as_recorded(self):
        raise SkippedReading("too slow")


@pytest.mark.parametrize(
    ("left", "too_large", "is_too_large"),
    [(0.49, False, True), (0.51, True, False), (None, True, True), (None, False, False)],
)
def test_a_model_says_whether_the_scatter_is_more_than_precision(left, too_large, is_too_large):
    """Half of the gap with its own numbers."""
    reading = left and Reading("as recorded", "trainer", np.array([0.01, np.nan]), left)
    evidence = evidence_of(too_large=too_large, readings=SimpleNamespace(as_recorded=reading))
    evidence.sample.index_N = np.arange(2)
    assert not_repeatable._is_too_large(evidence) == is_too_large
    if left:
        assert not_repeatable._left(evidence, 0.7) == pytest.approx([0.01, -0.3 * left])
    for readings in (None, Skipped()):
        evidence.readings = readings
        assert not_repeatable._is_too_large(evidence) == too_large


@pytest.mark.parametrize(
    ("moved", "words"),
    [(0.11, "as far as"), (0.39, "as far as"), (0.09, "not as far as"), (0.41, "not as far as")],
)
def test_dropout_of_the_model_moves_as_much_as_the_trainer_within_twice(moved, words, monkeypatch):
    """The trainer is 0.2 nats from its model."""
    monkeypatch.setattr(not_repeatable, "with_dropout", lambda loaded: f"dropout in {loaded}")

    def logp_T(hypothesis: str = "", few: bool = False) -> np.ndarray:
        assert (hypothesis, few) in (("", False), ("dropout in it", True))
        return np.array([-1.0, -2.0, np.nan]) + (np.array([moved, -moved, 0]) if few else 0)

    evidence = evidence_of(
        model=SimpleNamespace(loaded="it", logp_T=logp_T),
        readings=SimpleNamespace(distances={"rollout": 9.0, "trainer": 0.2}),
    )
    clause = not_repeatable._dropout_clause(evidence)
    assert (
        clause == f"; with its dropout on, the model moves by {moved:.2g} nats, {words} the trainer"
    )
    evidence.readings = None
    assert not_repeatable._dropout_clause(evidence) == ""


def test_a_model_without_dropout_or_time_says_nothing_of_it(monkeypatch):
    model = SimpleNamespace(loaded="it")
    evidence = evidence_of(model=model, readings=SimpleNamespace())
    monkeypatch.setattr(not_repeatable, "with_dropout", lambda _: None)
    assert "has no dropout" in not_repeatable._dropout_clause(evidence)

    def skips(*_, **__):
        raise SkippedReading("too slow")

    model.logp_T = skips
    monkeypatch.setattr(not_repeatable, "with_dropout", lambda _: "dropout on")
    assert not_repeatable._dropout_clause(evidence) == ""
    evidence.model = None
    assert not_repeatable._dropout_clause(evidence) == ""
