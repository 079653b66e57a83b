"""Logits, or log-probabilities, that one side rounded to low precision and the other did not."""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis._evidence import Evidence
from mismatch_cli.diagnosis._finding import Finding, untested

NAME, STAGE = "lm-head", 5
TITLE = "Precision of the LM head"
CAUSE = "One side forms its logits (or stores its log-probabilities) in bfloat16, the other one in float32."
CHANGE = (
    "Use the same precision on both sides; a float32 head on both is best (NeMo-RL: float32 logits; vLLM: "
    "--hf-overrides head_dtype float32; probe: --float32-head). On one side only it can make the gap larger."
)
SOURCE = "NeMo-RL PR 3936, TRL PR 4303 (ScaleRL), vLLM PR 24567, arXiv 2506.13585 (MiniMax-M1)"
_SPACING = 2.0**-8  # nats: bfloat16 logits of at least 1/2 differ by multiples of it
_TOLERANCE = 4e-6  # nats: float32 log-probabilities down to −16 are this exact
_MOSTLY, _HARDLY = 0.6, 0.2
_ROUNDED_BITS = np.uint32(0xFFFF)  # of a float32, that a bfloat16 has not


def check(evidence: Evidence) -> Finding:
    """Per side: do log-probabilities of one position differ by multiples of a bfloat16 step, or end in zero bits?"""
    sample = evidence.sample
    sides = {"rollout": (sample.logq_T, sample.topk_logq_TK), "trainer": (sample.logp_T, sample.topk_logp_TK)}
    rows: list[tuple[str, float | int | str | None]] = []
    rounded: dict[str, bool | None] = {}
    for side, (logp_T, topk_TK) in sides.items():
        stored = _share_stored_in_bfloat16(logp_T[sample.kept])
        on_grid = None if topk_TK is None else _share_on_grid(topk_TK[sample.kept], evidence.temperature)
        rows.append((f"{side}: share of log-probabilities that are bfloat16 numbers", stored))
        if on_grid is not None:
            rows.append((f"{side}: share of logit differences on the bfloat16 grid", on_grid))
        share = max(stored, on_grid or 0.0)
        rounded[side] = True if share > _MOSTLY else False if on_grid is not None and share < _HARDLY else None
    if set(rounded.values()) == {True, False}:
        side = next(side for side, is_rounded in rounded.items() if is_rounded)
        other = "trainer" if side == "rollout" else "rollout"
        sentence = f"The {side}'s logits are rounded to bfloat16 steps, the {other}'s are not."
        return Finding(NAME, "found", 1.0, "sides rounded", None, sentence, tuple(rows))
    if None in rounded.values() and True not in rounded.values():
        return untested(NAME, "needs top-K log-probabilities of both sides")
    both = sum(value is True for value in rounded.values())
    return Finding(NAME, "clear", float(both), "sides rounded", evidence=tuple(rows))


def _share_on_grid(logp_NK: np.ndarray, temperature: float) -> float | None:
    """Of the differences between neighbouring ranks, in logits: those that are multiples of the step."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.diff(logp_NK.astype(np.float64), axis=1)) * temperature
        deep = logp_NK[:, 1:] < -16
    difference = difference[np.isfinite(difference) & ~deep & (difference > _SPACING / 2)]
    if len(difference) < 200:
        return None
    steps = difference / _SPACING
    return float((np.abs(steps - np.round(steps)) * _SPACING < _TOLERANCE * max(1.0, temperature)).mean())


def _share_stored_in_bfloat16(logp_N: np.ndarray) -> float:
    values = logp_N[logp_N < -1e-3].astype(np.float32)  # an exact 0 is a number of any precision
    return float(((values.view(np.uint32) & _ROUNDED_BITS) == 0).mean()) if len(values) else 0.0
