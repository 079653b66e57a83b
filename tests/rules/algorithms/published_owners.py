"""The variants of single frameworks, as their code computes the loss: objectives like those of
`published.py`.

Sources: verl `rollout_corr_helper.py`, `config/algorithm.py` (its presets) and `core_algos.py`;
SkyRL `ppo_utils.py` and `off_policy_correction_utils.py`; TRL `grpo_trainer.py`; ROLL,
open-instruct, tinker's page on CISPO, prime-rl PR 3526 and 3586, openai/ppo-ewma, GLM-5 2602.15763
eq. 1, AReaL `functional.py` and `actor.py`; DPPO 2602.04879 App. E. Where a framework first clamps
log ratios to ±20 nats, the tests' policies stay inside.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from tests.rules.algorithms.published import (
    OBJECTIVES,
    Objective,
    Sample,
    binary_kl,
    clipped,
    dppo_keep,
    dual_clip,
    policy_gradient,
    ppo,
    surrogate,
)
from tests.rules.algorithms.published_methods import METHODS, k3, until_small, vespo, within_both_kl


def within(x: Tensor, low: float, high: float) -> Tensor:
    return ((x >= low) & (x <= high)).detach()


def product(s: Sample, ratio: Tensor) -> Tensor:
    return s.per_response(ratio, torch.prod).detach()


def seq_mean_k1(s: Sample, log_ratio: Tensor) -> Tensor:
    """`rollout_rs`: k1 = −log ratio, and its mean over the response between log 0.999 and log
    1.001.
    """
    return within(s.per_response(-log_ratio, torch.mean), log(0.999), log(1.001))


def seq_mean_k3(s: Sample, log_ratio: Tensor) -> Tensor:
    return s.per_response(k3(log_ratio), torch.mean) <= 0.01


def decoupled(weight: Objective) -> Objective:
    """verl's default loss on r′, which has a dual clip, times a weight or mask of the engine
    gap.
    """
    return lambda s: weight(s) * dual_clip(s.r_old, s.advantage)


def token_is(s: Sample) -> Tensor:
    return s.rho.clamp(max=2)


def sequence_is(s: Sample) -> Tensor:
    return product(s, s.rho).clamp(max=2)


VERL: dict[str, Objective] = {
    "verl-token-is": decoupled(token_is),
    "verl-seq-is": decoupled(sequence_is),
    "verl-token-icepop": decoupled(lambda s: s.rho * within(s.rho, 0.5, 5)),
    "verl-seq-is-rs": decoupled(
        lambda s: sequence_is(s) * within(s.per_response(-s.gap, torch.sum), log(0.5), log(2)),
    ),
    "verl-geo-rs": decoupled(lambda s: seq_mean_k1(s, s.gap)),
    "verl-geo-rs-seq-tis": decoupled(lambda s: sequence_is(s) * seq_mean_k1(s, s.gap)),
    "verl-geo-rs-token-tis": decoupled(lambda s: token_is(s) * seq_mean_k1(s, s.gap)),
    "verl-k3-rs": decoupled(lambda s: seq_mean_k3(s, s.gap)),
    "verl-k3-rs-seq-tis": decoupled(lambda s: sequence_is(s) * seq_mean_k3(s, s.gap)),
    "verl-k3-rs-token-tis": decoupled(lambda s: token_is(s) * seq_mean_k3(s, s.gap)),
    "verl-bypass-ppo-clip": lambda s: dual_clip(s.r, s.advantage),
    "verl-bypass-ppo-clip-geo-rs": lambda s: seq_mean_k1(s, s.d) * dual_clip(s.r, s.advantage),
    "verl-bypass-ppo-clip-k3-rs": lambda s: seq_mean_k3(s, s.d) * dual_clip(s.r, s.advantage),
    "verl-bypass-pg-is": lambda s: policy_gradient(s, product(s, s.r).clamp(max=2)),
    "verl-bypass-pg-token-icepop": lambda s: policy_gradient(s, s.r * within(s.r, 0.5, 5)),
    "verl-bypass-pg-geo-rs": lambda s: policy_gradient(s, seq_mean_k1(s, s.d)),
    "verl-bypass-pg-geo-rs-seq-tis": lambda s: policy_gradient(
        s, product(s, s.r).clamp(max=2) * seq_mean_k1(s, s.d)
    ),
    "verl-bypass-pg-geo-rs-token-tis": lambda s: policy_gradient(
        s, s.r.clamp(max=2) * seq_mean_k1(s, s.d)
    ),
}


def trl_cispo(s: Sample) -> Tensor:
    """min(sg(r′), ε_high) A log π with ε_high = 0.2, times Πρ, which `sequence_mask` sets to 0
    above 3.
    """
    sequence = product(s, s.rho)
    return policy_gradient(s, s.r_old.clamp(max=0.2) * torch.where(sequence > 3, 0.0, sequence))


CISPO: dict[str, Objective] = {
    "cispo-verl": lambda s: policy_gradient(s, s.r_old.clamp(1 - 0.2, 1 + 0.2)),
    "cispo-skyrl": lambda s: policy_gradient(s, s.r_old.clamp(1 - 1.0, 1 + 4.0)),
    "cispo-trl": trl_cispo,
    "cispo-roll": lambda s: policy_gradient(s, s.r_old.clamp(0.9, 1.1)),
    "cispo-open-instruct": lambda s: policy_gradient(
        s, s.r_old.clamp(max=1 + 0.272) * s.rho.clamp(max=2)
    ),
    "cispo-tinker": lambda s: policy_gradient(s, s.r.clamp(0, 4)),
    "cispo-prime-rl": lambda s: policy_gradient(s, s.r.clamp(0, 5)),
}


def veto(s: Sample) -> Tensor:
    """SkyRL: a response is kept if no ρ is below 1e-4 or above 100."""
    return (s.per_response(s.rho, torch.min) >= 1e-4) & (s.per_response(s.rho, torch.max) <= 100)


def off_policy_mask(s: Sample) -> Tensor:
    """TRL `get_off_policy_mask`: A ≥ 0, or mean(log q − log p) at most 0.5, with q from the
    engine.
    """
    return (s.advantage >= 0) | (s.per_response(-s.d, torch.mean) <= 0.5).detach()


def glm5_pop(s: Sample) -> Tensor:
    """Eq. 1: pop(ρ, 1/2, 2) on Clip-Higher."""
    return ppo(s, torch.where(within(s.rho, 0.5, 2), s.rho, 0.0), 0.2, 0.28)


def areal_kpop(s: Sample) -> Tensor:
    """`gsm8k_kpop.yaml`: ρ where both binary KLs of p′ and q are at most 2, on PPO with ε = 0.4."""
    return ppo(s, s.rho * within_both_kl(s.p_old, s.q, 2.0), 0.4, 0.4)


def areal_m2po(s: Sample) -> Tensor:
    """`gsm8k_m2po.yaml`: all tokens count, by log q − log p′, whatever the advantage; ρ up to 5; a
    clip with ε = 0.
    """
    keep_T = until_small(s.gap**2, torch.ones_like(s.q, dtype=torch.bool), 0.04)
    return ppo(s, s.rho * within(s.rho, 0, 5) * keep_T, 0.0, 0.0)


def trl_vespo(s: Sample) -> Tensor:
    """sg(φ(w)) A log π with w the product of r′ and of ρ, each at most 3 (`token_truncate`)."""
    return vespo(s, product(s, s.r_old) * product(s, s.rho.clamp(max=3)))


def roll_topr(s: Sample) -> Tensor:
    """`_compute_topr_loss`: the token's r′ between 0 and 1 for A < 0."""
    return policy_gradient(s, torch.where(s.advantage > 0, 1.0, s.r_old.clamp(0, 1)))


