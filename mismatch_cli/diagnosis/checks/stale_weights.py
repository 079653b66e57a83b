"""The engine kept older weights: it agrees better with an earlier checkpoint than with the current one."""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.grouped import mean_over_prompts

NAME, STAGE = "stale-weights", 4
TITLE = "Stale weights"
CAUSE = "The weight sync reached the engine late, only partly or never, or an adapter was not loaded."
CHANGE = (
    "Reload the full state dict and reset the prefix cache after every update; with LoRA, merge before the sync or "
    "check that the engine lists the adapter."
)
SOURCE = "TRL 5312 (sleep mode: 0.010 to 0.201 at step 3), verl 7904, prime-rl PR 3543, SkyRL 1776"
_LESS, _Z = 0.8, 4.0


def check(evidence: Evidence) -> Finding:
    """Compare the gap to the earlier checkpoint with the gap to the current one, on the same tokens."""
    sample = evidence.sample
    if evidence.earlier_logp_T is None:
        return untested(NAME, "needs an earlier checkpoint", needs="--earlier-model MODEL")
    earlier_d_N = evidence.earlier_logp_T[sample.kept] - sample.logq_T[sample.kept]
    scored = np.isfinite(earlier_d_N)
    present_M, earlier_M, group_M = np.abs(sample.d_N[scored]), np.abs(earlier_d_N[scored]), sample.group_N[scored]
    gaps = (present_M, earlier_M, present_M - earlier_M)
    now, before, change = (mean_over_prompts(values_M, group_M) for values_M in gaps)
    factor, z = before.times(now), change.z_from(0.0)
    rows = (
        ("mean |Δlog p| to the current checkpoint, nats", now.value), ("to the earlier one, nats", before.value),
        ("tokens", now.count),
    )  # fmt: skip
    if not (factor < _LESS and z > _Z):
        return Finding(NAME, "clear", factor, "gap to the earlier / to the current", evidence=rows)
    left_N = np.where(scored, earlier_d_N, sample.d_N * factor)
    sentence = (
        f"The engine is closer to the earlier checkpoint: that gap is {factor:.2g} times the gap to the current one."
    )
    return Finding(NAME, "found", factor, "gap to the earlier / to the current", sentence, rows, left_N=left_N)
