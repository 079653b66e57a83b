"""The engine kept older weights: it agrees better with an earlier checkpoint than with the
current one.
"""

from typing import NamedTuple

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.grouped import Mean, mean_over_prompts
from mismatch_cli.diagnosis.model import rounded_to
from mismatch_cli.torch_settings import sends_rounded

NAME, STAGE = "stale-weights", 4
TITLE = "Stale weights"
CAUSE = (
    "The weight sync reached the engine late, only partly or never, or an adapter was not loaded."
)
CHANGE = (
    "Reload the full state dict and reset the prefix cache after every update; with LoRA, merge "
    "before the sync or check that the engine lists the adapter."
)
SOURCE = "TRL 5312 (sleep mode: 0.010 to 0.201 at step 3), verl 7904, prime-rl PR 3543, SkyRL 1776"
_LESS, _Z = 0.8, 4.0
_AS_WELL = 1.1  # times: rounded weights explain the gap as well


def check(evidence: Evidence) -> Finding:
    """Compare the gap to the earlier checkpoint with the gap to the current one, on the same
    tokens.
    """
    if evidence.earlier_logp_T is None:
        return untested(NAME, "needs an earlier checkpoint", needs="--earlier-model MODEL")
    result = compared(evidence, evidence.earlier_logp_T)
    rows: tuple[Row, ...] = (
        ("mean |Δlog p| to the current checkpoint, nats", result.now.value),
        ("to the earlier one, nats", result.other.value), ("tokens", result.now.count),
    )  # fmt: skip
    measure = "gap to the earlier / to the current"
    sentence = (
        f"The engine is closer to the earlier checkpoint: that gap is {result.factor:.2g} times "
        "the gap to the current one."
    )
    dtype = narrower(evidence)
    if dtype is not None and evidence.model is not None:
        # Rounded to the engine's dtype, new weights may hardly differ from the earlier ones: the
        # sync was right.
        rounded = compared(evidence, evidence.model.logp_T(rounded_to(dtype)))
        rows = (*rows, (f"to the current one in {dtype}, nats", rounded.other.value))
        if rounded.fits and rounded.factor <= _AS_WELL * result.factor:
            reason = f"the current checkpoint in {dtype} fits as well: see rounded-weights"
            return Finding(NAME, "clear", result.factor, measure, evidence=rows, reason=reason)
    elif dtype is not None:
        sentence += (
            f" It may still have the new weights, if rounding to {dtype} swallowed the step: "
            "--trainer-model tells the two apart."
        )
    return finding_of(NAME, evidence, result, measure, rows, sentence)


class Compared(NamedTuple):
    """Mean |Δlog p| to the recorded trainer and to other weights, on the tokens that the latter
    scored.
    """

    now: Mean
    other: Mean
    factor: float  # other / now
    fits: bool  # the other weights fit clearly better
    d_N: np.ndarray  # log π − log μ at the other weights


def compared(evidence: Evidence, other_logp_T: np.ndarray) -> Compared:
    """The engine's gap to other weights, beside its gap to the recorded trainer."""
    sample = evidence.sample
    other_d_N = other_logp_T[sample.kept] - sample.logq_T[sample.kept]
    scored = np.isfinite(other_d_N)
    present_M, other_M, group_M = (
        np.abs(sample.d_N[scored]),
        np.abs(other_d_N[scored]),
        sample.group_N[scored],
    )
    gaps = (present_M, other_M, present_M - other_M)
    now, other, change = (mean_over_prompts(values_M, group_M) for values_M in gaps)
    factor = other.times(now)
    return Compared(now, other, factor, bool(factor < _LESS and change.z_from(0.0) > _Z), other_d_N)


def finding_of(
    name: str,
    evidence: Evidence,
    result: Compared,
    measure: str,
    rows: tuple[Row, ...],
    sentence: str,
) -> Finding:
    """Found if the other weights fit clearly better; tokens that they did not score shrink by
    the same factor.
    """
    if not result.fits:
        return Finding(name, "clear", result.factor, measure, evidence=rows)
    left_N = np.where(np.isfinite(result.d_N), result.d_N, evidence.sample.d_N * result.factor)
    return Finding(name, "found", result.factor, measure, sentence, rows, left_N=left_N)


def narrower(evidence: Evidence) -> str | None:
    """The engine's dtype, if the manifest says that it has 16 bits and the trainer float32."""
    engine, trainer = (evidence.about.get(side, {}).get("dtype") for side in ("rollout", "trainer"))
    return engine if sends_rounded(trainer, engine) else None
