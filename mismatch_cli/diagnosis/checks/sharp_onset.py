"""A gap that begins at one fixed position: a block size, a chunk, a sliding window."""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis.checks._profile import sharpest_jump
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested

NAME, STAGE = "sharp-onset", 5
TITLE = "A gap that begins at a fixed position"
CAUSE = "A kernel changes its path there: a block size, chunked prefill, a sliding window, a length limit."
CHANGE = (
    "Look which limit has this value (block size, max_num_batched_tokens, sliding_window, original_max_position_"
    "embeddings); try another attention backend and --enforce-eager."
)
SOURCE = "SGLang 25790 and flash-attention PR 184 (first mismatch at position 96), vLLM PR 38711"
_TIMES, _Z = 1.7, 5.0


def check(evidence: Evidence) -> Finding:
    """The sharpest rise between neighbouring positions: by a factor, and most of what the gap rises at all."""
    jump = sharpest_jump(evidence.sample)
    if jump is None:
        return untested(NAME, "too few tokens")
    factor, z = jump.after.times(jump.before), jump.after.z_of_log_ratio(jump.before)
    rows = (
        (f"position, counted in the {jump.axis}", jump.index), ("typical gaps before", jump.before.value),
        ("from there on", jump.after.value), ("z", z),
        ("part of it within 8 positions", jump.sharpness), ("that rise in standard deviations", jump.size),
    )  # fmt: skip
    if not (factor > _TIMES and z > _Z and jump.sharp):
        return Finding(NAME, "clear", factor, "times from one position on", evidence=rows)
    sentence = f"From position {jump.index} of the {jump.axis} on the gap is {factor:.3g} times what it was before."
    after_N = evidence.sample.axis_N(jump.axis) >= jump.index
    left_N = np.where(after_N, evidence.sample.d_N / factor, evidence.sample.d_N)
    return Finding(NAME, "found", factor, "times from one position on", sentence, rows, left_N=left_N)
