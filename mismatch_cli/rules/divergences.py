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
_COEFFICIENTS = [1 / factorial(k + 2) for k in range(10)]  # of φ(d) / d²
# By the bytes of a float. The first omitted term is below half a unit in the last place.
_SERIES = {4: _COEFFICIENTS[:5], 8: _COEFFICIENTS}
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
        return self._joined("difference_T")

    @cached_property
    def binary_kl_T(self) -> Array:
        """Binary KL(μ‖π), nats."""
        return self._joined("binary_kl_T")

    @cached_property
    def log_odds_gap_T(self) -> Array:
        """log(π/(1 − π)) − log(μ/(1 − μ)), nats: how far this logit moved if no others did."""
        return self._joined("log_odds_gap_T")

    @cached_property
    def rest_rollout_T(self) -> Array:
        """1 − μ."""
        return self._joined("rest_rollout_T")

    @cached_property
    def rest_trainer_T(self) -> Array:
        """1 − π."""
        return self._joined("rest_trainer_T")

    @cached_property
    @silent
    def k3_T(self) -> Array:
        """φ(d), nats."""
        return self._joined("k3_T")

    def _joined(self, column: str) -> Array:
        """A column over all blocks; without a copy if there is only one."""
        columns = [getattr(block, column) for block in self._blocks]
        if len(columns) == 1:
            return columns[0]
        return namespace(columns[0]).concat(columns)


@dataclass(frozen=True)
class _Block:
    """Quantities of some successive tokens: d = log π − log μ, y the same of the complements."""

    difference_T: Array
    binary_kl_T: Array
    rest_rollout_T: Array
    rest_trainer_T: Array
    d_T: Array
    y_T: Array
    small_T: Array  # whether the series of φ(d) is exact enough
    series_T: Array

    @property
    def log_odds_gap_T(self) -> Array:
        return self.d_T - self.y_T

    @property
    def k3_T(self) -> Array:
        """φ(d), to be read once: it may overwrite the series."""
        return keep_or_compute(self.small_T, self.series_T, _plain_phi, self.d_T)


@silent
def compare_sampled_token(logp_rollout_T: Array, logp_trainer_T: Array) -> SampledToken:
    """Two policies compared on {sampled token, all others}, without cancellation or overflow. DPPO
    eq. 13 and 14.

    π − μ = ± max(μ, π) · (1 − e^−|d|), whose absolute value is the binary TV; KL(μ‖π) = μ·φ(d) + (1
    − μ)·φ(y) ≥ 0 in nats, with d = log π − log μ and y = log((1 − π)/(1 − μ)); the log-odds gap is
    d − y.
    """
    tokens = len(logp_rollout_T)
    # A dozen columns are computed one from the other, which in numpy is fastest in the cache.
    # Tensors are computed as one block.
    rows = _BLOCK_TOKENS if isinstance(logp_rollout_T, np.ndarray) else max(1, tokens)
    return SampledToken(
        [
            _compare_block(_wide(logp_rollout_T[block]), _wide(logp_trainer_T[block]))
            for block in blocks(tokens, rows)
        ]
    )


def _compare_block(logp_rollout_T: Array, logp_trainer_T: Array) -> _Block:
    d_T = logp_trainer_T - logp_rollout_T
    difference_T = _difference(logp_rollout_T, logp_trainer_T, d_T)
    rest_mu_T, rest_pi_T = _complement(logp_rollout_T), _complement(logp_trainer_T)
    y_T = _log_ratio(rest_mu_T, rest_pi_T, -difference_T)
    small_T = namespace(d_T).abs(d_T) < _SERIES_BELOW
    series_T = _phi_series(d_T)
    mu_T = _positive_probability(logp_rollout_T)
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
    columns = (logp_rollout_T, logp_trainer_T, topk_logp_rollout_TK, topk_logp_trainer_TK)
    tv_blocks, kl_blocks = list[Array](), list[Array]()
    for block in blocks(tokens, rows):
        rollout_T, trainer_T, rollout_TK, trainer_TK = (
            _wide(contiguous(column[block])) for column in columns
        )
        in_block_T = contiguous(in_topk_T[block])
        tv_T, kl_T = _topk_divergences(
            rollout_T, trainer_T, rollout_TK, trainer_TK, in_block_T, replace_last=replace_last
        )
        tv_blocks.append(tv_T)
        kl_blocks.append(kl_T)
    xp = namespace(logp_rollout_T)
    return xp.concat(tv_blocks), xp.concat(kl_blocks)


