"""Decisions in float32 compared with float64, over the whole square of probabilities, near 0 and
near 1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mismatch_cli.rules.policies import Policies
from tests.rules.trust_regions.cases import ask

# A decision may differ only where the true statistic is this close to the threshold, relatively
NEAR = 1e-5


def square() -> tuple[np.ndarray, np.ndarray]:
    """q and p from 1e-7 to 1 − 1e-7, dense at both ends: every pair."""
    tail = np.logspace(-7, -0.31, 250)
    side = np.concatenate([tail, 1 - tail])
    return np.repeat(side, len(side)), np.tile(side, len(side))


def true_statistics(q: np.ndarray, p: np.ndarray) -> dict[str, np.ndarray]:
    """p − q and KL(q‖p) in float64, as published."""
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    statistics = {"binary-tv": p - q, "binary-kl": np.copysign(kl, p - q)}
    return statistics | {"ratio-clip": p / q - 1, "log-ratio-clip": np.log(p / q)}


CASES = [("binary-tv", {}, 0.15, 0.15), ("binary-kl", {}, 0.05, 0.05)]
CASES += [("binary-tv", {"tv_low": 0.02, "tv_high": 0.01}, 0.02, 0.01)]
CASES += [("binary-kl", {"kl_low": 1e-3, "kl_high": 2e-3}, 1e-3, 2e-3)]
CASES += [("log-ratio-clip", {}, 0.4, 0.4)]
CASES += [("ratio-clip", {}, 0.2, 0.28)]


@pytest.mark.parametrize(("name", "chosen", "low", "high"), CASES, ids=lambda x: str(x))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_decisions_over_the_whole_square(
    name: str, chosen: dict[str, float], low: float, high: float, sign: float
) -> None:
    q, p = square()
    rollout, trainer = (torch.from_numpy(np.log(x)).float() for x in (q, p))
    batch = Policies(rollout, trainer, None, torch.tensor([0, len(rollout)]))
    keep = ask(name, batch, torch.full_like(trainer, sign), **chosen).keep_T.numpy()
    statistic = true_statistics(q, p)[name]
    limit = high if sign > 0 else low
    blocked = sign * statistic > limit
    near = np.abs(sign * statistic / limit - 1) < NEAR
    assert 1000 < blocked.sum() < len(blocked) - 1000 and near.mean() < 1e-3
    assert (keep == ~blocked)[~near].all()


def test_the_published_form_decides_wrongly_near_certainty() -> None:
    """q·(log q − log p) + (1 − q)·log((1 − q + 1e-8)/(1 − p + 1e-8)), with 1 − p from a float32
    probability.
    """
    q_rest, p_rest = np.meshgrid(np.logspace(-3, -1, 400), np.logspace(-7, -5, 400))
    q, p = 1 - q_rest.ravel(), 1 - p_rest.ravel()
    rollout, trainer = (torch.from_numpy(np.log(x)).float() for x in (q, p))
    mu, pi = rollout.exp(), trainer.exp()
    published = mu * (rollout - trainer) + (1 - mu) * torch.log((1 - mu + 1e-8) / (1 - pi + 1e-8))
    batch = Policies(rollout, trainer, None, torch.tensor([0, len(rollout)]))
    keep = ask("binary-kl", batch, torch.ones_like(trainer)).keep_T.numpy()
    true = true_statistics(q, p)["binary-kl"]
    clear = np.abs(true / 0.05 - 1) > NEAR
    assert ((published <= 0.05).numpy() != (true <= 0.05))[clear].sum() > 100
    assert (keep == (true <= 0.05))[clear].all()
