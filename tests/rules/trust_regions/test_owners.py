"""Masks compared with the rules of the frameworks they are named for, each written as in its
framework's code.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log

import pytest
import torch
from torch import Tensor

from mismatch_cli.rules.algorithms.parts import Mask
from mismatch_cli.rules.policies import (
    ENGINE_GAP,
    TRAINER_ROLLOUT,
    Policies,
    Ratio,
)
from tests.rules.ratios import TRAINER_RECOMPUTED
from tests.rules.trust_regions.cases import random_policies, signs

LOW, HIGH = 0.9, 1.3  # not its own mirror image: 1/1.3 = 0.77, 1/0.9 = 1.11


def over_responses(given: Policies, x_T: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    lengths = given.responses.length_S.tolist()
    return torch.cat([reduce(part).expand(len(part)) for part in x_T.split(lengths)])


def rejected_by_verl(given: Policies, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """`compute_rollout_rejection_mask`: k1 = −log ρ must be between the logs of both thresholds."""
    k1_T = given.rollout - given.recomputed
    k1_T = k1_T if reduce is None else over_responses(given, k1_T, reduce)
    return (k1_T >= log(LOW)) & (k1_T <= log(HIGH))


def inside(ratio_T: Tensor) -> Tensor:
    return (ratio_T >= LOW) & (ratio_T <= HIGH)


def rho(given: Policies) -> Tensor:
    return (given.recomputed - given.rollout).exp()


def left_by_slime(given: Policies, advantage_T: Tensor) -> Tensor:
    kl_T = over_responses(given, given.recomputed - given.trainer, torch.mean)
    return ~((advantage_T < 0) & (kl_T > 0.01))


def within_dual_clip(given: Policies, advantage_T: Tensor) -> Tensor:
    """verl: −A·c replaces the loss where it is smaller, and has no gradient."""
    loss_T = -advantage_T * (given.trainer - given.recomputed).exp()
    return ~((advantage_T < 0) & (-advantage_T * 3 < loss_T))


VARIANTS: dict[str, tuple[str, Ratio, dict[str, float], Callable[[Policies, Tensor], Tensor]]] = {
    "verl token_k1": (
        "icepop", ENGINE_GAP, {"band_low": 1 / HIGH, "band_high": 1 / LOW},
        lambda given, _: rejected_by_verl(given, None),
    ),
    "verl seq_sum_k1": (
        "sequence-product", ENGINE_GAP, {"band_low": 1 / HIGH, "band_high": 1 / LOW},
        lambda given, _: rejected_by_verl(given, torch.sum),
    ),
    "verl seq_mean_k1": (
        "sequence-mean", ENGINE_GAP, {"band_low": 1 / HIGH, "band_high": 1 / LOW},
        lambda given, _: rejected_by_verl(given, torch.mean),
    ),
    "verl rollout_is=token, slime, NeMo-RL and OpenRLHF icepop": (
        "icepop", ENGINE_GAP, {"band_low": LOW, "band_high": HIGH}, lambda given,
        _: inside(rho(given)),
    ),
    "verl rollout_is=sequence, TRL sequence_mask, SkyRL product": (
        "sequence-product", ENGINE_GAP, {"band_low": LOW, "band_high": HIGH},
        lambda given, _: inside(over_responses(given, rho(given), torch.prod)),
    ),
    "NeMo-RL and OpenRLHF seq-mask-tis, SkyRL geometric": (
        "sequence-mean", ENGINE_GAP, {"band_low": LOW, "band_high": HIGH},
        lambda given, _: inside(over_responses(given, rho(given).log(), torch.mean).exp()),
    ),
    "slime OPSM": ("opsm", TRAINER_RECOMPUTED, {"max_kl": 0.01}, left_by_slime),
    "verl clip_ratio_c": ("dual-clip", TRAINER_RECOMPUTED, {"max_ratio": 3.0}, within_dual_clip),
    "prime-rl ipo_threshold": (
        "probability-band", TRAINER_ROLLOUT, {"max_tv": 0.1},
        lambda given, _: (given.trainer.exp() - given.rollout.exp()).abs() <= 0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("owner", VARIANTS)
def test_a_mask_keeps_what_its_owner_keeps(owner: str) -> None:
    region, ratio, thresholds, rule = VARIANTS[owner]
    given = random_policies(0, responses=400, longest=12)
    advantage_T = signs(len(given.responses.length_S))[given.responses.response_T]
    kept_T = Mask(region, ratio, tuple(thresholds.items())).decide(given, advantage_T).keep_T
    assert torch.equal(kept_T, rule(given, advantage_T))
    assert min(kept_T.sum(), (~kept_T).sum()) >= 10


@pytest.mark.parametrize("owner", [owner for owner in VARIANTS if owner.endswith("_k1")])
def test_verl_s_band_without_mirroring_is_a_different_mask(owner: str) -> None:
    region, ratio, _, rule = VARIANTS[owner]
    given = random_policies(0, responses=400, longest=12)
    advantage_T = signs(len(given.trainer))
    as_it_stands = Mask(region, ratio, (("band_low", LOW), ("band_high", HIGH)))
    assert not torch.equal(as_it_stands.decide(given, advantage_T).keep_T, rule(given, advantage_T))
