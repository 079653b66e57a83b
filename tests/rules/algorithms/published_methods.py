"""The field's methods as their authors publish them, in plain autograd: objectives like those of
`published.py`.

A rule on a batch takes the whole sample as one batch; the authors' micro-batches are not in a
trace.

Sources: SAPO 2511.20347 eq. 5, 6; VESPO 2602.10693 and FloyedShen/VESPO; DRPO 2606.09821 eq. 8 and
CPPO 2606.10968 eq. 8 to 11 and 22, both by Tencent-Hunyuan/UniRL; GBPO 2604.18578 and
bounded-ratio-rl; TOPR 2503.14286 eq. 8; MinPRO 2601.22718 by a survey; NFPO 2605.20865 by its
abstract; GMPO 2507.20673 and callsys/GMPO; TRM 2512.23075; KPop by prime-rl PR 3283; M2PO
2510.01161; VACO by open-instruct; Clip-Cov and KL-Cov 2505.22617 and verl; top-entropy tokens
2506.01939 and TRL; GLM-5 2602.15763 §4.1.2; DRO by verl and tinker; Kimi k1.5 2501.12599 eq. 3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.rules.algorithms.published import Sample, binary_kl, policy_gradient, ppo, surrogate


def by_sign(flags: Tensor, positive: float, negative: float) -> Tensor:
    return torch.where(
        flags,
        torch.tensor(positive, dtype=torch.float64),
        torch.tensor(negative, dtype=torch.float64),
    )


def glm5_dis(s: Sample) -> Tensor:
    """Eq. 3 to 5, and SkyRL `rollout_is`: sg(r if 0.8 < r < 1.2 else 0) A log π, whatever the
    sign of A.
    """
    return policy_gradient(s, torch.where((s.r > 0.8) & (s.r < 1.2), s.r, 0.0))


def sapo(s: Sample) -> Tensor:
    """Eq. 5: f(r) A with f = 4/τ σ(τ (r − 1)), r to the old trainer, τ by the sign of A."""
    tau = by_sign(s.advantage > 0, 1.0, 1.05)
    return 4 / tau * torch.sigmoid(tau * (s.r_old - 1)) * s.advantage


def vespo(s: Sample, w: Tensor | None = None) -> Tensor:
    """sg(φ(w)) A log π with φ a gamma density's shape, 1 at w = 1, and w the product over the
    response.
    """
    w = s.per_response(s.r, lambda part: part.prod()).detach() if w is None else w
    rises = s.advantage >= 0
    k, scale = by_sign(rises, 2.0, 3.0), by_sign(rises, 3.0, 2.0)
    return (scale.exp() * w**k * (-scale * w).exp()) * s.advantage * s.logp


def drpo(s: Sample, epsilon: float = 12.5) -> Tensor:
    """`drpo.py`: A r − |A| μ (r − 1)² / (2 ε), with the gradient through both."""
    return s.advantage * s.r - s.advantage.abs() * s.q * (s.r - 1) ** 2 / (2 * epsilon)


def gbpo(s: Sample, temperature: float = 1e-4) -> Tensor:
    """`compute_policy_loss_gbpo`: −|r′ − ρ*| |A|, ρ* between 0.7 and 1.3 by A minus the prompt's
    median.
    """
    advantage_S = torch.stack([part[0] for part in s.advantage.split(s.lengths)])
    prompt_S = torch.tensor(s.prompts)
    median_S = torch.stack([advantage_S[prompt_S == prompt].quantile(0.5) for prompt in s.prompts])
    target_S = 0.7 + 0.6 * torch.sigmoid((advantage_S - median_S) / temperature)
    target = torch.cat([x.expand(n) for x, n in zip(target_S, s.lengths, strict=True)])
    return -(s.r_old - target).abs() * s.advantage.abs()


def topr(s: Sample) -> Tensor:
    """Eq. 8: positive responses with weight 1, negative ones with the trajectory's ratio,
    clamped to [0, 1].
    """
    ratio = s.per_response(s.r, lambda part: part.prod()).clamp(0, 1)
    return policy_gradient(s, torch.where(s.advantage > 0, 1.0, ratio))


def minpro(s: Sample) -> Tensor:
    """sg(clip(m_t r_t, 0.8, 1.28)) A log π with m_t the smallest r strictly before t, and 1 for
    the first token.
    """
    weights = []
    for part in s.r.detach().split(s.lengths):
        smallest = [1.0 if t == 0 else part[:t].min().item() for t in range(len(part))]
        weights.append((torch.tensor(smallest, dtype=torch.float64) * part).clamp(0.8, 1.28))
    return policy_gradient(s, torch.cat(weights))


def nfpo(s: Sample, steps: int = 2) -> Tensor:
    """Π of the ratios of the token and the next N − 1, for N = 1 the surrogate; later ones have
    no gradient.
    """
    ahead = []
    for part in s.r.detach().split(s.lengths):
        for t in range(len(part)):
            ahead.append(part[t + 1 : t + steps].prod())
    return surrogate(s, torch.stack(ahead))


def gmpo(s: Sample) -> Tensor:
    """`gmpo`: A exp(mean of d̃) with d̃ = min(d, 0.4) for A > 0 and max(d, −0.4) for A < 0; at
    each of its tokens.
    """
    terms = []
    for log_ratio, advantage in zip(
        s.d_old.split(s.lengths), s.advantage.split(s.lengths), strict=True
    ):
        held = log_ratio.clamp(max=0.4) if advantage[0] >= 0 else log_ratio.clamp(min=-0.4)
        terms.append((advantage[0] * held.mean().exp()).expand(len(held)))
    return torch.cat(terms)


def cppo(s: Sample, limit: float = 0.15) -> Tensor:
    """`_cppo_mask`: token by token, with the sums over all earlier tokens, kept or not."""
    keep: list[bool] = []
    moved = (s.p - s.q).detach()
    for part, advantage in zip(moved.split(s.lengths), s.advantage.split(s.lengths), strict=True):
        budget = part.abs().quantile(0.9).clamp(0.02, 2 * 0.02).item()
        spent = allowed = 0.0
        for t, (difference, a) in enumerate(zip(part.tolist(), advantage.tolist(), strict=True)):
            w = 1 - (1 - 0.8) * t / max(len(part) - 1, 1)
            threshold = min(limit, limit + budget * allowed - spent)
            keep.append(a * difference <= 0 or w * abs(difference) <= threshold)
            spent, allowed = spent + w * abs(difference), allowed + w
    return surrogate(s, torch.tensor(keep))


def k3(log_ratio: Tensor) -> Tensor:
    return (log_ratio.exp() - 1 - log_ratio).detach()


def trm_max(s: Sample) -> Tensor:
    """The response is kept if the largest ½ d² is at most 0.05."""
    return surrogate(s, s.per_response(s.d.detach() ** 2 / 2, torch.max) <= 0.05)


def trm_avg(s: Sample) -> Tensor:
    return surrogate(s, s.per_response(k3(s.d), torch.mean) <= 1e-3)


def within_both_kl(p: Tensor, q: Tensor, limit: float) -> Tensor:
    return (torch.maximum(binary_kl(p, q), binary_kl(q, p)) <= limit).detach()


def until_small(square: Tensor, counted: Tensor, limit: float) -> Tensor:
    """Drop the largest of the counted squares, one by one, until the mean of the rest is below
    the limit.
    """
    left = sorted(square[counted].tolist())
    while len(left) > 1 and sum(left) / len(left) >= limit:
        left.pop()
    return ~counted | (square <= max(left, default=float("inf")))


def m2po(s: Sample, limit: float = 0.04) -> Tensor:
    """The paper: M r A, where only tokens that PPO's clip would affect count or are dropped."""
    square, outward = s.d.detach() ** 2, (s.advantage * s.d > 0).detach()
    return surrogate(s, until_small(square, outward, limit))


