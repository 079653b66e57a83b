"""A gap that starts at one fixed position: a block size, a chunk, a sliding window."""

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from mismatch_cli.diagnosis.power import clear, times_of
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "sharp-onset", 5
TITLE = "A gap that begins at a fixed position"
CAUSE = (
    "A kernel changes its code path there: a block size, chunked prefill, a sliding window, a "
    "length limit."
)
CHANGE = (
    "Find the limit with this value (block size, max_num_batched_tokens, sliding_window, "
    "original_max_position_embeddings); try another attention backend and --enforce-eager."
)
SOURCE = "SGLang 25790 and flash-attention PR 184 (first mismatch at position 96), vLLM PR 38711"
_TIMES, _Z = 1.7, 5.0
_LEAST_TOKENS, _LEAST_ON_A_SIDE = 400, 50
_WINDOW = 8  # positions on either side of a jump
# Sharpness and size: one may be a little lower if the other is higher
_SHARP = ((0.6, 0.6), (0.8, 0.55))
_PERHAPS = 0.4  # size of a rise that may be a jump


def check(evidence: Evidence) -> Finding:
    """Find the sharpest rise between neighbouring positions: by a large factor, and most of the
    gap's total rise.
    """
    jump = sharpest_jump(evidence.sample)
    if jump is None:
        return untested(NAME, "too few tokens")
    factor, z = jump.after.times(jump.before), jump.after.z_of_log_ratio(jump.before)
    rows = (
        (f"position, counted in the {jump.axis}", jump.index),
        ("typical gaps before", jump.before.value),
        ("from there on", jump.after.value), ("z", z),
        ("share of the rise within 8 positions", jump.sharpness),
        ("that share in standard deviations", jump.size),
    )  # fmt: skip
    if not (factor > _TIMES and z > _Z and jump.sharp):
        power = times_of(_TIMES, _Z, jump.after, jump.before)
        return clear(NAME, factor, "times from one position on", power, rows)
    sentence = (
        f"From position {jump.index} of the {jump.axis} on, the gap is {factor:.3g} times that "
        "before."
    )
    after_N = evidence.sample.axis_N(jump.axis) >= jump.index
    left_N = np.where(after_N, evidence.sample.d_N / factor, evidence.sample.d_N)
    return Finding(
        NAME, "found", factor, "times from one position on", sentence, rows, left_N=left_N
    )


@dataclass(frozen=True)
class Jump:
    """The position at which the gap changes most sharply."""

    index: int
    axis: str  # "response" or "context": counted from the response's or the prompt's first token
    before: Mean  # of all tokens before it
    after: Mean
    # The log change within 8 positions, as a share of that between everything before and after
    sharpness: float
    size: float  # the change within 8 positions in standard deviations of a token
    z: float  # the same in standard errors

    @property
    def sharp(self) -> bool:
        """Whether the gap jumps there rather than rising along the response."""
        return self.z > _Z and any(
            self.sharpness > sharpness and self.size > size for sharpness, size in _SHARP
        )

    @property
    def perhaps(self) -> bool:
        """Whether it may be a jump, so that it is not reported as a steady rise."""
        return self.sharp or (
            self.z > _Z and self.sharpness > _SHARP[0][0] and self.size > _PERHAPS
        )


def sharpest_jump(sample: Sample) -> Jump | None:
    """The most significant rise between neighbouring windows of positions in the response or in
    the whole context.
    """
    jumps = [
        jump for axis in ("response", "context") if (jump := jump_on(sample, axis)) is not None
    ]
    return max(jumps, key=lambda jump: jump.z, default=None)


def jump_on(sample: Sample, axis: str) -> Jump | None:
    position_N = sample.axis_N(axis)
    if len(position_N) < _LEAST_TOKENS or position_N.max() <= 2 * _WINDOW:
        return None
    sums = [
        np.bincount(position_N, weights=w)
        for w in (np.ones(len(position_N)), sample.u_N, sample.u_N**2)
    ]
    before, after = _windows(np.array([np.concatenate([[0], np.cumsum(s)]) for s in sums]))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_b, mean_a = before[1] / before[0], after[1] / after[0]
        variance_b, variance_a = before[2] / before[0] - mean_b**2, after[2] / after[0] - mean_a**2
        z_I = (mean_a - mean_b) / np.sqrt(variance_b / before[0] + variance_a / after[0])
        size_I = (mean_a - mean_b) / np.sqrt((variance_a + variance_b) / 2)
    z_I[(np.minimum(before[0], after[0]) < _LEAST_ON_A_SIDE) | ~np.isfinite(z_I)] = -np.inf
    at = int(np.argmax(z_I))
    if z_I[at] == -np.inf:
        return None
    index = at + _WINDOW
    later_N = position_N >= index
    all_before, all_after = (
        mean_over_prompts(sample.u_N[p], sample.group_N[p]) for p in (~later_N, later_N)
    )
    whole = np.log(max(all_after.value, 1e-9) / max(all_before.value, 1e-9))
    local = np.log(max(mean_a[at], 1e-9) / max(mean_b[at], 1e-9))
    sharpness = float(local / whole) if whole > 0 else 0.0
    return Jump(index, axis, all_before, all_after, sharpness, float(size_I[at]), float(z_I[at]))


def _windows(cumulated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums over the 8 positions before, and from, each position with 8 on both sides."""
    before = cumulated[:, _WINDOW:-_WINDOW] - cumulated[:, : -2 * _WINDOW]
    after = cumulated[:, 2 * _WINDOW :] - cumulated[:, _WINDOW:-_WINDOW]
    return before, after
