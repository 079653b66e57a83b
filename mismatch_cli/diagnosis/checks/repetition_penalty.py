"""A penalty on tokens that are already in the context, which only one side applied to its
logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.checks.temperature import (
    DEEPEST,
    FEWEST,
    beyond,
    centred,
    log_odds,
    ranks_of,
)
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import slope_over_prompts
from mismatch_cli.diagnosis.power import clear, no_power
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "repetition-penalty", 3
TITLE = "A repetition penalty on one side only"
CAUSE = (
    "The sampler lowered the logits of tokens that had occurred before (repetition, presence or "
    "frequency penalty, often from the model's generation_config), and the other side did not."
)
CHANGE = (
    "Send repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0 with every "
    "request: vLLM takes missing settings from the model's generation_config (unless "
    "--generation-config vllm)."
)
SOURCE = "verl 7270 (a checkpoint's 1.05 in rollouts only), prime-rl PR 886"
_LEAST, _Z, _EXPLAINS = 0.01, 6.0, 0.2  # nats, standard errors, of the gap


def check(evidence: Evidence) -> Finding:
    """Compare log π − log μ on tokens that are in the context with that on others, at the same log
    μ.

    Among the top-K ids of one token (whose differences are free of the normaliser), else in sampled
    tokens' log-odds.
    """
    fit = from_topk(evidence.sample) or from_log_odds(evidence.sample)
    if fit is None:
        reason = "too few tokens that are already in the context, or too few that are not"
        return untested(NAME, reason)
    z = fit.nats / fit.error if fit.error > 0 else 0.0
    rows = (
        ("π over μ on tokens seen before, relative to others, nats", fit.nats),
        ("its standard error over prompts", fit.error), ("fitted from", fit.source),
    )  # fmt: skip
    measure = "nats on tokens seen before"
    explains = 1 - np.abs(fit.left_N).sum() / np.abs(evidence.sample.d_N).sum()
    if not (abs(fit.nats) > _LEAST and abs(z) > _Z and explains > _EXPLAINS):
        return clear(NAME, fit.nats, measure, _power(fit), rows)
    side = "rollout" if fit.nats > 0 else "trainer"
    sentence = (
        f"The {side} gives tokens that are already in the context {abs(fit.nats):.3g} nats less "
        "than the other side, relative to tokens that are not."
    )
    return Finding(NAME, "found", fit.nats, measure, sentence, rows, left_N=fit.left_N)


def _power(fit: PenaltyFit) -> str:
    """The penalty that would have been found, if it makes a fifth of the gap."""
    least = max(_LEAST, _Z * fit.error)
    return f"≥ {least:.2g} nats" if np.isfinite(least) else no_power("too few prompts")


@dataclass(frozen=True)
class PenaltyFit:
    """The contrast with its error, and the gap left by a fit on the other prompts."""

    nats: float
    error: float
    left_N: np.ndarray
    source: str


@dataclass(frozen=True)
class _Ranks:
    """The top-K ids of the tokens that count; `usable` where both sides have values."""

    q_NK: np.ndarray  # log μ; −inf where unknown
    d_NK: np.ndarray  # log π − log μ; 0 where not usable
    seen_NK: np.ndarray  # 1.0 where the id is in the context
    usable_NK: np.ndarray

    def of_tokens(self, chosen_N: np.ndarray) -> _Ranks:
        return _Ranks(
            self.q_NK[chosen_N],
            self.d_NK[chosen_N],
            self.seen_NK[chosen_N],
            self.usable_NK[chosen_N],
        )

    def centred_M(self, value_NK: np.ndarray) -> np.ndarray:
        """The usable ids' values, each less their mean over the ids of its token, laid flat."""
        return centred(value_NK, self.usable_NK)[self.usable_NK]

    @property
    def seen_q_NK(self) -> np.ndarray:
        """log μ of the ids that are in the context, 0 for others."""
        return np.where(self.usable_NK, self.seen_NK * np.maximum(self.q_NK, DEEPEST), 0)


def from_topk(sample: Sample) -> PenaltyFit | None:
    """The slope of the ids' log π − log μ on whether they were seen, with log μ regressed out of
    both.
    """
    ranks = _ranks(sample)
    if ranks is None or sample.seen_T is None:
        return None
    seen_M = ranks.centred_M(ranks.seen_NK)
    if (np.abs(seen_M) > 0).sum() < FEWEST:
        return None
    q_M, d_M = ranks.centred_M(np.maximum(ranks.q_NK, DEEPEST)), ranks.centred_M(ranks.d_NK)
    token_M, _ = np.nonzero(ranks.usable_NK)
    nats, error = _contrast(seen_M, q_M, d_M, sample.group_N[token_M])
    seen_N = sample.seen_T[sample.index_N]
    left_N = sample.d_N.copy()
    for half in (0, 1):
        own_N = sample.half_N == half
        shift, slope = _fit_shift(ranks.of_tokens(~own_N))
        own = ranks.of_tokens(own_N)
        left_N[own_N] -= _predict_gap(own, sample.logq_N[own_N], seen_N[own_N], shift, slope)
    return PenaltyFit(nats, error, left_N, f"top-{ranks.q_NK.shape[1]} log-probabilities")


