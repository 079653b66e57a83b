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
_LEAST, _Z, _EXPLAINS = 0.004, 6.0, 0.12
_FEWEST = 100  # tokens
_DEEPEST = -12.0  # nats: rarer tokens say little and are rounded most


def check(evidence: Evidence) -> Finding:
    """Fit π ∝ μ^β; β is the temperature of the rollout over that of the trainer, 1 where both are the same.

    With top-K log-probabilities β is the slope of log π on log μ among the ids of one token (their differences know no
    normaliser); else d is fitted by (β − 1)(log μ + H), to first order, H the entropy. Explained is the part of the
    absolute gap, of the ids or of the tokens, that the fit takes away.
    """
    fit = _from_topk(evidence.sample) or _from_entropy(evidence.sample)
    if fit is None:
        return Finding(NAME, "untested", reason="needs top-K log-probabilities of both sides, or the trainer's entropy")
    z = (fit.beta - 1) / fit.error if fit.error > 0 else 0.0
    rows = (
        ("fitted β = T of the rollout / T of the trainer", fit.beta), ("standard error over prompts", fit.error),
        ("fitted from", fit.source), ("temperature in the manifest", evidence.sampling.get("temperature", "not known")),
    )  # fmt: skip
    if not (abs(fit.beta - 1) > _LEAST and abs(z) > _Z and fit.explains > _EXPLAINS):
        return Finding(NAME, "clear", fit.beta, "fitted β", evidence=rows)
    who = "flatter" if fit.beta > 1 else "sharper"
    sentence = f"The rollout's distribution is the trainer's at {fit.beta:.3g} times its temperature ({who} than it)."
    return Finding(NAME, "found", fit.beta, "fitted β", fit.explains, sentence, rows)


@dataclass(frozen=True)
class _Fit:
    beta: float
    error: float
    explains: float
    source: str


def _from_topk(sample: Sample) -> _Fit | None:
    if sample.topk_logq_TK is None or sample.topk_logp_TK is None:
        return None
    q_NK = sample.topk_logq_TK[sample.kept].astype(np.float64)
    p_NK = sample.topk_logp_TK[sample.kept].astype(np.float64)
    with np.errstate(invalid="ignore"):
        usable_NK = np.isfinite(q_NK) & np.isfinite(p_NK) & (np.minimum(q_NK, p_NK) > _DEEPEST)
    usable_NK &= (usable_NK.sum(axis=1) >= 2)[:, None]
    if usable_NK.any(axis=1).sum() < _FEWEST:
        return None
    x_M, y_M = (_centred(v_NK, usable_NK)[usable_NK] for v_NK in (q_NK, p_NK))
    group_M = np.repeat(sample.group_N[:, None], q_NK.shape[1], axis=1)[usable_NK]
    # errors on either side flatten the slope towards it: take the geometric mean of the slope and its inverse
    down, error = slope_over_prompts(x_M, y_M, group_M)
    up, _ = slope_over_prompts(y_M, x_M, group_M)
    if not (down > 0 and up > 0):
        return None
    beta = float(np.sqrt(down / up))
    return _Fit(beta, error, _taken_away(y_M - x_M, y_M - beta * x_M), f"top-{q_NK.shape[1]} log-probabilities")


def _centred(v_NK: np.ndarray, usable_NK: np.ndarray) -> np.ndarray:
    mean_N1 = np.where(usable_NK, v_NK, 0).sum(axis=1, keepdims=True) / np.maximum(usable_NK.sum(axis=1), 1)[:, None]
    return np.where(usable_NK, v_NK - mean_N1, 0)


def _from_entropy(sample: Sample) -> _Fit | None:
    if sample.entropy_T is None:
        return None
    surprise_N = sample.logq_T[sample.kept] + sample.entropy_T[sample.kept]
    usable = np.isfinite(surprise_N)
    if usable.sum() < _FEWEST:
        return None
    x_M, d_M = surprise_N[usable], sample.d_N[usable]
    slope, error = slope_over_prompts(x_M, d_M, sample.group_N[usable])
    return _Fit(1 + slope, error, _taken_away(d_M, d_M - slope * x_M), "the sampled tokens and the trainer's entropy")


def _taken_away(before_M: np.ndarray, after_M: np.ndarray) -> float:
    total = float(np.abs(before_M).sum())
    return 1 - float(np.abs(after_M).sum()) / total if total else 0.0
