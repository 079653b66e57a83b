"""Whether the gap changes at a step, and stays or comes back.

The gap of a step is the mean of |d| in typical gaps, on a log scale. Its variance is that of the
prompts within a step, relative and pooled over all steps, and a scatter of 10 % between the steps
of any trace. Of all windows of consecutive steps, the one with the largest standardised difference
from the other steps is tested, at the level of Bonferroni's inequality for their number.

Letters: `_K` steps in order, `_U` the prompts of each step, `_W` windows of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from mismatch_cli.diagnosis.group_estimates import as_normal
from mismatch_cli.diagnosis.sample import Sample

FEWEST_STEPS = 4
MOST_STEPS = 256  # more are put together: there is a window for every pair of them
FEWEST_PROMPTS = 8  # beside the first one of each step: from fewer, no variance
SCATTER = 0.1  # of the mean: steps differ by this much regardless of their errors
TIMES = 1.3  # the gap of the other steps
_LEVEL = 0.01  # of a healthy trace: false alarms over all windows, at most
# The scatter between steps counts as if it had been measured in so many steps of earlier traces
_PRIOR = 8
_SURE = 1.96  # standard errors of an interval
_BESIDE, _Z_BESIDE = 0.6, 2.5  # of a jump, that is left beside a straight line; standard errors
_SMALLEST = 1e-9  # typical gaps: a logarithm


@dataclass(frozen=True)
class StepGaps:
    """The mean relative gap by step."""

    first_K: np.ndarray  # the step's number, or the first of several that are put together
    last_K: np.ndarray
    index_S: np.ndarray  # which of them each response is in; −1 = none
    log_K: np.ndarray  # log of the mean |d| in typical gaps
    variance_K: np.ndarray
    prompts: int  # of all steps, less one of each

    @classmethod
    def of(cls, sample: Sample) -> StepGaps | None:
        """None for too few steps, or prompts within them. Steps without a counted token are left
        out: their responses are in no window.
        """
        if not sample.num_counted:
            return None
        counted_S = np.zeros(sample.num_responses, dtype=bool)
        counted_S[sample.response_N] = True
        steps, index_R = np.unique(sample.step_S[counted_S], return_inverse=True)
        count = min(len(steps), MOST_STEPS)
        index_S = np.full(sample.num_responses, -1)
        index_S[counted_S] = index_R * count // max(len(steps), 1)
        prompts = Prompts.of(sample, index_S, count)
        variance_K = prompts.variance_K
        if count < FEWEST_STEPS or variance_K is None or not np.isfinite(variance_K).all():
            return None
        # The same division as in `index_S`, which puts several steps together where there are many
        number = np.arange(len(steps)) * count // len(steps)
        first = np.searchsorted(number, np.arange(count))
        last = np.searchsorted(number, np.arange(count), "right") - 1
        return cls(
            steps[first],
            steps[last],
            index_S,
            np.log(np.maximum(prompts.mean_K, _SMALLEST)),
            variance_K + SCATTER**2,
            prompts.spare,
        )

    @cached_property
    def windows(self) -> Windows:
        """Every window of consecutive steps, without that of all."""
        return Windows.of(self.log_K, 1 / self.variance_K)

    def where(self, start: int, stop: int) -> str:
        """A window of steps, such as `from step 6 on`."""
        first, last = int(self.first_K[start]), int(self.last_K[stop - 1])
        if stop == len(self.first_K):
            return f"from step {first} on" if first < last else f"in the last step, {last}"
        if start == 0:
            return f"up to step {last}"
        return f"in step {first}" if first == last else f"in steps {first} to {last}"


@dataclass(frozen=True)
class Prompts:
    """Sums over the tokens of each prompt in each step."""

    index_U: np.ndarray  # which step
    sum_U: np.ndarray  # Σ |d| in typical gaps
    tokens_U: np.ndarray
    steps: int

    @classmethod
    def of(cls, sample: Sample, index_S: np.ndarray, steps: int) -> Prompts:
        """`index_S`: which of the steps each response is in."""
        response_N, responses = sample.response_N, sample.num_responses
        count_S = np.bincount(response_N, minlength=responses)
        sum_S = np.bincount(response_N, weights=sample.u_N, minlength=responses)
        counted_S = count_S > 0
        keys = np.stack([index_S, sample.prompt_id_S])[:, counted_S]
        key_2U, unit = np.unique(keys, axis=1, return_inverse=True)
        # Some versions of numpy give the inverse the shape of the keys
        unit = unit.ravel()
        sum_U = np.bincount(unit, weights=sum_S[counted_S])
        tokens_U = np.bincount(unit, weights=count_S[counted_S])
        return cls(key_2U[0], sum_U, tokens_U, steps)

    def _by_step(self, weight_U: np.ndarray | None) -> np.ndarray:
        return np.bincount(self.index_U, weights=weight_U, minlength=self.steps)

    @cached_property
    def mean_K(self) -> np.ndarray:
        """The mean |d| by step, in typical gaps."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self._by_step(self.sum_U) / self._by_step(self.tokens_U)

    @cached_property
    def spare(self) -> int:
        """How many prompts there are beside the first one of each step."""
        return int(np.maximum(self._by_step(None) - 1, 0).sum())

    @cached_property
    def variance_K(self) -> np.ndarray | None:
        """The variance of the logarithm of each mean, from one relative variance of a prompt for
        all steps; None for too few prompts.
        """
        if self.spare < FEWEST_PROMPTS:
            return None
        count_U = self._by_step(None)[self.index_U]
        mean_U = np.maximum(self.mean_K, _SMALLEST)[self.index_U]
        left_U = self.sum_U / mean_U - self.tokens_U
        several_U = count_U > 1
        # A step has as many degrees of freedom as prompts beside the first
        freed_U = np.where(several_U, count_U / (count_U - several_U), 0)
        squares = (self.tokens_U[several_U] ** 2).sum()
        relative = float((left_U**2 * freed_U).sum() / squares)
        tokens_K, squares_K = self._by_step(self.tokens_U), self._by_step(self.tokens_U**2)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(relative * squares_K / tokens_K**2)


