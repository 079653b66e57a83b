"""Logits or log-probabilities that only one side rounded to low precision."""

from collections.abc import Sequence

import numpy as np

from mismatch_cli.diagnosis.checks import log_base, temperature
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.power import clear, percent
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "lm-head", 6
NEEDS_A_GAP = False  # one side is rounded whether or not it shows
EXACT = True
TITLE = "Precision of the LM head"
CAUSE = (
    "One side computes its logits (or stores its log-probabilities) in bfloat16, the other in "
    "float32."
)
CHANGE = (
    "Use the same precision on both sides; a float32 head on both is best (NeMo-RL: float32 "
    "logits; vLLM: --hf-overrides head_dtype float32; probe: --float32-head). On one side only, "
    "it made the gap larger on one model and smaller on another."
)
SOURCE = "NeMo-RL PR 3936, TRL PR 4303 (ScaleRL), vLLM PR 24567, arXiv 2506.13585 (MiniMax-M1)"
_MOSTLY, _HARDLY = 0.6, 0.2
_FEWEST = 200  # values
_CERTAIN = -1e-3  # nats: an exact 0 fits any precision
# Of the fitted β: more than this stretches the grid of one side's logits
_OTHER_TEMPERATURE = 0.002
_ROUNDED_BITS = np.uint32(0xFFFF)  # bits of a float32 that a bfloat16 lacks


def check(evidence: Evidence) -> Finding:
    """Check, per side, whether log-probabilities end in zero bits or differ by multiples of a
    bfloat16 step.

    Rounded logits on both sides are bfloat16 noise, not a finding; on one side only they are.
    """
    sample, scale = evidence.sample, evidence.scale
    stored = {
        "rollout": _share_stored_in_bfloat16(sample.logq_N),
        "trainer": _share_stored_in_bfloat16(sample.logp_N),
    }
    on_grid = {"rollout": scale.reference.share_on_grid, "trainer": scale.current.share_on_grid}
    rows: list[Row] = []
    for side, share in stored.items():
        rows.append((f"{side}: share of log-probabilities that are bfloat16 numbers", share))
    for side, share_on_grid in on_grid.items():
        rows.append((f"{side}: share of tokens whose logits are on a grid", share_on_grid))
    rounded = [side for side, share in stored.items() if share > _MOSTLY]
    if rounded:
        return _stored_finding(sample, rounded, max(stored.values()), tuple(rows))
    finding = _grid_finding(on_grid["rollout"], on_grid["trainer"], tuple(rows))
    stretched = _why_a_grid_is_stretched(evidence) if finding.status == "found" else ""
    return untested(NAME, stretched) if stretched else finding


def _why_a_grid_is_stretched(evidence: Evidence) -> str:
    """Another base or another temperature hides one side's grid; empty if neither is likely."""
    if log_base.NAME in evidence.undone:
        return f"the bases differ: fix “{log_base.TITLE}” first"
    fit = temperature.check(evidence)
    beta = fit.effect or 1.0
    if abs(beta - 1) <= _OTHER_TEMPERATURE:
        return ""
    if fit.status == "found":
        return f"the temperatures differ: fix “{temperature.TITLE}” first"
    return f"a slope of {beta:.3f} between the sides may stretch one side’s grid"


def _stored_finding(
    sample: Sample, sides: Sequence[str], share: float, rows: tuple[Row, ...]
) -> Finding:
    """Found: the log-probabilities of these sides are bfloat16 numbers."""
    sentence = f"The log-probabilities of the {' and the '.join(sides)} were stored in bfloat16."
    measure, left_N = "share of rounded values", left_by_rounding(sample, sides)
    return Finding(NAME, "found", share, measure, sentence, rows, left_N=left_N)


def _grid_finding(rollout: float | None, trainer: float | None, rows: tuple[Row, ...]) -> Finding:
    """Whether the logits of one side alone are on a grid, by each side's share of such tokens."""
    if rollout is None or trainer is None:
        return untested(NAME, "needs top-K log-probabilities of both sides")
    low, high = sorted((rollout, trainer))
    if high > _MOSTLY and low < _HARDLY:
        side, other = ("rollout", "trainer") if rollout > trainer else ("trainer", "rollout")
        sentence = f"The {side}'s logits are rounded to bfloat16 steps; the {other}'s are not."
        return Finding(NAME, "found", high, "share on the grid, one side", sentence, rows)
    power = (
        f"≥ {percent(_MOSTLY)} of one side’s tokens on a grid, ≤ {percent(_HARDLY)} of the other’s"
    )
    return clear(NAME, low, "share on the grid, both sides", power, rows)


def left_by_rounding(sample: Sample, sides: Sequence[str]) -> np.ndarray | None:
    """log π − log μ with the other side rounded too; None if that does not reduce it."""
    if len(sides) > 1:
        return None
    logq_N, logp_N = sample.logq_N, sample.logp_N
    if sides[0] == "rollout":
        logp_N = as_rounded(logp_N)
    else:
        logq_N = as_rounded(logq_N)
    left_N = logp_N - logq_N
    return left_N if np.abs(left_N).sum() < np.abs(sample.d_N).sum() else None


def as_rounded(logp_N: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, halves rounded to even."""
    bits = logp_N.astype(np.float32).view(np.uint32)
    # Adding just below half a step carries into the last bit that stays; one more if that is odd
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + is_odd) & ~_ROUNDED_BITS
    return rounded.view(np.float32).astype(np.float64)


def _share_stored_in_bfloat16(logp_N: np.ndarray) -> float:
    """The share of a side's values that are bfloat16 numbers; 0 for too few uncertain ones."""
    values = logp_N[logp_N < _CERTAIN].astype(np.float32)
    if len(values) < _FEWEST:
        return 0.0
    return float(((values.view(np.uint32) & _ROUNDED_BITS) == 0).mean())