def _topk_divergences(
    logp_rollout_T: Array,
    logp_trainer_T: Array,
    topk_logp_rollout_TK: Array,
    topk_logp_trainer_TK: Array,
    in_topk_T: Array,
    *,
    replace_last: bool,
) -> tuple[Array, Array]:
    xp = namespace(logp_rollout_T)
    alone_T = ~in_topk_T  # the sampled token is a part of its own
    if replace_last:
        topk_logp_rollout_TK = copied(topk_logp_rollout_TK)
        topk_logp_rollout_TK[:, -1] = fill_where(topk_logp_rollout_TK[:, -1], alone_T, -inf)
    mu_TK = xp.exp(topk_logp_rollout_TK)
    mu_T = _positive_probability(logp_rollout_T) * alone_T
    d_TK = topk_logp_trainer_TK - topk_logp_rollout_TK
    # d of a rank without mass is ∞ or NaN, and would pass that on to the sums.
    # With d = 0 the rank adds nothing, and π's mass there counts among the others.
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
    mu_TV = xp.exp(logp_rollout_TV)
    # φ overflows only where μ underflows: there μ·φ is π, and 0 · ∞ would be NaN.
    outside_TV = mu_TV < float(xp.finfo(mu_TV.dtype).smallest_normal)
    d_TV = fill_where(logp_trainer_TV - logp_rollout_TV, outside_TV, 0.0)
    outside_mass_T = xp.sum(xp.exp(logp_trainer_TV) * outside_TV, axis=-1)
    return xp.sum(mu_TV * phi(d_TV), axis=-1) + outside_mass_T


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
    """φ(d) as e^d − 1 − d, for |d| where that does not cancel."""
    return namespace(d).expm1(d) - d


def _phi_series(d: Array) -> Array:
    """φ(d) for small |d|, by Horner's scheme; a new array."""
    first, *middle, highest = _SERIES[d.dtype.itemsize]
    # In place, since a dozen new columns would not stay in the cache
    series = d * highest
    for coefficient in reversed(middle):
        series += coefficient
        series *= d
    series += first
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
    """μ·φ(d) as (π − μ) − μ·d, for |d| where that does not cancel."""
    return change - mu * d


def _difference(logp_rollout: Array, logp_trainer: Array, d: Array) -> Array:
    """π − μ = ± max(μ, π) · (1 − e^−|d|), which neither cancels nor overflows."""
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
    """The term of all other tokens, whose mass is 1 − Σ; both masses clamped to its resolution."""
    xp = namespace(mu_T)
    resolution = 8 * float(xp.finfo(mu_T.dtype).eps)
    pi_T = clamp_min(mu_T + change_T, resolution)
    mu_T = clamp_min(mu_T, resolution)
    # Where a mass was clamped, the change of the unclamped ones no longer fits
    resolved_T = (mu_T > resolution) & (pi_T > resolution)
    change_T = xp.where(resolved_T, change_T, pi_T - mu_T)
    return _kl_term(mu_T, change_T, _log_ratio(mu_T, pi_T, change_T))


def _positive_probability(logp_T: Array) -> Array:
    """p of a sampled token; a tiny value if it underflows, so that p·(−∞) is not NaN."""
    xp = namespace(logp_T)
    return clamp_min(xp.exp(logp_T), float(xp.finfo(logp_T.dtype).smallest_normal))


def _wide(x: Array) -> Array:
    """Half precision as float32; wider floats as they are."""
    if x.dtype.itemsize in _SERIES:
        return x
    xp = namespace(x)
    return xp.astype(x, xp.float32)
