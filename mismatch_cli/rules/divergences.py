"""TV and KL between rollout (μ) and trainer (π), from log-probabilities: on the sampled token, on
the top-K, in full.

Three rules hold throughout. KL is a sum of terms q·φ(log(p/q)) with φ(d) = e^d − 1 − d ≥ 0; because
both sides of a partition sum to one, that equals Σ q·log(q/p), and no term can cancel another. The
complement of a probability is −expm1(log p), never 1 − exp(log p). Half-precision input is computed
in float32.

log p = 0 exactly means that 1 − p is below half a unit in the last place (6e-8 in float32): a
log-softmax cannot say how far below. The complement then counts as that half unit, the largest
value that rounds to zero, so the binary KL is the smallest one that fits the data and stays finite.
A trainer log-probability of −inf (outside its truncated support) gives Δp = −μ and an infinite KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import factorial, inf

import numpy as np

from mismatch_cli.base.arrays import (
    Array,
    blocks,
    clamp_min,
    contiguous,
    copied,
    fill_where,
    is_on_cpu,
    keep_or_compute,
    namespace,
    row_any,
    row_sums,
    silent,
    with_sign,
)

_SERIES_BELOW = 0.125  # |d| from which e^d − 1 − d loses no more than four bits
# By bytes: the first omitted term is below half a unit in the last place
_SERIES_TERMS = {4: 5, 8: 10}
_SERIES = {
    size: [1 / factorial(k + 2) for k in range(terms)] for size, terms in _SERIES_TERMS.items()
}
BLOCK = 2**17  # entries of top-K columns per block: half a megabyte each, which stays in cache
_BLOCK_TOKENS = 2**16  # tokens per block of the sampled token's columns


class SampledToken:
    """Quantities from the log-probabilities of the sampled token, computed together because they
    share their cost.
    """

    def __init__(self, blocks: Sequence[_Block]) -> None:
        self._blocks = blocks

    @cached_property
    def difference_T(self) -> Array:
        """π − μ, signed."""
        return _joined([block.difference_T for block in self._blocks])

    @cached_property
    def binary_kl_T(self) -> Array:
        """Nats."""
        return _joined([block.binary_kl_T for block in self._blocks])

    @cached_property
    def log_odds_gap_T(self) -> Array:
        """log(π/(1 − π)) − log(μ/(1 − μ)), nats: how far this logit moved if no others did."""
        return _joined([block.d_T - block.y_T for block in self._blocks])

    @cached_property
    def rest_rollout_T(self) -> Array:
        """1 − μ."""
        return _joined([block.rest_rollout_T for block in self._blocks])

    @cached_property
    def rest_trainer_T(self) -> Array:
        """1 − π."""
        return _joined([block.rest_trainer_T for block in self._blocks])

    @cached_property
    @silent
    def k3_T(self) -> Array:
        """φ(d), nats."""
        return _joined(
            [
                keep_or_compute(block.small_T, block.series_T, _plain_phi, block.d_T)
                for block in self._blocks
            ]
        )


@dataclass(frozen=True)
class _Block:
    difference_T: Array
    binary_kl_T: Array
    rest_rollout_T: Array
    rest_trainer_T: Array
    d_T: Array
    y_T: Array
    small_T: Array
    series_T: Array


def _joined(columns: Sequence[Array]) -> Array:
    return columns[0] if len(columns) == 1 else namespace(columns[0]).concat(columns)


@silent
def compare_sampled_token(logp_rollout_T: Array, logp_trainer_T: Array) -> SampledToken:
    """Two policies compared on {sampled token, all others}, without cancellation or overflow. DPPO
    eq. 13 and 14.

    π − μ = ± max(μ, π) · (1 − e^−|d|), whose absolute value is the binary TV; KL(μ‖π) = μ·φ(d) + (1
    − μ)·φ(y) ≥ 0 in nats, with d = log π − log μ and y = log((1 − π)/(1 − μ)); the log-odds gap is
    d − y.
    """
    tokens = len(logp_rollout_T)
    parts = blocks(
        tokens, _BLOCK_TOKENS if isinstance(logp_rollout_T, np.ndarray) else max(1, tokens)
    )
    return SampledToken(
        [_sampled_token(_wide(logp_rollout_T[part]), _wide(logp_trainer_T[part])) for part in parts]
    )


def _sampled_token(logp_rollout_T: Array, logp_trainer_T: Array) -> _Block:
    d_T = logp_trainer_T - logp_rollout_T
    difference_T = _difference(logp_rollout_T, logp_trainer_T, d_T)
    rest_mu_T, rest_pi_T = _complement(logp_rollout_T), _complement(logp_trainer_T)
    y_T = _log_ratio(rest_mu_T, rest_pi_T, -difference_T)
    small_T, series_T, mu_T = (
        namespace(d_T).abs(d_T) < _SERIES_BELOW,
        _phi_series(d_T),
        _not_nothing(logp_rollout_T),
    )
    kl_T = keep_or_compute(small_T, mu_T * series_T, _plain_kl_term, mu_T, difference_T, d_T)
    kl_T += _kl_term(rest_mu_T, rest_pi_T - rest_mu_T, y_T)
    return _Block(difference_T, kl_T, rest_mu_T, rest_pi_T, d_T, y_T, small_T, series_T)


def sampled_in_topk(response_ids_T: Array, topk_ids_TK: Array) -> Array:
    """Whether the sampled token is among the engine's top-K ids."""
    return row_any(topk_ids_TK == response_ids_T[:, None])


