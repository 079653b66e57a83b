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


def test_a_line_by_hand() -> None:
    """At 1/16 the peak is bins 28 to 35 of 1/512, and the valley 12 to 19 or 20 to 27; the last
    column has the tokens that do not count.
    """
    lattice = Lattice()
    columns = [0, 11, 12, 19, 20, 27, 28, 35, 36, 512, 513]
    lattice._counts[3, columns] = (0, 5, 30, 0, 25, 0, 120, 0, 0, 0, 1000)
    lattice._counts[9, columns] = (500, 6, 0, 30, 0, 15, 0, 80, 7, 100, 0)
    line = lattice._line(1 / 16)
    assert line is not None and line.spacing == 1 / 16
    assert line.share == pytest.approx((200 - 40) / 918)
    assert line.rise == pytest.approx(200.5 / 40.5)
    counting_error = np.sqrt(1 / 200.5 + 1 / 40.5)
    logs = np.log([80.5 / 15.5, 120.5 / 25.5])  # without either group
    assert abs(logs[0] - logs[1]) / 2 < counting_error
    assert line.z == pytest.approx(np.log(200.5 / 40.5) / counting_error)
    # The prompts of one group alone have peaks: they differ more than their tokens do.
    lattice._counts[9, 14] = 300
    lattice._counts[9, 22] = 250
    other = lattice._line(1 / 16)
    logs = np.log([80.5 / 265.5, 120.5 / 25.5])
    group_error = abs(logs[0] - logs[1]) / 2  # √(½ Σ (log − mean)²) of two groups
    assert other is not None and other.z == pytest.approx(np.log(200.5 / 290.5) / group_error)
    assert other.share == pytest.approx((200 - 290) / (918 + 550))


@pytest.mark.parametrize(("tokens", "has_line"), [(49, False), (50, True)])
def test_a_peak_needs_fifty_tokens(tokens, has_line) -> None:
    lattice = Lattice()
    lattice._counts[0, 32] = tokens
    assert (lattice._line(1 / 16) is not None) == has_line


def test_a_log_odds_gap_is_counted_in_its_bin(make_batch) -> None:
    """|x| of 0, 1/16 and 3 on counted tokens; one has μ above 0.99, one is out of support."""
    mu = np.array([0.5, 0.4, 0.3, 0.995, 0.5])
    x = np.array([0.0, -0.063, 3.0, 0.5, 0.0])
    odds = np.log(mu / (1 - mu)) + x
    logp = -np.log1p(np.exp(-odds))
    logp[-1] = -np.inf
    lattice = filled(Lattice(), make_batch([np.log(mu).tolist()], logp_recomputed=[logp.tolist()]))
    bins, numbers = np.nonzero(lattice.counts.sum(axis=0))[0], lattice._counts.sum(axis=0)
    assert bins.tolist() == [0, 32, 512] and numbers[bins].tolist() == [1, 1, 1]
    assert numbers[513] == 2
