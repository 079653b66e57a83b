"""The smallest and largest parameters of weights."""

from __future__ import annotations

import math

import pytest
import torch

from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.algorithms.masks_and_factors import factor
from tests.rules.trust_regions.cases import F64, policies, weigh

LOGP_T = torch.tensor([-1.0, -2.0, -0.5], dtype=F64)


def weights(name: str, **chosen: float) -> list[float]:
    batch = policies(LOGP_T, LOGP_T + torch.tensor([0.25, -0.5, 0.125], dtype=F64))
    return weigh(factor(name, **chosen), batch, torch.tensor([1.0, -1.0, 2.0])).tolist()


def test_a_ratio_covers_at_most_64_tokens() -> None:
    assert len(weights("n-step-ratio", steps=64)) == 3
    for steps in (0, 65):
        with pytest.raises(UsageError, match=f"steps={steps} is out of range: .* from 1 to 64"):
            weights("n-step-ratio", steps=steps)


def test_a_pull_of_0_is_none() -> None:
    assert [abs(weight) for weight in weights("covariance-pull", beta=0.0, share=1.0)] == [0, 0, 0]
    assert any(weights("covariance-pull", beta=0.1, share=1.0))
    with pytest.raises(UsageError, match="out of range: choose β ≥ 0"):
        weights("covariance-pull", beta=-0.1)


def test_a_ratio_can_have_a_floor_without_a_cap() -> None:
    """d = 0.25, −0.5, 0.125: only the second ratio is below 0.9."""
    ratios = [math.exp(d) for d in (0.25, -0.5, 0.125)]
    assert weights("capped-ratio", floor=0.9) == pytest.approx([ratios[0], 0.9, ratios[2]])
    assert weights("capped-ratio") == pytest.approx(ratios)


def test_a_target_may_lie_at_1_for_advantages_of_either_sign() -> None:
    assert len(weights("gbpo", ratio_low=0.0, ratio_high=0.0)) == 3
    for chosen in ({"ratio_high": -0.1}, {"ratio_low": 1.1}, {"temperature": 0.0}):
        with pytest.raises(UsageError, match="out of range"):
            weights("gbpo", **chosen)
