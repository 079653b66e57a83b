"""A gap that starts at one fixed position: a block size, a chunk, a sliding window."""

from dataclasses import dataclass
from typing import NamedTuple

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
    measure = "times from one position on"
    if not (factor > _TIMES and z > _Z and jump.is_sharp):
        return clear(NAME, factor, measure, times_of(_TIMES, _Z, jump.after, jump.before), rows)
    sentence = (
        f"From position {jump.index} of the {jump.axis} on, the gap is {factor:.3g} times that "
        "before."
    )
    after_N = evidence.sample.axis_N(jump.axis) >= jump.index
    left_N = np.where(after_N, evidence.sample.d_N / factor, evidence.sample.d_N)
    return Finding(NAME, "found", factor, measure, sentence, rows, left_N=left_N)


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
    def is_sharp(self) -> bool:
        """Whether the gap jumps there rather than rising along the response."""
        if not self.z > _Z:
            return False
        return any(self.sharpness > sharpness and self.size > size for sharpness, size in _SHARP)

    @property
    def may_be_sharp(self) -> bool:
        """Whether it may be a jump, so that it is not reported as a steady rise."""
        least_sharpness, _ = _SHARP[0]
        is_half_sharp = self.sharpness > least_sharpness and self.size > _PERHAPS
        return self.is_sharp or (self.z > _Z and is_half_sharp)


def sharpest_jump(sample: Sample) -> Jump | None:
    """The most significant rise between neighbouring windows of positions in the response or in
    the whole context.
    """
    jumps = [jump_on(sample, "response"), jump_on(sample, "context")]
    return max(filter(None, jumps), key=lambda jump: jump.z, default=None)


def jump_on(sample: Sample, axis: str) -> Jump | None:
    """The most significant rise along one axis; None for too few tokens."""
    position_N = sample.axis_N(axis)
    if len(position_N) < _LEAST_TOKENS or position_N.max() <= 2 * _WINDOW:
        return None
    before, after = _windows(sample, position_N)
    z_I, size_I = _rise(before, after)
    at = int(np.argmax(z_I))
    if z_I[at] == -np.inf:
        return None
    index = at + _WINDOW
    later_N = position_N >= index
    all_before = mean_over_prompts(sample.u_N[~later_N], sample.group_N[~later_N])
    all_after = mean_over_prompts(sample.u_N[later_N], sample.group_N[later_N])
    whole = _log_ratio(all_before.value, all_after.value)
    local = _log_ratio(before.mean_I[at], after.mean_I[at])
    sharpness = local / whole if whole > 0 else 0.0
    return Jump(index, axis, all_before, all_after, sharpness, float(size_I[at]), float(z_I[at]))


def _log_ratio(before: float, after: float) -> float:
    return float(np.log(max(after, 1e-9) / max(before, 1e-9)))


class _Window(NamedTuple):
    """The tokens in the 8 positions on one side of each position that has 8 on both (`_I`)."""

    count_I: np.ndarray
    mean_I: np.ndarray  # typical gaps
    variance_I: np.ndarray


def _windows(sample: Sample, position_N: np.ndarray) -> tuple[_Window, _Window]:
    """The windows before each position, and from it on."""
    before, after = [], []
    for power in range(3):
        sum_P = np.bincount(position_N, weights=sample.u_N**power)
        total = np.concatenate([[0], np.cumsum(sum_P)])
        before.append(total[_WINDOW:-_WINDOW] - total[: -2 * _WINDOW])
        after.append(total[2 * _WINDOW :] - total[_WINDOW:-_WINDOW])
    return _window(*before), _window(*after)


def _window(count_I: np.ndarray, sum_I: np.ndarray, squares_I: np.ndarray) -> _Window:
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_I = sum_I / count_I
        return _Window(count_I, mean_I, squares_I / count_I - mean_I**2)


def _rise(before: _Window, after: _Window) -> tuple[np.ndarray, np.ndarray]:
    """The rise at each position in standard errors, −inf for too few tokens, and in standard
    deviations of a token.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rise_I = after.mean_I - before.mean_I
        error_I = np.sqrt(before.variance_I / before.count_I + after.variance_I / after.count_I)
        z_I = rise_I / error_I
        size_I = rise_I / np.sqrt((after.variance_I + before.variance_I) / 2)
    too_few_I = np.minimum(before.count_I, after.count_I) < _LEAST_ON_A_SIDE
    z_I[too_few_I | ~np.isfinite(z_I)] = -np.inf
    return z_I, size_I
