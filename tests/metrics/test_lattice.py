"""A planted bf16 lattice is found at its spacing; smooth noise shows none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mismatch_cli.metrics.lattice import Lattice
from tests.metrics.summaries import filled

RESPONSES, LENGTH = 128, 250


def lines(make_batch, logq: torch.Tensor, logp: torch.Tensor) -> dict[float, float]:
    shape = (RESPONSES, LENGTH)
    batch = make_batch(
        logq.reshape(shape).tolist(),
        logp_recomputed=logp.reshape(-1),
        prompt_id=torch.arange(RESPONSES),
    )
    return {line.spacing: line.share for line in filled(Lattice(), batch).result()}


def two_engines(
    top_logit: float, round_to, noise: float = 0.02
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a peaked model, computed twice with a little noise and rounded as by the engine."""
    generator = torch.Generator().manual_seed(0)
    tokens = RESPONSES * LENGTH
    logits = top_logit - torch.empty(tokens, 64).exponential_(generator=generator) * 2.5
    log_probs = [
        round_to(logits + noise * torch.randn(logits.shape, generator=generator))
        .double()
        .log_softmax(-1)
        for _ in range(2)
    ]
    ids = torch.multinomial(log_probs[0].exp(), 1, generator=generator)
    return log_probs[0].gather(1, ids).squeeze(1), log_probs[1].gather(1, ids).squeeze(1)


@pytest.mark.parametrize(("top_logit", "spacing"), [(28.0, 0.125), (55.0, 0.25), (14.0, 0.0625)])
def test_rounded_logits(make_batch, top_logit: float, spacing: float) -> None:
    def to_bf16(logits: torch.Tensor) -> torch.Tensor:
        return logits.bfloat16().float()

    lattice = lines(make_batch, *two_engines(top_logit, to_bf16))
    assert lattice.get(spacing, 0) > 0.02
    assert all(line >= spacing for line in lattice)


def test_unrounded_logits(make_batch) -> None:
    for noise in (0.02, 0.1):
        assert lines(make_batch, *two_engines(28.0, lambda logits: logits, noise)) == {}


def test_one_logit_moves_by_a_sixteenth(make_batch) -> None:
    """d follows from the log-odds gap: r = 1 + δ(1 − μ) to first order, at any μ."""
    rng = np.random.default_rng(0)
    mu = rng.uniform(0.01, 0.95, RESPONSES * LENGTH)
    shift = (
        rng.choice([0, 0.0625, -0.0625], len(mu), p=[0.6, 0.2, 0.2])
        + rng.normal(size=len(mu)) * 0.004
    )
    odds = np.log(mu / (1 - mu)) + shift
    lattice = lines(make_batch, torch.tensor(np.log(mu)), torch.tensor(-np.log1p(np.exp(-odds))))
    assert list(lattice) == [0.0625]
    assert lattice[0.0625] == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize("kind", ["normal", "laplace", "student"])
@pytest.mark.parametrize("scale", [0.01, 0.04, 0.15])
def test_smooth_noise_has_no_lattice(make_batch, kind: str, scale: float) -> None:
    rng = np.random.default_rng(1)
    mu = rng.uniform(0.001, 0.98, RESPONSES * LENGTH)
    draw = {
        "normal": rng.normal,
        "laplace": rng.laplace,
        "student": lambda size: rng.standard_t(3, size),
    }[kind]
    odds = np.log(mu / (1 - mu)) + draw(size=len(mu)) * scale
    assert lines(make_batch, torch.tensor(np.log(mu)), torch.tensor(-np.log1p(np.exp(-odds)))) == {}


def test_too_little_data_has_no_lattice(make_batch) -> None:
    batch = make_batch([[-1.0] * 20], logp_recomputed=[[-0.9] * 20])
    assert filled(Lattice(), batch).result() == [] and Lattice().result() == []


def test_the_share_of_a_line_is_what_rises_above_the_valley(make_batch) -> None:
    """A fifth of the tokens at 1/16, on a constant density that has 10 % in the peak's width."""
    gap = np.tile([*np.linspace(0, 0.125, 200, endpoint=False), *[0.0625] * 50], RESPONSES)
    logq = np.full(len(gap), np.log(0.5))
    lattice = lines(make_batch, torch.tensor(logq), torch.tensor(-np.log1p(np.exp(-gap))))
    assert list(lattice) == [0.0625]
    assert lattice[0.0625] == pytest.approx(0.2, abs=0.005)
