"""A gap that grows from step to step at equal weights: something in the engine is not updated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.by_step import FEWEST_STEPS, SCATTER
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from mismatch_cli.diagnosis.power import clear, none
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "growth-over-steps", 5
CLEARS = ("rollout.prefix_caching",)  # settings that are not suspects if this finds nothing
TITLE = "A gap that grows over the steps"
CAUSE = (
    "The engine's weights are not, or only partly, updated, or it keeps an old float32 copy of "
    "the head or old caches."
)
CHANGE = (
    "Use --earlier-model; reset the prefix cache at every sync; restart the engine and see "
    "whether the gap falls."
)
SOURCE = "open-instruct 1473, vime 64 (0.011 to 0.036), NeMo-RL PR 4018 (resets on engine restart)"
_TIMES, _T = 1.5, 4.0
_MEASURE = "times from the first step to the last"


def check(evidence: Evidence) -> Finding:
    """Fit a line through the mean normalised gap by step, weighted by its error over prompts."""
    sample = evidence.sample
    step_N = sample.step_S[sample.response_N]
    steps = np.unique(step_N)
    if len(steps) < FEWEST_STEPS:
        return untested(NAME, f"needs at least {FEWEST_STEPS} steps, the trace has {len(steps)}")
    means = [_mean(sample, step_N == step) for step in steps]
    trend = _Trend.through(steps, means)
    factor, t = trend.factor(trend.slope), trend.t
    rows = (
        ("first step, typical gaps", means[0].value),
        ("last step, typical gaps", means[-1].value),
        ("t", t),
    )
    change = evidence.step_change
    if change is not None and change.is_found and not evidence.weights_differ:
        reason = f"it changes {change.where}"
        return Finding(NAME, "clear", factor, _MEASURE, evidence=rows, reason=reason)
    if not (factor > _TIMES and t > _T):
        return clear(NAME, factor, _MEASURE, _power(trend), rows)
    left_N = sample.d_N / _times(means)[np.searchsorted(steps, step_N)]
    sentence = (
        f"From the first step to the last, the gap grows by a factor of {factor:.3g} at equal "
        "probabilities."
    )
    return Finding(NAME, "found", factor, _MEASURE, sentence, rows, left_N=left_N)


def _times(means: list[Mean]) -> np.ndarray:
    """How much larger the gap of each step is than the smallest."""
    value = np.array([mean.value for mean in means])
    return np.maximum(1.0, value / max(value.min(), 1e-9))


def _power(trend: _Trend) -> str:
    """The smallest growth that is both large enough and beyond the scatter of the steps."""
    least = max(_TIMES, trend.factor(_T * trend.error))
    if least >= 1 / SCATTER:
        return none("the steps scatter too much to tell growth from chance")
    return f"a growth of {least:.2g} times from the first step to the last"


def _mean(sample: Sample, inside_N: np.ndarray) -> Mean:
    return mean_over_prompts(sample.u_N[inside_N], sample.group_N[inside_N])


@dataclass(frozen=True)
class _Trend:
    """A straight line through the means by step; x has the range 1, so `slope` is the growth from
    the first step to the last.
    """

    middle: float
    slope: float
    error: float  # of the slope, from the scatter about the line
    first: float  # x of the first step
    last: float

    @classmethod
    def through(cls, steps: np.ndarray, means: list[Mean]) -> _Trend:
        value = np.array([mean.value for mean in means])
        weight = _weight(value, np.array([mean.error for mean in means]))
        middle = float(np.average(value, weights=weight))
        x = (steps - np.average(steps, weights=weight)) / np.ptp(steps)
        squares = (weight * x * x).sum()
        slope = float((weight * x * (value - middle)).sum() / squares)
        left = value - middle - slope * x
        error = np.sqrt(max(1.0, (weight * left**2).sum() / (len(steps) - 2)) / squares)
        return cls(middle, slope, float(error), float(x[0]), float(x[-1]))

    @property
    def t(self) -> float:
        return self.slope / self.error if self.error > 0 else np.inf

    def factor(self, slope: float) -> float:
        """From the first step to the last with such a slope."""
        first, last = self.middle + slope * self.first, self.middle + slope * self.last
        return last / max(first, SCATTER * last)


def _weight(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Of each step: the inverse of its variance, the usual scatter included."""
    error = np.where(np.isfinite(error), error, value.max())
    return np.asarray(1 / (error**2 + (SCATTER * value.mean()) ** 2))