def vaco(s: Sample) -> Tensor:
    """`compute_rho_correction`: min(ρ, 2) on PPO with 0.2 / 0.272; δ = 0.2 on the response's
    mean |ρ − 1|, no ½.
    """
    tv = s.per_response((s.rho - 1).abs(), torch.mean)
    dropped = (s.gap.sign() * s.advantage > 0) & (tv > 0.2)
    return ppo(s, torch.where(dropped, 0.0, s.rho.clamp(max=2)), 0.2, 0.272)


def covariance(s: Sample) -> Tensor:
    logp = s.logp.detach()
    return (s.advantage - s.advantage.mean()) * (logp - logp.mean())


def clip_cov(s: Sample, share: float = 2e-4) -> Tensor:
    """`compute_policy_loss_clip_cov`: PPO, without loss at n random unclipped tokens with 1 <
    cov < 5.
    """
    clips = (s.advantage > 0) & (s.r_old > 1.2) | (s.advantage < 0) & (s.r_old < 0.8)
    candidates = ((covariance(s) > 1) & (covariance(s) < 5) & ~clips).nonzero().squeeze(1)
    number = max(int(share * len(clips)), 1)
    drawn = candidates[s.luck[candidates].argsort()[:number]]
    return ppo(s, torch.ones_like(s.q).index_fill(0, drawn, 0.0))


def kl_cov(s: Sample, share: float = 2e-4, beta: float = 0.1) -> Tensor:
    """`compute_policy_loss_kl_cov`: r′ A without a clip, and − β |d′| at the n tokens with the
    largest covariance.
    """
    largest = covariance(s).topk(max(1, int(len(s.q) * share))).indices
    return (
        s.r_old * s.advantage - torch.zeros_like(s.q).index_fill(0, largest, beta) * s.d_old.abs()
    )


def top_entropy(s: Sample, share: float = 0.2) -> Tensor:
    """`get_high_entropy_mask`: DAPO at or above the quantile 1 − ρ of the entropy, divided by
    all tokens.
    """
    return ppo(s, s.entropy >= s.entropy.quantile(1 - share), 0.2, 0.28)


def dro(s: Sample) -> Tensor:
    """A log π − (β/2) d², token by token; β = 0.05 as on tinker's page."""
    return s.advantage * s.logp - 0.05 / 2 * s.d**2


def kimi(s: Sample) -> Tensor:
    """Eq. 3: A log π(y) − (τ/2) (log π(y)/μ(y))² of the response, distributed to its tokens; τ =
    0.1 of ROLL.
    """
    square = s.per_response(s.d, lambda part: part.sum() ** 2 / len(part))
    return s.advantage * s.logp - 0.1 / 2 * square


METHODS: dict[str, Callable[..., Tensor]] = {
    "glm5-dis": glm5_dis,
    "sapo": sapo,
    "vespo": vespo,
    "drpo": drpo,
    "gbpo": gbpo,
    "topr": topr,
    "minpro": minpro,
    "nfpo": nfpo,
    "gmpo": gmpo,
    "cppo": cppo,
    "trm-max": trm_max,
    "trm-avg": trm_avg,
    "kpop": lambda s: surrogate(s, within_both_kl(s.p, s.q, 0.1)),
    "m2po": m2po,
    "vaco": vaco,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
    "top-entropy": top_entropy,
    "dro": dro,
    "kimi-k1.5": kimi,
}
