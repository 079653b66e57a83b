"""TV and KL between rollout (μ) and trainer (π), from log-probabilities: on the sampled token, on the top-K, in full.

Three sentences hold everywhere. KL is a sum of terms q·φ(log(p/q)) with φ(d) = e^d − 1 − d ≥ 0; because both sides of a
partition sum to one, that equals Σ q·log(q/p), and no term can cancel another. A probability's complement is formed as
−expm1(log p), never as 1 − exp(log p). Half-precision input is computed in float32.

log p = 0 exactly means that 1 − p is below half a unit in the last place (6e-8 in float32): a log-softmax cannot say
how far below. The complement then counts as that half unit, the largest value that rounds to zero, so the binary KL is
the smallest one that fits the data and stays finite. A trainer log-probability of −inf (outside its truncated support)
gives Δp = −μ and an infinite KL.
"""

from dataclasses import dataclass
from math import factorial

import torch
from torch import Tensor

_SERIES_BELOW = 0.125  # |d| from which e^d − 1 − d loses no more than four bits
_SERIES_TERMS = {torch.float32: 5, torch.float64: 10}  # the first term left out is below half a unit in the last place
_SERIES = {dtype: [1 / factorial(k + 2) for k in range(terms)] for dtype, terms in _SERIES_TERMS.items()}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_BLOCK = 2**18  # entries of top-K columns that are computed at a time: a megabyte each, which stays in cache


@dataclass(frozen=True)
class SampledToken:
    """What the log-probabilities of the sampled token say, formed together because the parts share their cost."""

    difference_T: Tensor  # π − μ, signed
    binary_kl_T: Tensor  # nats
    log_odds_gap_T: Tensor  # log(π/(1 − π)) − log(μ/(1 − μ)), nats: how far this logit moved if no other did
    rest_rollout_T: Tensor  # 1 − μ
    rest_trainer_T: Tensor  # 1 − π
    _d_T: Tensor
    _series_T: Tensor

    @property
    def k3_T(self) -> Tensor:
        """φ(d), nats."""
        return torch.where(self._d_T.abs() < _SERIES_BELOW, self._series_T, self._d_T.expm1() - self._d_T)


def sampled_token(logp_rollout_T: Tensor, logp_trainer_T: Tensor) -> SampledToken:
    """What {sampled token, anything else} says of two policies, without cancellation or overflow. DPPO eq. 13 and 14.

    π − μ = ± max(μ, π) · (1 − e^−|d|), whose absolute value is the binary TV; KL(μ‖π) = μ·φ(d) + (1 − μ)·φ(y) ≥ 0
    in nats, with d = log π − log μ and y = log((1 − π)/(1 − μ)); the log-odds gap is d − y.
    """
    logp_rollout_T, logp_trainer_T = _wide(logp_rollout_T), _wide(logp_trainer_T)
    d_T = logp_trainer_T - logp_rollout_T
    difference_T = _difference(logp_rollout_T, logp_trainer_T, d_T)
    rest_mu_T, rest_pi_T = _complement(logp_rollout_T), _complement(logp_trainer_T)
    y_T = _log_ratio(rest_mu_T, rest_pi_T, -difference_T)
    small_T, series_T, mu_T = d_T.abs() < _SERIES_BELOW, _phi_series(d_T), _not_nothing(logp_rollout_T)
    sampled_T = torch.where(small_T, mu_T * series_T, difference_T - mu_T.mul_(d_T))
    rest_T = _kl_term(rest_mu_T, rest_pi_T - rest_mu_T, y_T)
    return SampledToken(difference_T, sampled_T.add_(rest_T), d_T - y_T, rest_mu_T, rest_pi_T, d_T, series_T)


def sampled_in_topk(response_ids_T: Tensor, topk_ids_TK: Tensor) -> Tensor:
    """Whether the sampled token is among the engine's top-K ids."""
    return (topk_ids_TK == response_ids_T[:, None]).any(dim=-1)