def _ranks(sample: Sample) -> _Ranks | None:
    """The ranks, if both sides have them and it is known which are in the context."""
    both_sides = ranks_of(sample)
    if both_sides is None or sample.topk_seen_TK is None:
        return None
    q_NK, p_NK, usable_NK = both_sides
    with np.errstate(invalid="ignore"):
        d_NK = np.where(usable_NK, p_NK - q_NK, 0)
    seen_NK = sample.topk_seen_TK[sample.index_N].astype(np.float64)
    return _Ranks(np.where(np.isnan(q_NK), -np.inf, q_NK), d_NK, seen_NK, usable_NK)


def _fit_shift(ranks: _Ranks) -> tuple[float, float]:
    """The extra log π − log μ of seen ids: a constant, and a slope on log μ (a penalty scales
    the logit).
    """
    columns = [ranks.centred_M(ranks.seen_NK), ranks.centred_M(ranks.seen_q_NK)]
    d_M = ranks.centred_M(ranks.d_NK)
    (shift, slope), *_ = np.linalg.lstsq(np.stack(columns, axis=1), d_M, rcond=None)
    return shift, slope


def _predict_gap(
    ranks: _Ranks, logq_N: np.ndarray, seen_N: np.ndarray, shift: float, slope: float
) -> np.ndarray:
    """log π − log μ of the sampled tokens, predicted from the other ids of their position and
    the normaliser.
    """
    # The sampled token itself is what is predicted
    others_NK = ranks.usable_NK & (np.abs(ranks.q_NK - logq_N[:, None]) > _SAME)
    x_NK = centred(ranks.seen_NK, others_NK)
    y_NK = centred(ranks.d_NK - slope * ranks.seen_q_NK, others_NK)
    shift_N = ((x_NK * y_NK).sum(axis=1) + _PRIOR * shift) / ((x_NK * x_NK).sum(axis=1) + _PRIOR)
    moved_NK = (shift_N[:, None] + slope * np.maximum(ranks.q_NK, DEEPEST)) * ranks.seen_NK
    mass_N = (np.exp(ranks.q_NK) * np.expm1(moved_NK)).sum(axis=1)
    log_sum_N = np.log1p(np.maximum(mass_N, _LEAST_MASS - 1))
    return np.asarray((shift_N + slope * np.maximum(logq_N, DEEPEST)) * seen_N - log_sum_N)


_LEAST_MASS = 1e-6
_SAME = 1e-6  # nats: the rank of the sampled id
# Weight of the overall shift, in seen ids paired with unseen ones, against a position's own ids
_PRIOR = 0.5


def _contrast(
    x_M: np.ndarray, q_M: np.ndarray, y_M: np.ndarray, group_M: np.ndarray
) -> tuple[float, float]:
    """The slope of y on x, with q regressed out of both, and its standard error."""
    total = float((q_M * q_M).sum())
    if total > 0:
        x_M = x_M - q_M * float((x_M * q_M).sum()) / total
        y_M = y_M - q_M * float((y_M * q_M).sum()) / total
    return slope_over_prompts(x_M, y_M, group_M)


def from_log_odds(sample: Sample) -> PenaltyFit | None:
    """The contrast of the sampled tokens' log-odds, which move by zero up to the whole penalty,
    depending on how much of the rest was seen: what is between the two is not a gap.

    A penalty explains far more of the gap than its mirror image, else the contrast is 0: noise fits
    both.
    """
    if sample.seen_T is None:
        return None
    x_N, y_N, usable_N = log_odds(sample)
    gap_N, seen_N = y_N - x_N, sample.seen_T[sample.index_N]
    penalised_N = usable_N & seen_N
    if min(penalised_N.sum(), (usable_N & ~seen_N).sum()) < FEWEST:
        return None
    seen_M = seen_N[usable_N].astype(np.float64)
    x_M, gap_M = x_N[usable_N], gap_N[usable_N]
    nats, error = _contrast(
        seen_M - seen_M.mean(),
        x_M - x_M.mean(),
        gap_M - gap_M.mean(),
        sample.group_N[usable_N],
    )
    sign = 1.0 if nats > 0 else -1.0
    penalty_N = _penalty_N(sample, sign * gap_N, penalised_N)
    left_N = _beyond(sample, x_N, seen_N, sign * penalty_N)
    mirrored_N = _beyond(sample, x_N, seen_N, -sign * penalty_N)
    tells = (np.abs(mirrored_N).sum() - np.abs(left_N).sum()) / np.abs(sample.d_N).sum()
    source = "the sampled tokens' log-odds, approximate"
    return PenaltyFit(nats if tells > _TELLS else 0.0, error, left_N, source)


_MOST = 0.9  # quantile of the seen tokens' moves that is taken as the penalty
_TELLS = 0.5  # of the gap that a penalty explains and its mirror image does not


def _penalty_N(sample: Sample, move_N: np.ndarray, penalised_N: np.ndarray) -> np.ndarray:
    """The penalty that moves penalised tokens of the other prompts by up to these nats."""
    penalty_N = np.zeros(len(move_N))
    for half in (0, 1):
        own_N = sample.half_N == half
        moves = move_N[penalised_N & ~own_N]
        if len(moves):
            penalty_N[own_N] = max(float(np.quantile(moves, _MOST)), 0.0)
    return penalty_N


def _beyond(
    sample: Sample, x_N: np.ndarray, seen_N: np.ndarray, penalty_N: np.ndarray
) -> np.ndarray:
    """log π − log μ, nats, beyond what moving seen tokens' log-odds by up to a penalty, and
    others' down, explains.
    """
    moved_N = x_N + np.where(seen_N, penalty_N, -penalty_N)
    return beyond(sample, [-np.logaddexp(0, -x_N), -np.logaddexp(0, -moved_N)])