def roll_kimi(s: Sample) -> Tensor:
    """`_compute_kimi15_loss`: A log π − (τ/2) d′², token by token; τ = 0.1."""
    return s.advantage * s.logp - 0.1 / 2 * s.d_old**2


def ppo_ewma(s: Sample) -> Tensor:
    """openai/ppo-ewma `compute_losses`: the clip in log space around the average, the weight to
    μ up to 100.
    """
    assert s.logp_average is not None
    behaviour = torch.maximum(s.logq, s.logp.detach() - log(100))
    held = (s.logp - s.logp_average).clamp(log(0.8), log(1.2)) + s.logp_average
    return torch.minimum(*((x - behaviour).exp() * s.advantage for x in (s.logp, held)))


OTHERS: dict[str, Objective] = {
    "prime-rl-ipo": lambda s: surrogate(s, ((s.p - s.q).abs() <= 0.3).detach()),
    "prime-rl-icepop": lambda s: surrogate(s, within(s.r, 0.2, 5)),
    "glm5-icepop": glm5_pop,
    "ppo-kpop": areal_kpop,
    "ppo-veto": lambda s: ppo(s, veto(s)),
    "m2po-areal": areal_m2po,
    "vespo-trl": trl_vespo,
    "topr-roll": roll_topr,
    "kimi-roll": roll_kimi,
    "ppo-opsm-rollout": lambda s: ppo(s, off_policy_mask(s)),
    "ppo-ewma": ppo_ewma,
}


def truncated_dppo(s: Sample, divergence: Tensor, limit: float, cap: float) -> Tensor:
    """sg(min(r, C)) A log π inside the limit: verl's loss and the paper's larger runs."""
    return policy_gradient(s, dppo_keep(s, divergence, limit, s.q) * s.r.clamp(max=cap))


def clip_higher(s: Sample) -> Tensor:
    """App. E: the clip's mask with ε = 0.2 / 0.27 on the truncated weight."""
    blocked = clipped(s.r, s.advantage, 0.2, 0.27) != s.r * s.advantage
    return policy_gradient(s, s.r.clamp(max=5) * ~blocked)


DPPO: dict[str, Objective] = {
    "dppo-verl": lambda s: truncated_dppo(s, (s.p - s.q).abs(), 0.2, 3),
    "cispo-scaling": lambda s: policy_gradient(s, s.r.clamp(max=5)),
    "clip-higher-scaling": clip_higher,
    "dppo-binary-tv-scaling": lambda s: truncated_dppo(s, (s.p - s.q).abs(), 0.2, 5),
    "dppo-binary-tv-scaling-lora": lambda s: truncated_dppo(s, (s.p - s.q).abs(), 0.15, 5),
    "dppo-binary-kl-scaling": lambda s: truncated_dppo(s, binary_kl(s.q, s.p), 0.05, 5),
}

OF_TABLE = OBJECTIVES | METHODS
OF_OWNERS = VERL | CISPO | OTHERS | DPPO
PUBLISHED = OF_TABLE | OF_OWNERS
