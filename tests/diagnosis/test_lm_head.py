"""Rounded logits and log-probabilities, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mismatch_cli.diagnosis.checks import lm_head, temperature
from tests.diagnosis.samples import SampleColumns


def bfloat16(logp_N: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logp_N.astype(np.float32)).bfloat16().double().numpy()


def exact(tokens: int, seed: int = 0) -> np.ndarray:
    return -np.random.default_rng(seed).uniform(0.5, 9.0, tokens)


def test_rounding_is_to_the_nearest_and_of_halves_to_the_even():
    halves = -(1 + np.arange(1, 64, 2) / 256)
    logp_N = np.concatenate([exact(5000), halves, -np.exp(exact(500)), [0.0]])
    np.testing.assert_array_equal(lm_head.as_rounded(logp_N), bfloat16(logp_N))


@pytest.mark.parametrize(
    ("rounded", "others", "certain", "share"),
    [(160, 40, 0, 0.8), (159, 40, 50, 0.0), (200, 0, 300, 1.0), (0, 200, 300, 0.0)],
)
def test_the_share_of_bfloat16_numbers_is_that_of_two_hundred_uncertain_values(
    rounded, others, certain, share
):
    """A certain token has less than a thousandth of a nat."""
    logp_N = np.concatenate(
        [bfloat16(exact(rounded)), exact(others, 1) - 1e-4, np.full(certain, -0.0009)]
    )
    assert lm_head._share_stored_in_bfloat16(logp_N) == pytest.approx(share)
    assert lm_head._share_stored_in_bfloat16(np.full(200, -0.00101)) == 0.0
    assert lm_head._share_stored_in_bfloat16(np.full(200, -(2.0**-9))) == 1.0


def evidence_of(logq_T, logp_T, reference=None, current=None, undone=()):
    sample = SampleColumns(
        logq_T=logq_T, logp_T=logp_T, d_N=logp_T - logq_T, index_N=np.arange(len(logq_T))
    )
    scale = SimpleNamespace(
        reference=SimpleNamespace(share_on_grid=reference),
        current=SimpleNamespace(share_on_grid=current),
    )
    return SimpleNamespace(sample=sample, scale=scale, undone=undone)


@pytest.mark.parametrize(
    ("of_rollout", "of_trainer", "sides"),
    [
        (0.62, 0.0, "rollout"),
        (0.58, 0.0, None),
        (0.0, 0.62, "trainer"),
        (0.62, 0.7, "rollout and the trainer"),
    ],
)
def test_sides_with_six_tenths_of_bfloat16_numbers_stored_them(of_rollout, of_trainer, sides):
    is_first = np.arange(400) / 400
    logq_T = np.where(is_first < of_rollout, bfloat16(exact(400)), exact(400) - 1e-4)
    logp_T = np.where(is_first < of_trainer, bfloat16(exact(400, 1)), exact(400, 1) - 1e-4)
    finding = lm_head.check(evidence_of(logq_T, logp_T))
    if sides is None:
        assert finding.status == "untested"
        return
    assert (finding.check, finding.status, finding.measure) == (
        "lm-head", "found", "share of rounded values"
    )  # fmt: skip
    assert finding.effect == pytest.approx(max(of_rollout, of_trainer))
    assert finding.sentence == f"The log-probabilities of the {sides} were stored in bfloat16."
    labels, values = zip(*finding.evidence, strict=True)
    assert labels == (
        "rollout: share of log-probabilities that are bfloat16 numbers",
        "trainer: share of log-probabilities that are bfloat16 numbers",
        "rollout: share of tokens whose logits are on a grid",
        "trainer: share of tokens whose logits are on a grid",
    )
    assert values == (pytest.approx(of_rollout), pytest.approx(of_trainer), None, None)


def test_the_other_side_is_rounded_too():
    exact_T = exact(300)
    for logq_T, logp_T in ((bfloat16(exact_T), exact_T), (exact_T, bfloat16(exact_T))):
        finding = lm_head.check(evidence_of(logq_T, logp_T))
        assert finding.status == "found" and not finding.left_N.any()
    mostly_T = np.where(np.arange(300) < 200, bfloat16(exact_T), exact_T)
    mixed = lm_head.check(evidence_of(bfloat16(exact_T), mostly_T))
    assert "rollout and the trainer" in mixed.sentence and mixed.left_N is None
    both = lm_head.check(evidence_of(bfloat16(exact_T), bfloat16(exact_T - 1)))
    assert both.status == "found" and both.left_N is None


@pytest.mark.parametrize(
    ("rollout", "trainer", "status"),
    [
        (0.61, 0.19, "found"), (0.59, 0.19, "clear"), (0.61, 0.21, "clear"),
        (0.19, 0.61, "found"), (0.9, 0.9, "clear"), (None, 0.9, "untested"),
        (0.9, None, "untested"),
    ],
)  # fmt: skip
def test_the_logits_of_one_side_alone_are_on_a_grid(rollout, trainer, status):
    rows = (("a", 1),)
    finding = lm_head._grid_finding(rollout, trainer, rows)
    assert (finding.check, finding.status) == ("lm-head", status)
    if status == "untested":
        assert finding.reason == "needs top-K log-probabilities of both sides"
        return
    assert finding.evidence == rows
    if status == "found":
        side, other = ("rollout", "trainer") if rollout > trainer else ("trainer", "rollout")
        assert finding.sentence == (
            f"The {side}'s logits are rounded to bfloat16 steps; the {other}'s are not."
        )
        assert finding.effect == 0.61
    else:
        assert finding.effect == min(rollout, trainer)
        assert finding.reason == (
            "would have found ≥ 60 % of one side’s tokens on a grid, ≤ 20 % of the other’s"
        )


@pytest.mark.parametrize(
    ("undone", "beta", "status", "words"),
    [
        (("log-base",), 1.0, "clear", "the bases differ: fix “Another base of the logarithm” first"),
        (("temperature",), 1.0019, "found", ""),
        ((), 0.9981, "clear", ""),
        ((), None, "untested", ""),
        ((), 1.0021, "clear", "a slope of 1.002 between the sides may stretch one side’s grid"),
        ((), 0.9, "found", "the temperatures differ: fix “Temperature on one side only” first"),
    ],
)  # fmt: skip
def test_a_grid_is_stretched_by_another_base_or_temperature(
    undone, beta, status, words, monkeypatch
):
    fit = SimpleNamespace(effect=beta, status=status)
    monkeypatch.setattr(temperature, "check", lambda _: fit)
    assert lm_head._why_a_grid_is_stretched(SimpleNamespace(undone=undone)) == words
    evidence = evidence_of(exact(300), exact(300, 1), 0.9, 0.1, undone)
    finding = lm_head.check(evidence)
    assert (finding.check, finding.status) == ("lm-head", "untested" if words else "found")
    assert finding.reason == words
