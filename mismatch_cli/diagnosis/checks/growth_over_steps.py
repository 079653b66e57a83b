"""A gap that grows from step to step at equal weights: something in the engine is not updated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.by_step import FEWEST_STEPS, SCATTER
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from mismatch_cli.diagnosis.power import clear, no_power
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
    factor = trend.factor(trend.slope)
    rows = (
        ("first step, typical gaps", means[0].value),
        ("last step, typical gaps", means[-1].value),
        ("t", trend.t),
    )
    change = evidence.step_change
    if change is not None and change.is_found and not evidence.weights_differ:
        reason = f"it changes {change.where}"
        return Finding(NAME, "clear", factor, _MEASURE, evidence=rows, reason=reason)
    if not (factor > _TIMES and trend.t > _T):
        return clear(NAME, factor, _MEASURE, _power(trend), rows)
    left_N = sample.d_N / _growth_K(means)[np.searchsorted(steps, step_N)]
    sentence = (
        f"From the first step to the last, the gap grows by a factor of {factor:.3g} at equal "
        "probabilities."
    )
    return Finding(NAME, "found", factor, _MEASURE, sentence, rows, left_N=left_N)


def _growth_K(means: list[Mean]) -> np.ndarray:
    """How many times the smallest gap that of each step is."""
    value_K = np.array([mean.value for mean in means])
    return np.maximum(1.0, value_K / max(value_K.min(), 1e-9))


def _power(trend: _Trend) -> str:
    """The smallest growth that is both large enough and beyond the scatter of the steps."""
    least = max(_TIMES, trend.factor(_T * trend.error))
    if least >= 1 / SCATTER:
        return no_power("the steps scatter too much to tell growth from chance")
    return f"a growth of {least:.2g} times from the first step to the last"


def _mean(sample: Sample, inside_N: np.ndarray) -> Mean:
    return mean_over_prompts(sample.u_N[inside_N], sample.group_N[inside_N])


@dataclass(frozen=True)
class _Trend:
    """A straight line through the means by step (`_K`); x has the range 1, so `slope` is the growth
    from the first step to the last.
    """

    middle: float
    slope: float
    error: float  # of the slope, from the scatter about the line
    first: float  # x of the first step
    last: float

    @classmethod
    def through(cls, steps: np.ndarray, means: list[Mean]) -> _Trend:
        value_K = np.array([mean.value for mean in means])
        weight_K = _weights(value_K, np.array([mean.error for mean in means]))
        middle = float(np.average(value_K, weights=weight_K))
        x_K = (steps - np.average(steps, weights=weight_K)) / np.ptp(steps)
        squares = (weight_K * x_K * x_K).sum()
        slope = float((weight_K * x_K * (value_K - middle)).sum() / squares)
        left_K = value_K - middle - slope * x_K
        # Steps that scatter by less than their errors do not make the slope more certain
        scatter = max(1.0, (weight_K * left_K**2).sum() / (len(steps) - 2))
        return cls(middle, slope, float(np.sqrt(scatter / squares)), float(x_K[0]), float(x_K[-1]))

    @property
    def t(self) -> float:
        return self.slope / self.error if self.error > 0 else np.inf

    def factor(self, slope: float) -> float:
        """From the first step to the last with such a slope."""
        first, last = self.middle + slope * self.first, self.middle + slope * self.last
        return last / max(first, SCATTER * last)


def _weights(value_K: np.ndarray, error_K: np.ndarray) -> np.ndarray:
    """The inverse of each step's variance, the usual scatter included."""
    # A step of too few prompts has no error of its own
    error_K = np.where(np.isfinite(error_K), error_K, value_K.max())
    return np.asarray(1 / (error_K**2 + (SCATTER * value_K.mean()) ** 2))
