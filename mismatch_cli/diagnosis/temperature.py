"""A temperature that only one side applied: the trainer's distribution is the rollout's, sharpened or flattened."""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis._evidence import Evidence
from mismatch_cli.diagnosis._finding import Finding
from mismatch_cli.diagnosis._grouped import slope_over_prompts
from mismatch_cli.diagnosis._sample import Sample

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
_LEAST, _Z, _EXPLAINS = 0.004, 6.0, 0.3
_DEEPEST = -12.0  # nats: rarer tokens say little and are rounded most


def check(evidence: Evidence) -> Finding:
    """Fit π ∝ μ^β; β is the temperature of the rollout over that of the trainer, 1 where both are the same.

    With top-K log-probabilities β is the slope of log π on log μ among the ids of one token (their differences know no
    normaliser); else d is fitted by (β − 1)(log μ + H), to first order, H the entropy. Explained is the part of Σ|d|
    that the fit takes away.
    """
    sample = evidence.sample
    found = _from_topk(sample) or _from_entropy(sample)
    if found is None:
        return Finding(NAME, "untested", reason="needs top-K log-probabilities of both sides, or the trainer's entropy")
    beta, error, surprise_N, how = found
    z = (beta - 1) / error if error > 0 else 0.0
    d_N = sample.d_N
    usable = np.isfinite(surprise_N)
    gain, _ = slope_over_prompts(surprise_N[usable], d_N[usable], sample.group_N[usable])
    before = np.abs(d_N[usable]).sum()
    explains = 1 - np.abs(d_N[usable] - gain * surprise_N[usable]).sum() / before if before else 0.0
    rows = (
        ("fitted β = T of the rollout / T of the trainer", beta), ("standard error over prompts", error),
        ("fitted from", how), ("temperature in the manifest", evidence.sampling.get("temperature", "not known")),
    )  # fmt: skip
    if not (abs(beta - 1) > _LEAST and abs(z) > _Z and explains > _EXPLAINS):
        return Finding(NAME, "clear", beta, "fitted β", evidence=rows)
    who = "flatter" if beta > 1 else "sharper"
    sentence = (
        f"The rollout's distribution is the trainer's at {beta:.3g} times its temperature ({who} than it): "
        "the temperature was applied on one side only."
    )
    return Finding(NAME, "found", beta, "fitted β", float(explains), sentence, rows)


_Fit = tuple[float, float, np.ndarray, str]


def _from_topk(sample: Sample) -> _Fit | None:
    if sample.topk_logq_TK is None or sample.topk_logp_TK is None:
        return None
    q_NK = sample.topk_logq_TK[sample.kept].astype(np.float64)
    p_NK = sample.topk_logp_TK[sample.kept].astype(np.float64)
    with np.errstate(invalid="ignore"):
        usable_NK = np.isfinite(q_NK) & np.isfinite(p_NK) & (np.minimum(q_NK, p_NK) > _DEEPEST)
    enough_N = usable_NK.sum(axis=1) >= 2
    if enough_N.sum() < 100:
        return None
    x_NK, y_NK = (_centred(v_NK, usable_NK) for v_NK in (q_NK, p_NK))
    columns = q_NK.shape[1]
    groups_NK = np.repeat(sample.group_N[:, None], columns, axis=1)
    chosen = usable_NK & enough_N[:, None]
    # errors on either side flatten the slope towards it: take the geometric mean of the slope and its inverse
    down, error = slope_over_prompts(x_NK[chosen], y_NK[chosen], groups_NK[chosen])
    up, _ = slope_over_prompts(y_NK[chosen], x_NK[chosen], groups_NK[chosen])
    if not (down > 0 and up > 0):
        return None
    seen_NK = np.where(np.isfinite(q_NK), q_NK, -np.inf)
    entropy_N = -(np.exp(seen_NK) * np.where(np.isfinite(seen_NK), seen_NK, 0)).sum(axis=1)
    return float(np.sqrt(down / up)), error, sample.logq_T[sample.kept] + entropy_N, f"top-{columns} log-probabilities"


def _centred(v_NK: np.ndarray, usable_NK: np.ndarray) -> np.ndarray:
    mean_N1 = np.where(usable_NK, v_NK, 0).sum(axis=1, keepdims=True) / np.maximum(usable_NK.sum(axis=1), 1)[:, None]
    return np.where(usable_NK, v_NK - mean_N1, 0)


def _from_entropy(sample: Sample) -> _Fit | None:
    if sample.entropy_T is None:
        return None
    surprise_N = sample.logq_T[sample.kept] + sample.entropy_T[sample.kept]
    usable = np.isfinite(surprise_N)
    slope, error = slope_over_prompts(surprise_N[usable], sample.d_N[usable], sample.group_N[usable])
    return 1 + slope, error, surprise_N, "the sampled tokens and the trainer's entropy"
