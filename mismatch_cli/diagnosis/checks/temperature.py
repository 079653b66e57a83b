"""A temperature that only one side applied: the trainer's distribution is the rollout's, sharpened or flattened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence
from mismatch_cli.diagnosis.finding import Finding
from mismatch_cli.diagnosis.grouped import slope_over_prompts
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "temperature", 3
TITLE = "Temperature on one side only"
CAUSE = (
    "The sampling temperature was applied to one side's logits and not to the other's, or the engine reported raw "
    "log-probabilities."
)
CHANGE = (
    "vLLM: --logprobs-mode processed_logprobs (SGLang ignores the temperature for prompt log-probs); divide the "
    "trainer's logits by the rollout's temperature."
)
SOURCE = "vime 64, TRL 4159, NeMo-RL 902, tinker-cloud PR 26 (fitted 0.70)"
_LEAST, _Z = 0.004, 6.0
_FEWEST = 200  # ids, or tokens
_DEEPEST = -12.0  # nats: rarer tokens say little and are rounded most
_MOST_LOG_ODDS, _NEARLY_CERTAIN = 7.0, -1e-12  # beyond, the odds are mostly rounding


def check(evidence: Evidence) -> Finding:
    """Fit π ∝ μ^β; β is the temperature of the rollout over that of the trainer, 1 where both are the same.

    With top-K log-probabilities β is the slope of log π on log μ among the ids of one token (their differences know no
    normaliser); else the slope of the log-odds of the sampled tokens.
    """
    fit = _from_topk(evidence.sample) or _from_log_odds(evidence.sample)
    if fit is None:
        return Finding(NAME, "untested", reason="too few tokens between certain and impossible")
    z = (fit.beta - 1) / fit.error if fit.error > 0 else 0.0
    rows = (
        ("fitted β = T of the rollout / T of the trainer", fit.beta),
        ("its standard error over prompts, of the fit alone", fit.error),
        ("fitted from", fit.source), ("temperature in the manifest", evidence.sampling.get("temperature", "not known")),
    )  # fmt: skip
    if not (abs(fit.beta - 1) > _LEAST and abs(z) > _Z):
        return Finding(NAME, "clear", fit.beta, "fitted β", evidence=rows)
    who = "flatter" if fit.beta > 1 else "sharper"
    sentence = f"The rollout's distribution is the trainer's at {fit.beta:.3g} times its temperature ({who} than it)."
    return Finding(NAME, "found", fit.beta, "fitted β", sentence, rows, left_N=fit.left_N)


@dataclass(frozen=True)
class _Fit:
    """β with its error, and the gap that is left where β was fitted on other prompts."""

    beta: float
    error: float
    left_N: np.ndarray
    source: str


def _from_topk(sample: Sample) -> _Fit | None:
    if sample.topk_logq_TK is None or sample.topk_logp_TK is None:
        return None
    q_NK = sample.topk_logq_TK[sample.kept].astype(np.float64)
    p_NK = sample.topk_logp_TK[sample.kept].astype(np.float64)
    with np.errstate(invalid="ignore"):
        usable_NK = np.isfinite(q_NK) & np.isfinite(p_NK) & (np.minimum(q_NK, p_NK) > _DEEPEST)
    usable_NK &= (usable_NK.sum(axis=1) >= 2)[:, None]
    group_M = np.repeat(sample.group_N[:, None], q_NK.shape[1], axis=1)[usable_NK]
    x_M, y_M = (_centred(v_NK, usable_NK)[usable_NK] for v_NK in (q_NK, p_NK))
    fitted = _slope(x_M, y_M, group_M)
    if fitted is None or len(x_M) < _FEWEST:
        return None
    left_N = np.empty(len(q_NK))
    for half in (0, 1):
        own_N, other_M = sample.group_N % 2 == half, group_M % 2 != half
        beta, _ = _slope(x_M[other_M], y_M[other_M], group_M[other_M]) or fitted
        logq_N = sample.logq_T[sample.kept][own_N]
        left_N[own_N] = sample.logp_T[sample.kept][own_N] - (beta * logq_N - _log_normaliser(q_NK[own_N], logq_N, beta))
    return _Fit(*fitted, left_N, f"top-{q_NK.shape[1]} log-probabilities")


def _log_normaliser(q_NK: np.ndarray, logq_N: np.ndarray, beta: float) -> np.ndarray:
    """log Σ μ^β: the recorded ranks, the sampled token where it is none of them, and the rest as ids half as probable
    as the last rank."""
    q_NK = np.where(np.isnan(q_NK), -np.inf, q_NK)
    last_N = q_NK.min(axis=1, initial=0.0, where=np.isfinite(q_NK))
    log_of_each_N = np.minimum(last_N, 0.0) - np.log(2.0)
    outside_N = logq_N < last_N - 1e-3
    known_N = np.exp(q_NK).sum(axis=1) + np.where(outside_N, np.exp(logq_N), 0.0)
    rest_N = np.maximum(1 - known_N, 0.0)
    powers_N = np.exp(beta * q_NK).sum(axis=1) + np.where(outside_N, np.exp(beta * logq_N), 0.0)
    return np.asarray(np.log(powers_N + rest_N * np.exp((beta - 1) * log_of_each_N)))


def _centred(v_NK: np.ndarray, usable_NK: np.ndarray) -> np.ndarray:
    mean_N1 = np.where(usable_NK, v_NK, 0).sum(axis=1, keepdims=True) / np.maximum(usable_NK.sum(axis=1), 1)[:, None]
    return np.where(usable_NK, v_NK - mean_N1, 0)


def _from_log_odds(sample: Sample) -> _Fit | None:
    """All other ids as one: exact for two, and a constant off in the log-odds where the rest is spread over several."""
    x_N, y_N = (_log_odds(logp_T[sample.kept]) for logp_T in (sample.logq_T, sample.logp_T))
    usable_N = np.maximum(np.abs(x_N), np.abs(y_N)) < _MOST_LOG_ODDS

    def fit(chosen_N: np.ndarray) -> tuple[tuple[float, float], float, float] | None:
        """The slope with its error, and the two means that the line goes through."""
        x_M, y_M = x_N[chosen_N], y_N[chosen_N]
        if len(x_M) < _FEWEST / 2:
            return None
        slope = _slope(x_M - x_M.mean(), y_M - y_M.mean(), sample.group_N[chosen_N])
        return slope and (slope, float(x_M.mean()), float(y_M.mean()))

    fitted = fit(usable_N)
    if fitted is None or usable_N.sum() < _FEWEST:
        return None
    left_N = sample.d_N.copy()
    for half in (0, 1):
        own_N = sample.group_N % 2 == half
        (beta, _), x_mean, y_mean = fit(usable_N & ~own_N) or fitted
        own_N &= usable_N
        predicted_N = -np.logaddexp(0, -(y_mean + beta * (x_N[own_N] - x_mean)))
        left_N[own_N] = sample.logp_T[sample.kept][own_N] - predicted_N
    return _Fit(*fitted[0], left_N, "the sampled tokens' log-odds, approximate")


def _log_odds(logp_N: np.ndarray) -> np.ndarray:
    return logp_N - np.log(-np.expm1(np.minimum(logp_N, _NEARLY_CERTAIN)))


def _slope(x_M: np.ndarray, y_M: np.ndarray, group_M: np.ndarray) -> tuple[float, float] | None:
    """The slope of y on x through the origin; errors on either side flatten it: the mean with that of x on y."""
    if len(x_M) < _FEWEST / 2:
        return None
    down, error = slope_over_prompts(x_M, y_M, group_M)
    up, _ = slope_over_prompts(y_M, x_M, group_M)
    return (float(np.sqrt(down / up)), error) if down > 0 and up > 0 else None