@silent
def topk_divergences(
    logp_rollout_T: Array,
    logp_trainer_T: Array,
    topk_logp_rollout_TK: Array,
    topk_logp_trainer_TK: Array,
    in_topk_T: Array,
    *,
    replace_last: bool = False,
) -> tuple[Array, Array]:
    """TV and KL(μ‖π) over {top-K of μ} ∪ {sampled token} ∪ {all others}. DPPO eq. 15 and 16, with
    "others" in both.

    `in_topk_T` comes from `sampled_in_topk`. With `replace_last` a sampled token outside the top-K
    takes the place of the K-th, as the published code does, so that K = 1 is the binary divergence;
    the default keeps all K, the finer partition. A rank that the rollout's support does not reach
    (log μ = −inf) belongs to the others.

    The others hold 1 − Σ, which rounding of the log-probabilities makes uncertain by 8 units in the
    last place (1e-6 in float32). Both sides are clamped to at least that resolution, so their KL is
    a finite lower bound, and 0 when both are below it. A top-K token that π excludes makes the KL
    infinite, which is correct.
    """
    tokens, k = topk_logp_rollout_TK.shape
    rows = max(1, BLOCK // k) if is_on_cpu(topk_logp_rollout_TK) else max(1, tokens)
    columns = (
        logp_rollout_T,
        logp_trainer_T,
        topk_logp_rollout_TK,
        topk_logp_trainer_TK,
        in_topk_T,
    )
    found = [
        _topk_divergences(
            *(contiguous(column[block]) for column in columns), replace_last=replace_last
        )
        for block in blocks(tokens, rows)
    ]
    tv, kl = zip(*found, strict=True)
    xp = namespace(logp_rollout_T)
    return xp.concat(tv), xp.concat(kl)


def _topk_divergences(
    logp_rollout_T: Array,
    logp_trainer_T: Array,
    topk_logp_rollout_TK: Array,
    topk_logp_trainer_TK: Array,
    in_topk_T: Array,
    *,
    replace_last: bool,
) -> tuple[Array, Array]:
    logp_rollout_T, logp_trainer_T = _wide(logp_rollout_T), _wide(logp_trainer_T)
    topk_logp_rollout_TK, topk_logp_trainer_TK = (
        _wide(topk_logp_rollout_TK),
        _wide(topk_logp_trainer_TK),
    )
    xp = namespace(logp_rollout_T)
    alone_T = ~in_topk_T  # the sampled token is its own part
    if replace_last:
        topk_logp_rollout_TK = copied(topk_logp_rollout_TK)
        topk_logp_rollout_TK[:, -1] = fill_where(topk_logp_rollout_TK[:, -1], alone_T, -inf)
    mu_TK, mu_T = xp.exp(topk_logp_rollout_TK), _not_nothing(logp_rollout_T) * alone_T
    d_TK = topk_logp_trainer_TK - topk_logp_rollout_TK
    if len(mu_TK) and not xp.min(mu_TK) > 0:
        d_TK = fill_where(d_TK, mu_TK == 0, 0.0)
    d_T = fill_where(logp_trainer_T - logp_rollout_T, in_topk_T, 0.0)
    change_TK = _difference(topk_logp_rollout_TK, topk_logp_trainer_TK, d_TK)
    change_T = _difference(logp_rollout_T, logp_trainer_T, d_T)
    others_change_T = -row_sums(change_TK) - change_T
    tv_T = (row_sums(xp.abs(change_TK)) + xp.abs(change_T) + xp.abs(others_change_T)) / 2
    kl_T = row_sums(_kl_term(mu_TK, change_TK, d_TK)) + _kl_term(mu_T, change_T, d_T)
    return tv_T, kl_T + _others_kl(1 - row_sums(mu_TK) - mu_T, others_change_T)


@silent
def mass_beyond_topk(logp_T: Array, topk_p_TK: Array, in_topk_T: Array) -> Array:
    """A policy's mass on all tokens except the sampled one and the top-K, given their
    probabilities: 1 − Σ ≥ 0.
    """
    xp = namespace(logp_T)
    sampled_T = xp.exp(_wide(logp_T)) * ~in_topk_T
    return clamp_min(1 - row_sums(topk_p_TK) - sampled_T, 0.0)


@silent
def full_tv(logp_rollout_TV: Array, logp_trainer_TV: Array) -> Array:
    """Total variation over the whole vocabulary: ½ Σ |π − μ|."""
    xp = namespace(logp_rollout_TV)
    return (
        xp.sum(xp.abs(xp.exp(_wide(logp_rollout_TV)) - xp.exp(_wide(logp_trainer_TV))), axis=-1) / 2
    )


@silent
def full_kl(logp_rollout_TV: Array, logp_trainer_TV: Array) -> Array:
    """KL(μ‖π) over the whole vocabulary, in nats: Σ μ·φ(log π − log μ), plus π's mass where μ =
    0.
    """
    logp_rollout_TV, logp_trainer_TV = _wide(logp_rollout_TV), _wide(logp_trainer_TV)
    xp = namespace(logp_rollout_TV)
    outside_TV = logp_rollout_TV == -inf
    d_TV = fill_where(logp_trainer_TV - logp_rollout_TV, outside_TV, 0.0)
    outside_mass_T = xp.sum(xp.exp(logp_trainer_TV) * outside_TV, axis=-1)
    return xp.sum(xp.exp(logp_rollout_TV) * phi(d_TV), axis=-1) + outside_mass_T


@silent
def phi(d: Array) -> Array:
    """φ(d) = e^d − 1 − d ≥ 0; for small |d| by its series d²/2 + d³/6 + …, where the plain form
    would cancel.
    """
    d = _wide(d)
    # exp(d) − 1 − d cancels for small d: at d = 1e-4, float32 gives three times the value.
    # The KL of nearly equal policies would be made of rounding errors, some of them negative.
    return keep_or_compute(namespace(d).abs(d) < _SERIES_BELOW, _phi_series(d), _plain_phi, d)


def _plain_phi(d: Array) -> Array:
    return namespace(d).expm1(d) - d


def _phi_series(d: Array) -> Array:
    *lower, highest = _SERIES[d.dtype.itemsize]
    series = d * highest
    for coefficient in reversed(lower[1:]):
        series += coefficient  # in place: a dozen new columns would not stay in cache
        series *= d
    series += lower[0]
    series *= d
    series *= d
    return series


def _kl_term(mu: Array, change: Array, d: Array) -> Array:
    """μ·φ(d) of one part of a partition, where `change` = π − μ = μ·(e^d − 1) is known."""
    series = _phi_series(d)
    series *= mu
    return keep_or_compute(
        namespace(d).abs(d) < _SERIES_BELOW, series, _plain_kl_term, mu, change, d
    )


def _plain_kl_term(mu: Array, change: Array, d: Array) -> Array:
    return change - mu * d


def _difference(logp_rollout: Array, logp_trainer: Array, d: Array) -> Array:
    xp = namespace(d)
    change = xp.expm1(-xp.abs(d))
    change *= xp.exp(xp.maximum(logp_rollout, logp_trainer))
    return with_sign(change, d)


def _complement(logp_T: Array) -> Array:
    """1 − p; half a unit in the last place where log p is exactly zero."""
    xp = namespace(logp_T)
    # 1 − exp(log p) cancels where p is nearly 1: at 1 − p = 1e-6, float32 is 5 % off.
    # Binary KL and TV would then be made of rounding errors for every confident token.
    rest_T = -xp.expm1(logp_T)
    return fill_where(rest_T, rest_T <= 0, xp.finfo(rest_T.dtype).eps / 2)


def _log_ratio(mu_T: Array, pi_T: Array, change_T: Array) -> Array:
    """log(π/μ) of a part with known masses: log1p of the relative change, unless more than half
    is gone.
    """
    xp = namespace(mu_T)
    x_T = change_T / mu_T
    return keep_or_compute(x_T > -0.5, xp.log1p(x_T), _plain_log_ratio, mu_T, pi_T)


def _plain_log_ratio(mu_T: Array, pi_T: Array) -> Array:
    return namespace(mu_T).log(pi_T / mu_T)


def _others_kl(mu_T: Array, change_T: Array) -> Array:
    xp = namespace(mu_T)
    resolution = 8 * float(xp.finfo(mu_T.dtype).eps)
    pi_T = clamp_min(mu_T + change_T, resolution)
    mu_T = clamp_min(mu_T, resolution)
    known_T = (mu_T > resolution) & (pi_T > resolution)
    change_T = xp.where(known_T, change_T, pi_T - mu_T)
    return _kl_term(mu_T, change_T, _log_ratio(mu_T, pi_T, change_T))


def _not_nothing(logp_T: Array) -> Array:
    """p of a sampled token; a tiny value if it underflows, so that p·(−∞) is not NaN."""
    xp = namespace(logp_T)
    return clamp_min(xp.exp(logp_T), float(xp.finfo(logp_T.dtype).smallest_normal))


def _wide(x: Array) -> Array:
    return x if x.dtype.itemsize in _SERIES else namespace(x).astype(x, namespace(x).float32)
