"""Masks compared with the rules of the frameworks they are named for, each written as in its
framework's code.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log

import pytest
import torch
from torch import Tensor

from mismatch_cli.rules.algorithms.masks_and_factors import Mask
from mismatch_cli.rules.policies import ENGINE_GAP, TRAINER_ROLLOUT, Ratio
from tests.rules.algorithms.published import Sample
from tests.rules.algorithms.samples import sample
from tests.rules.ratios import TRAINER_RECOMPUTED
from tests.rules.trust_regions.cases import random_policies, signs

LOW, HIGH = 0.9, 1.3  # not its own mirror image: 1/1.3 = 0.77, 1/0.9 = 1.11


def inside(ratio_T: Tensor) -> Tensor:
    return (ratio_T >= LOW) & (ratio_T <= HIGH)


def unmirrored(k1_T: Tensor) -> Tensor:
    """verl's `compute_rollout_rejection_mask`: k1 = −log ρ must be between both thresholds' logs."""
    return (k1_T >= log(LOW)) & (k1_T <= log(HIGH))


MIRRORED = {"band_low": 1 / HIGH, "band_high": 1 / LOW}
BAND = {"band_low": LOW, "band_high": HIGH}
VARIANTS: dict[str, tuple[str, Ratio, dict[str, float], Callable[[Sample], Tensor]]] = {
    "verl token_k1": ("icepop", ENGINE_GAP, MIRRORED, lambda s: unmirrored(-s.gap)),
    "verl seq_sum_k1": (
        "sequence-product", ENGINE_GAP, MIRRORED,
        lambda s: unmirrored(s.per_response(-s.gap, torch.sum)),
    ),
    "verl seq_mean_k1": (
        "sequence-mean", ENGINE_GAP, MIRRORED,
        lambda s: unmirrored(s.per_response(-s.gap, torch.mean)),
    ),
    "verl rollout_is=token, slime, NeMo-RL and OpenRLHF icepop": (
        "icepop", ENGINE_GAP, BAND, lambda s: inside(s.rho),
    ),
    "verl rollout_is=sequence, TRL sequence_mask, SkyRL product": (
        "sequence-product", ENGINE_GAP, BAND, lambda s: inside(s.per_response(s.rho, torch.prod)),
    ),
    "NeMo-RL and OpenRLHF seq-mask-tis, SkyRL geometric": (
        "sequence-mean", ENGINE_GAP, BAND,
        lambda s: inside(s.per_response(s.rho.log(), torch.mean).exp()),
    ),
    "slime OPSM": (
        "opsm", TRAINER_RECOMPUTED, {"max_kl": 0.01},
        lambda s: ~((s.advantage < 0) & (s.per_response(-s.d_old, torch.mean) > 0.01)),
    ),
    # −A·c replaces the loss where it is smaller, and has no gradient
    "verl clip_ratio_c": (
        "dual-clip", TRAINER_RECOMPUTED, {"max_ratio": 3.0},
        lambda s: ~((s.advantage < 0) & (-s.advantage * 3 < -s.advantage * s.r_old)),
    ),
    "prime-rl ipo_threshold": (
        "probability-band", TRAINER_ROLLOUT, {"max_tv": 0.1},
        lambda s: (s.p - s.q).abs() <= 0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("owner", VARIANTS)
def test_a_mask_keeps_what_its_owner_keeps(owner: str) -> None:
    region, ratio, thresholds, rule = VARIANTS[owner]
    batch = random_policies(0, responses=400, longest=12)
    advantage_T = signs(len(batch.responses.length_S))[batch.responses.response_T]
    kept_T = Mask(region, ratio, tuple(thresholds.items())).decide(batch, advantage_T).keep_T
    assert torch.equal(kept_T, rule(sample(batch, advantage_T)))
    assert min(kept_T.sum(), (~kept_T).sum()) >= 10


@pytest.mark.parametrize("owner", [owner for owner in VARIANTS if owner.endswith("_k1")])
def test_verl_s_band_without_mirroring_is_a_different_mask(owner: str) -> None:
    region, ratio, _, rule = VARIANTS[owner]
    batch = random_policies(0, responses=400, longest=12)
    advantage_T = signs(len(batch.trainer))
    as_it_stands = Mask(region, ratio, (("band_low", LOW), ("band_high", HIGH)))
    assert not torch.equal(
        as_it_stands.decide(batch, advantage_T).keep_T, rule(sample(batch, advantage_T))
    )
