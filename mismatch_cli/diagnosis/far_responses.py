"""Whether some responses have a gap far above that of the others, and what these share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.origins import Traces
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.diagnosis.shared_origins import shared_by

# Standard deviations within either part, on a log scale: a normal distribution cut in two has 2.7,
# healthy traces up to 3.1
_APART = 4.0
TIMES = 3.0  # the relative gap of the others
SHORTEST = 8  # tokens of a response: the mean of fewer is noise
FEWEST = 5  # responses of either part
_USUAL = 0.2  # of the responses: fewer others may be those whose tokens are certain
_MOST = 3.0  # of one token, in typical gaps
_LEAST = 1e-3  # of a typical gap: less is equal


@dataclass(frozen=True)
class Subset:
    """Responses that may have a cause of their own, such as a far larger gap than all others."""

    inside_S: np.ndarray  # bool
    among_S: np.ndarray  # bool: the responses that could be in it
    shared: str = ""  # what they are as a whole, such as `all of 12 of 48 prompts`

    @property
    def is_part(self) -> bool:
        """Whether some are inside, and some that could be are not."""
        return bool(self.inside_S.any() and (self.among_S & ~self.inside_S).any())

    @property
    def where(self) -> str:
        """Such as `in 12 of 48 responses, all of 3 of 12 prompts`."""
        count = int(self.inside_S.sum())
        shared = f", {self.shared}" if self.shared else ""
        return f"in {count:,} of {things(len(self.inside_S), 'response')}{shared}"


def responses_with(chosen: np.ndarray, among_T: np.ndarray, sample: Sample) -> Subset:
    """The responses that have a chosen token, by flags or indices, of those that have one of
    `among_T`.
    """
    every = np.arange(sample.num_responses)
    inside_S = np.isin(every, sample.response_T[chosen])
    return Subset(inside_S, np.isin(every, sample.response_T[among_T]))


def find_far_responses(sample: Sample, traces: Traces = Traces()) -> Subset | None:
    """The responses with far larger gaps, relative to what is typical at the same probability; None
    if all are alike.

    The logarithms of the responses' typical gaps are cut in two where the variance between both
    parts is largest (Otsu 1979).
    """
    gap_S = _relative_gap_S(sample)
    long_S = np.isfinite(gap_S)
    if long_S.sum() < 2 * FEWEST:
        return None
    log_gap_S = np.log(np.maximum(gap_S, _LEAST))
    cut = _otsu_cut(np.sort(log_gap_S[long_S]))
    if cut is None:
        return None
    far_S = long_S & (log_gap_S > cut)
    return Subset(far_S, long_S, shared_by(sample, far_S, long_S, traces))


def _relative_gap_S(sample: Sample) -> np.ndarray:
    """The mean relative gap of each response, in which a few tokens do not decide; NaN for short
    ones.
    """
    response_N = sample.response_N
    count_S = np.bincount(response_N, minlength=sample.num_responses)
    u_N = np.minimum(sample.u_N, _MOST)
    sum_S = np.bincount(response_N, weights=u_N, minlength=sample.num_responses)
    return np.where(count_S >= SHORTEST, sum_S / np.maximum(count_S, 1), np.nan)


def _otsu_cut(sorted_R: np.ndarray) -> float | None:
    """The middle between two groups of values; None if they are not far enough apart."""
    count = len(sorted_R)
    fewest_below = max(FEWEST, round(_USUAL * count))
    # A cut has so many values below it. The first is one too few: where it is the best, the usual
    # responses are too few, and another cut would part the far ones.
    below_K = np.arange(fewest_below - 1, count - FEWEST + 1)
    sums = np.cumsum(sorted_R)
    low_mean_K = sums[below_K - 1] / below_K
    high_mean_K = (sums[-1] - sums[below_K - 1]) / (count - below_K)
    between_K = below_K * (count - below_K) * (high_mean_K - low_mean_K) ** 2
    best = int(np.argmax(between_K))
    if best == 0:
        return None
    below, above = np.split(sorted_R, [below_K[best]])
    within = np.sqrt((below.var() * len(below) + above.var() * len(above)) / count)
    apart = float(high_mean_K[best] - low_mean_K[best])
    if apart < np.log(TIMES) or apart < _APART * within:
        return None
    return float((below[-1] + above[0]) / 2)
