"""The DPPO paper's methods, and the frameworks' PPO, as published, without using this package.

Objectives, to be maximized, in plain autograd. Each returns its terms, one per token, and
`aggregated` reduces them to one number as frameworks do. `published_methods.py` has the other rows
of the table, `published_owners.py` the framework variants.

Sources: PPO arXiv 1707.06347 eq. 7, dual clip 1912.09729, GSPO 2507.18071 eq. 5 and its token
variant, DPPO 2602.04879 eq. 12 to 16 and App. C.1, MiniRL 2512.01374 eq. 7, CISPO 2506.13585, OPSM
of DeepSeek-V3.2 2512.02556; the rest as in the frameworks' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sample:
    """Sampled tokens; `logp` requires grad, and the distributions are over top-K, sampled token
    and others.
    """

    logp: Tensor  # π
    logp_old: Tensor  # the trainer at the sampling weights
    logq: Tensor  # μ
    advantage: Tensor
    lengths: list[int]
    # Probabilities of μ, π and the old trainer, each summing to 1
    parts: Sequence[Tensor]
    entropy: Tensor  # of π
    prompts: list[int]  # of each response
    luck: Tensor  # a random number per token, from 0 to 1
    logp_average: Tensor | None = None  # an average of the trainer's weights

    def __post_init__(self) -> None:
        self.d, self.d_old = self.logp - self.logq, self.logp - self.logp_old
        self.gap = self.logp_old - self.logq
        self.r, self.r_old, self.rho = self.d.exp(), self.d_old.exp(), self.gap.exp()
        self.p, self.p_old, self.q = self.logp.exp(), self.logp_old.exp(), self.logq.exp()

    def per_response(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """A reduction over each response, repeated at each of its tokens."""
        return torch.cat([reduce(part).expand(len(part)) for part in x.split(self.lengths)])


def policy_gradient(s: Sample, weight: Tensor) -> Tensor:
    """sg(w) · A · log π: CISPO, MiniRL and everything with a truncated weight."""
    return weight.detach() * s.advantage * s.logp


def surrogate(s: Sample, keep: Tensor | float = 1.0) -> Tensor:
    """M · r · A with the gradient through r."""
    return keep * s.r * s.advantage


def clipped(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO's term of each token."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def ppo(s: Sample, weight: Tensor | float = 1.0, low: float = 0.2, high: float = 0.2) -> Tensor:
    return weight * clipped(s.r_old, s.advantage, low, high)


def dual_clip(ratio: Tensor, advantage: Tensor) -> Tensor:
    """max(min(rA, clip(r)A), 3A) where A < 0."""
    inner = clipped(ratio, advantage)
    return torch.where(advantage < 0, torch.maximum(inner, 3 * advantage), inner)


def gspo_responses(s: Sample, anchor: Tensor) -> Tensor:
    """Eq. 5: one term for each response, min(sA, clip(s)A) with s = exp(mean log r′); A is the
    response's.
    """
    terms = []
    for log_ratio, advantage in zip(
        (s.logp - anchor).split(s.lengths), s.advantage.split(s.lengths), strict=True
    ):
        terms.append(clipped(log_ratio.mean().exp(), advantage[0], 3e-4, 4e-4))
    return torch.stack(terms)


def gspo(s: Sample, anchor: Tensor) -> Tensor:
    """As in TRL: the response's term, with the gradient through its mean, is repeated at each of
    its tokens.
    """
    terms = zip(gspo_responses(s, anchor), s.lengths, strict=True)
    return torch.cat([term.expand(length) for term, length in terms])


def gspo_token(s: Sample, anchor: Tensor) -> Tensor:
    """As in verl, and GSPO with an advantage for each token: s_t = sg(s) · π/sg(π)."""
    mean = s.per_response(s.logp - anchor, lambda part: part.mean())
    return clipped(mean.exp().detach() * (s.logp - s.logp.detach()).exp(), s.advantage, 3e-4, 4e-4)


def outside_clip(s: Sample, ratio: Tensor, at_least: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Where (A > 0 and r > 1.28) or (A < 0 and r < 0.8), for μ at or above a bound for each
    sign.
    """
    up = (s.advantage > 0) & (ratio > 1.28) & (s.q >= at_least[0])
    return up | ((s.advantage < 0) & (ratio < 0.8) & (s.q >= at_least[1]))


def dppo_keep(s: Sample, divergence: Tensor, limit: float, anchor: Tensor) -> Tensor:
    """Eq. 12: 0 where the divergence is beyond the limit and the update moves p away from its
    anchor.
    """
    away = ((s.advantage > 0) & (s.p > anchor)) | ((s.advantage < 0) & (s.p < anchor))
    return (~(away & (divergence > limit))).detach().double()


def binary_kl(q: Tensor, p: Tensor) -> Tensor:
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def topk_tv(anchor: Tensor, current: Tensor) -> Tensor:
    return (anchor - current).abs().sum(-1) / 2


def topk_kl(anchor: Tensor, current: Tensor) -> Tensor:
    return torch.where(anchor > 0, anchor * (anchor / current).log(), 0.0).sum(-1)


def minimal_keep(s: Sample, anchor: Tensor, drop: float) -> Tensor:
    return (~((s.advantage < 0) & (anchor - s.p >= drop))).detach().double()