def topk_divergences(
    logp_rollout_T: Tensor,
    logp_trainer_T: Tensor,
    topk_logp_rollout_TK: Tensor,
    topk_logp_trainer_TK: Tensor,
    in_topk_T: Tensor,
    *,
    replace_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """TV and KL(μ‖π) over {top-K of μ} ∪ {sampled token} ∪ {all others}. DPPO eq. 15 and 16, with "others" in both.

    `in_topk_T` comes from `sampled_in_topk`. With `replace_last` a sampled token outside the top-K takes the place of
    the K-th, as the published code does, so that K = 1 is the binary divergence; the default keeps all K, the finer
    partition. A rank that the rollout's support does not reach (log μ = −inf) belongs to the others.

    The others hold 1 − Σ, which rounding of the log-probabilities makes uncertain by 8 units in the last place (1e-6 in
    float32). Both sides are held at or above that resolution, so their KL is a finite lower bound, and 0 when both are
    below it. A top-K token that π excludes makes the KL infinite: that is its value.
    """
    tokens, k = topk_logp_rollout_TK.shape
    rows = max(1, _BLOCK // k) if topk_logp_rollout_TK.is_cpu else max(1, tokens)
    columns = (logp_rollout_T, logp_trainer_T, topk_logp_rollout_TK, topk_logp_trainer_TK, in_topk_T)
    blocks = zip(*(column.split(rows) for column in columns), strict=True)
    tv, kl = zip(*(_topk_divergences(*block, replace_last=replace_last) for block in blocks), strict=True)
    return torch.cat(tv), torch.cat(kl)


def _topk_divergences(
    logp_rollout_T: Tensor,
    logp_trainer_T: Tensor,
    topk_logp_rollout_TK: Tensor,
    topk_logp_trainer_TK: Tensor,
    in_topk_T: Tensor,
    *,
    replace_last: bool,
) -> tuple[Tensor, Tensor]:
    logp_rollout_T, logp_trainer_T = _wide(logp_rollout_T), _wide(logp_trainer_T)
    topk_logp_rollout_TK, topk_logp_trainer_TK = _wide(topk_logp_rollout_TK), _wide(topk_logp_trainer_TK)
    alone_T = ~in_topk_T  # the sampled token is a part of its own
    if replace_last:
        topk_logp_rollout_TK = topk_logp_rollout_TK.clone()
        topk_logp_rollout_TK[:, -1].masked_fill_(alone_T, float("-inf"))
    mu_TK, mu_T = topk_logp_rollout_TK.exp(), _not_nothing(logp_rollout_T) * alone_T
    d_TK = topk_logp_trainer_TK - topk_logp_rollout_TK
    if len(mu_TK) and not mu_TK.min() > 0:
        d_TK = d_TK.masked_fill(mu_TK == 0, 0)
    d_T = (logp_trainer_T - logp_rollout_T).masked_fill(in_topk_T, 0)
    change_TK = _difference(topk_logp_rollout_TK, topk_logp_trainer_TK, d_TK)
    change_T = _difference(logp_rollout_T, logp_trainer_T, d_T)
    others_change_T = -change_TK.sum(dim=-1) - change_T
    tv_T = (change_TK.abs().sum(dim=-1) + change_T.abs() + others_change_T.abs()) / 2
    kl_T = _kl_term(mu_TK, change_TK, d_TK).sum(dim=-1) + _kl_term(mu_T, change_T, d_T)
    return tv_T, kl_T + _others_kl(1 - mu_TK.sum(dim=-1) - mu_T, others_change_T)


def mass_beyond_topk(logp_T: Tensor, topk_p_TK: Tensor, in_topk_T: Tensor) -> Tensor:
    """What a policy gives to all tokens but the top-K ids, by their probability, and the sampled one: 1 − Σ ≥ 0."""
    sampled_T = _wide(logp_T).exp() * ~in_topk_T
    return (1 - topk_p_TK.sum(dim=-1) - sampled_T).clamp(min=0)


def full_tv(logp_rollout_TV: Tensor, logp_trainer_TV: Tensor) -> Tensor:
    """Total variation over the whole vocabulary: ½ Σ |π − μ|."""
    return (_wide(logp_rollout_TV).exp() - _wide(logp_trainer_TV).exp()).abs().sum(dim=-1) / 2


def full_kl(logp_rollout_TV: Tensor, logp_trainer_TV: Tensor) -> Tensor:
    """KL(μ‖π) over the whole vocabulary, in nats: Σ μ·φ(log π − log μ), plus π's mass where μ = 0."""
    logp_rollout_TV, logp_trainer_TV = _wide(logp_rollout_TV), _wide(logp_trainer_TV)
    outside_TV = logp_rollout_TV == float("-inf")
    d_TV = (logp_trainer_TV - logp_rollout_TV).masked_fill(outside_TV, 0)
    outside_mass_T = (logp_trainer_TV.exp() * outside_TV).sum(dim=-1)
    return (logp_rollout_TV.exp() * phi(d_TV)).sum(dim=-1) + outside_mass_T


def phi(d: Tensor) -> Tensor:
    """φ(d) = e^d − 1 − d ≥ 0; for small |d| by its series d²/2 + d³/6 + …, where the plain form would cancel."""
    d = _wide(d)
    return torch.where(d.abs() < _SERIES_BELOW, _phi_series(d), d.expm1() - d)


def _phi_series(d: Tensor) -> Tensor:
    *lower, highest = _SERIES[d.dtype]
    series = d * highest
    for coefficient in reversed(lower[1:]):
        series.add_(coefficient).mul_(d)  # in place: a dozen fresh columns would not stay in cache
    return series.add_(lower[0]).mul_(d).mul_(d)


def _kl_term(mu: Tensor, change: Tensor, d: Tensor) -> Tensor:
    """μ·φ(d) of one part of a partition, where `change` = π − μ = μ·(e^d − 1) is known."""
    small = d.abs() < _SERIES_BELOW
    return _select(small, _phi_series(d).mul_(mu), change - mu * d)


def _difference(logp_rollout: Tensor, logp_trainer: Tensor, d: Tensor) -> Tensor:
    larger = torch.maximum(logp_rollout, logp_trainer).exp_()
    return d.abs().neg_().expm1_().mul_(larger).copysign_(d)


def _complement(logp_T: Tensor) -> Tensor:
    """1 − p; half a unit in the last place where log p is exactly zero."""
    rest_T = torch.expm1(logp_T).neg_()
    return torch.threshold_(rest_T, 0.0, torch.finfo(rest_T.dtype).eps / 2)


def _log_ratio(mu_T: Tensor, pi_T: Tensor, change_T: Tensor) -> Tensor:
    """log(π/μ) of a part whose masses are known: by log1p of the relative change, unless more than half is gone."""
    x_T = change_T / mu_T
    near_T = x_T > -0.5
    return torch.where(near_T, x_T.log1p_(), (pi_T / mu_T).log_())


def _others_kl(mu_T: Tensor, change_T: Tensor) -> Tensor:
    resolution = 8 * torch.finfo(mu_T.dtype).eps
    pi_T = (mu_T + change_T).clamp(min=resolution)
    mu_T = mu_T.clamp(min=resolution)
    known_T = (mu_T > resolution) & (pi_T > resolution)
    change_T = torch.where(known_T, change_T, pi_T - mu_T)
    return _kl_term(mu_T, change_T, _log_ratio(mu_T, pi_T, change_T))


def _not_nothing(logp_T: Tensor) -> Tensor:
    """p of a token that was sampled: where it underflows, a tiny value, so that p·(−∞) is not NaN."""
    p_T = logp_T.exp()
    return p_T.clamp(min=torch.finfo(p_T.dtype).tiny)


def _select(flags: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """torch.where by bits, for flags in no order: a CPU guesses those one by one, often wrong (4 ns against 1.6)."""
    if not flags.is_cpu or x.requires_grad or y.requires_grad:
        return torch.where(flags, x, y)
    bits = _BITS[x.dtype]
    y = y.view(bits)
    chosen = x.view(bits).bitwise_xor(y).bitwise_and_(flags.to(bits).neg_()).bitwise_xor_(y)
    return chosen.view(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in _SERIES else x.float()