@dataclass(frozen=True)
class Windows:
    """The difference of every window of steps from all other steps, on a log scale."""

    start_W: np.ndarray
    stop_W: np.ndarray
    log_W: np.ndarray  # mean in the window less mean of the others
    error_W: np.ndarray
    chi2_W: np.ndarray  # about the two means
    chi2_of_line: float  # about a straight line
    y_K: np.ndarray
    weight_K: np.ndarray

    @classmethod
    def of(cls, y_K: np.ndarray, weight_K: np.ndarray) -> Windows:
        """The windows of values with weights of one over their variance; y becomes that less its
        mean.
        """
        steps = len(y_K)
        start_W, stop_W = np.triu_indices(steps + 1, 1)
        # The window of all steps has no others to compare it with
        has_others = stop_W - start_W < steps
        start_W, stop_W = start_W[has_others], stop_W[has_others]
        y_K = y_K - np.average(y_K, weights=weight_K)
        sum_before_K1 = np.concatenate([[0], np.cumsum(weight_K * y_K)])
        weight_before_K1 = np.concatenate([[0], np.cumsum(weight_K)])
        inside_W = weight_before_K1[stop_W] - weight_before_K1[start_W]
        others_W = weight_before_K1[-1] - inside_W
        sum_W = sum_before_K1[stop_W] - sum_before_K1[start_W]
        log_W = sum_W / inside_W - (sum_before_K1[-1] - sum_W) / others_W
        error_W = np.sqrt(1 / inside_W + 1 / others_W)
        total = float((weight_K * y_K**2).sum())
        chi2_of_line = float((weight_K * _without_line(y_K, weight_K) ** 2).sum())
        chi2_W = total - (log_W / error_W) ** 2
        return cls(start_W, stop_W, log_W, error_W, chi2_W, chi2_of_line, y_K, weight_K)

    @property
    def steps(self) -> int:
        return len(self.y_K)

    def index(self, start: int, stop: int) -> int:
        """Which window has these bounds."""
        return int(np.flatnonzero((self.start_W == start) & (self.stop_W == stop))[0])

    def scale(self, w: int) -> float:
        """By how much errors are larger than the prompts and the usual scatter make them."""
        # Rounding may bring χ² below 0
        chi2 = max(self.chi2_W[w], 0.0)
        return float(np.sqrt(max(1.0, (_PRIOR + chi2) / self.degrees)))

    def is_sudden(self, w: int) -> bool:
        """Whether a window fits better than a straight line, and most of it is left beside one: a
        policy that drifts has no step to be named.
        """
        beside, error = self._beside_a_line(w)
        return bool(
            self.chi2_W[w] < self.chi2_of_line
            and beside > _BESIDE * self.log_W[w]
            and beside > _Z_BESIDE * error * self.scale(w)
        )

    def _beside_a_line(self, w: int) -> tuple[float, float]:
        """The difference of a window if a straight line is fitted as well, and its error."""
        inside_K = np.zeros(self.steps)
        inside_K[self.start_W[w] : self.stop_W[w]] = 1.0
        bend_K = _without_line(inside_K, self.weight_K)
        rest_K = _without_line(self.y_K, self.weight_K)
        squares = max(float((self.weight_K * bend_K**2).sum()), _SMALLEST)
        return float((self.weight_K * bend_K * rest_K).sum()) / squares, squares**-0.5

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the scatter: two means and the bound of a window are fitted."""
        return _PRIOR + self.steps - 3

    @property
    def z_needed(self) -> float:
        """The z of the level, divided by the number of windows (Bonferroni)."""
        return NormalDist().inv_cdf(1 - _LEVEL / len(self.start_W))

    def smallest_factor(self, w: int, scale: float) -> float:
        """The smallest factor of a jump that would be found in a window."""
        error = float(self.error_W[w])
        _, error_beside = self._beside_a_line(w)
        least = scale * max(self.t_needed * error, _Z_BESIDE * error_beside)
        return max(TIMES, float(np.exp(least)))

    @cached_property
    def t_needed(self) -> float:
        """The number of errors that is as improbable as `z_needed` standard deviations."""
        # `as_normal` rises with t and has no inverse of its own
        low, high = 0.0, 1e3
        for _ in range(50):
            middle = (low + high) / 2
            if as_normal(middle, self.degrees + 1) < self.z_needed:
                low = middle
            else:
                high = middle
        return high


def _without_line(v_K: np.ndarray, weight_K: np.ndarray) -> np.ndarray:
    """What a weighted straight line leaves of some values."""
    step_K = np.arange(len(v_K))
    x_K = step_K - np.average(step_K, weights=weight_K)
    left_K = v_K - np.average(v_K, weights=weight_K)
    slope = (weight_K * x_K * left_K).sum() / (weight_K * x_K**2).sum()
    return left_K - slope * x_K


@dataclass(frozen=True)
class StepChange:
    """The steps whose gap is above that of all others by most standard errors."""

    gaps: StepGaps
    start: int
    stop: int
    times: float  # the gap of the others
    between: tuple[float, float]  # 95 %
    z: float
    z_needed: float
    is_sudden: bool  # rather than a gap that rises or falls steadily
    smallest: float  # factor that would have been found from the middle step on
    smallest_once: float  # in that step alone

    @property
    def is_certain(self) -> bool:
        return self.z > self.z_needed and self.is_sudden

    @property
    def is_found(self) -> bool:
        """Whether the change is certain, and large enough to speak of."""
        return self.is_certain and self.times > TIMES

    @cached_property
    def inside_S(self) -> np.ndarray:
        """The responses of these steps, bool."""
        return np.asarray((self.gaps.index_S >= self.start) & (self.gaps.index_S < self.stop))

    @property
    def where(self) -> str:
        """The steps, such as `from step 6 on`."""
        return self.gaps.where(self.start, self.stop)

    @property
    def middle(self) -> int:
        """The step from which on `smallest` would have been found."""
        return int(self.gaps.first_K[len(self.gaps.first_K) // 2])

    @property
    def others(self) -> str:
        """Where the other steps are, as in `times that before`."""
        if self.start == 0:
            return "afterwards"
        return "before" if self.stop == len(self.gaps.first_K) else "in the other steps"


def find_step_change(sample: Sample) -> StepChange | None:
    """The steps that differ most from the others; None for too few steps, or prompts in them."""
    gaps = StepGaps.of(sample)
    if gaps is None:
        return None
    windows = gaps.windows
    w = int(np.argmax(windows.log_W / windows.error_W))
    scale = windows.scale(w)
    log = float(windows.log_W[w])
    error = float(windows.error_W[w]) * scale
    middle = windows.steps // 2
    from_middle = windows.index(middle, windows.steps)
    middle_alone = windows.index(middle, middle + 1)
    return StepChange(
        gaps,
        int(windows.start_W[w]),
        int(windows.stop_W[w]),
        float(np.exp(log)),
        (float(np.exp(log - _SURE * error)), float(np.exp(log + _SURE * error))),
        as_normal(log / error, windows.degrees + 1),
        windows.z_needed,
        windows.is_sudden(w),
        windows.smallest_factor(from_middle, scale),
        windows.smallest_factor(middle_alone, scale),
    )