def binary(s: Sample, anchor: Tensor, *, kl: bool) -> Tensor:
    """Binary DPPO with the paper's limits; the weight is r whatever the anchor."""
    divergence = binary_kl(anchor, s.p) if kl else (anchor - s.p).abs()
    return surrogate(s, dppo_keep(s, divergence, 0.05 if kl else 0.15, anchor))


def topk(s: Sample, *, kl: bool, recompute: bool) -> Tensor:
    """Top-K DPPO: the sign is that of the sampled token, the weight min(r, 5)."""
    anchor = s.parts[2] if recompute else s.parts[0]
    divergence = (topk_kl if kl else topk_tv)(anchor, s.parts[1])
    keep = dppo_keep(s, divergence, 0.05 if kl else 0.2, s.p_old if recompute else s.q)
    return policy_gradient(s, keep * s.r.clamp(max=5))


def mis(s: Sample) -> Tensor:
    product = s.per_response(s.rho, lambda part: part.prod())
    return ppo(s, product * (product <= 3))


def mis_geometric(s: Sample) -> Tensor:
    geometric = s.per_response(s.rho.log(), lambda part: part.mean()).exp()
    return ppo(s, s.rho * ((geometric >= 0.999) & (geometric <= 1.002)))


def prime_rl(s: Sample) -> Tensor:
    """`loss.py` of 2026-08-21: A > 0 with p − q > 0.2 is dropped, else p − q < −0.2; no cap;
    kl_tau d² on all.
    """
    gained = s.p - s.q
    dropped = torch.where(s.advantage > 0, gained > 0.2, gained < -0.2)
    return surrogate(s, ~dropped) - 1e-3 * s.d**2


def opsm(s: Sample) -> Tensor:
    drift = s.per_response(s.logp_old - s.logp, lambda part: part.mean())
    return ppo(s, (~((s.advantage < 0) & (drift > 1e-4))).detach().double())


Objective = Callable[[Sample], Tensor]
OBJECTIVES: dict[str, Objective] = {
    "pg-is": surrogate,
    "pg-tis": lambda s: policy_gradient(s, s.r.clamp(max=3)),
    "grpo-clip-higher": lambda s: clipped(s.r, s.advantage, 0.2, 0.28),
    "minirl": lambda s: policy_gradient(s, s.r * ~outside_clip(s, s.r_old)),
    "minirl-tis": lambda s: policy_gradient(s, s.r.clamp(max=3) * ~outside_clip(s, s.r_old)),
    "dppo-binary-tv": lambda s: binary(s, s.q, kl=False),
    "dppo-binary-tv-recompute": lambda s: binary(s, s.p_old, kl=False),
    "dppo-binary-kl": lambda s: binary(s, s.q, kl=True),
    "dppo-binary-kl-recompute": lambda s: binary(s, s.p_old, kl=True),
    "dppo-topk-tv": lambda s: topk(s, kl=False, recompute=False),
    "dppo-topk-tv-recompute": lambda s: topk(s, kl=False, recompute=True),
    "dppo-topk-kl": lambda s: topk(s, kl=True, recompute=False),
    "dppo-topk-kl-recompute": lambda s: topk(s, kl=True, recompute=True),
    "mask-0.5": lambda s: surrogate(s, minimal_keep(s, s.q, 0.5)),
    "mask-0.5-recompute": lambda s: surrogate(s, minimal_keep(s, s.p_old, 0.5)),
    "mask-0.8": lambda s: surrogate(s, minimal_keep(s, s.q, 0.8)),
    "relax-high": lambda s: surrogate(s, ~outside_clip(s, s.r, (0.1, 0.0)).detach()),
    "relax-low": lambda s: surrogate(s, ~outside_clip(s, s.r, (0.0, 0.1)).detach()),
    "relax-both": lambda s: surrogate(s, ~outside_clip(s, s.r, (0.1, 0.1)).detach()),
    "reinforce": lambda s: s.advantage * s.logp,
    "ppo": ppo,
    "ppo-tis": lambda s: ppo(s, s.rho.clamp(max=2)),
    "ppo-icepop": lambda s: ppo(s, s.rho * ((s.rho >= 0.5) & (s.rho <= 5))),
    "ppo-mis": mis,
    "ppo-mis-geometric": mis_geometric,
    "ppo-dual-clip": lambda s: dual_clip(s.r_old, s.advantage),
    "gspo": lambda s: gspo(s, s.logp_old),
    "prime-rl": prime_rl,
    "ipo": lambda s: surrogate(s, ((s.p - s.q).abs() <= 0.1).detach()),
    "ppo-opsm": opsm,
    "ppo-seq-tis": lambda s: ppo(s, s.per_response(s.rho, lambda part: part.prod()).clamp(max=2)),
    "ppo-rollout": lambda s: clipped(s.r, s.advantage),
    "gspo-rollout": lambda s: gspo(s, s.logq),
}


def aggregated(terms: Tensor, lengths: list[int], aggregation: str, longest: int) -> Tensor:
    """Reduce the terms of all tokens to one number, like verl's `agg_loss` and TRL's
    `loss_type`.
    """
    parts = terms.split(lengths)
    if aggregation == "sequence-sum":  # seq-mean-token-sum-norm, dr_grpo
        return sum(part.sum() for part in parts) / (len(lengths) * longest)
    if aggregation == "sequence-mean":  # seq-mean-token-mean, grpo
        return torch.stack([part.mean() for part in parts]).mean()
    assert aggregation == "token-mean"  # dapo
    return terms.mean()
