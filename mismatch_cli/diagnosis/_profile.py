"""The normalised gap by position: how it drifts, and where it jumps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis._grouped import Mean, mean_over_prompts
from mismatch_cli.diagnosis._sample import Sample

_BINS = 12
_LEAST_TOKENS = 400


@dataclass(frozen=True)
class Jump:
    """The position at which the gap changes most sharply."""

    index: int
    axis: str  # "response" or "context": counted from the response's or the prompt's first token
    before: Mean
    after: Mean
    share_of_spread: float  # of the spread of the profile, that the jump alone explains


def drift(sample: Sample) -> tuple[Mean, Mean, float, float] | None:
    """The first and last twelfth of the positions, the correlation of log gap and position, the share of rises."""
    position_N = sample.position_T[sample.kept]
    if len(position_N) < _LEAST_TOKENS:
        return None
    order = np.argsort(position_N, kind="stable")
    means = [mean_over_prompts(sample.u_N[part], sample.group_N[part]) for part in np.array_split(order, _BINS)]
    log_gap = np.log([max(mean.value, 1e-9) for mean in means])
    correlation = float(np.corrcoef(np.arange(_BINS), log_gap)[0, 1]) if np.ptp(log_gap) else 0.0
    return means[0], means[-1], correlation, float((np.diff(log_gap) > 0).mean())


def sharpest_jump(sample: Sample) -> Jump | None:
    """The split of the positions that explains most, counted in the response or in the whole context."""
    jumps = [jump for axis in ("response", "context") if (jump := _jump(sample, axis)) is not None]
    return max(jumps, key=lambda jump: jump.share_of_spread, default=None)


def _jump(sample: Sample, axis: str) -> Jump | None:
    position_N = sample.position_T[sample.kept]
    if axis == "context":
        position_N = position_N + sample.prompt_length_S[sample.response_T[sample.kept]]
    count_I = np.bincount(position_N)
    sum_I = np.bincount(position_N, weights=sample.u_N)
    total, everything = count_I.sum(), sum_I.sum()
    before_I, gap_before_I = np.cumsum(count_I)[:-1], np.cumsum(sum_I)[:-1]
    after_I = total - before_I
    possible_I = np.minimum(before_I, after_I) >= max(_LEAST_TOKENS / 8, 0.03 * total)
    if total < _LEAST_TOKENS or not possible_I.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        step_I = (everything - gap_before_I) / after_I - gap_before_I / before_I
        between_I = np.where(possible_I, step_I**2 * before_I * after_I / total, -1)
    index = int(np.argmax(between_I)) + 1
    mean_I = np.divide(sum_I, count_I, out=np.zeros_like(sum_I), where=count_I > 0)
    spread = float((count_I * (mean_I - everything / total) ** 2).sum())
    noise = _noise(sample, position_N, mean_I)
    later_N = position_N >= index
    before, after = (mean_over_prompts(sample.u_N[part], sample.group_N[part]) for part in (~later_N, later_N))
    return Jump(index, axis, before, after, float(between_I[index - 1] / max(spread - noise, 1e-12)))


def _noise(sample: Sample, position_N: np.ndarray, mean_I: np.ndarray) -> float:
    """The part of the spread of the profile that the scatter of single tokens makes by itself."""
    left_N = sample.u_N - mean_I[position_N]
    occupied = int((np.bincount(position_N) > 0).sum())
    return float(left_N.var() * occupied) if occupied < len(left_N) else 0.0
