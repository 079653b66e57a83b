"""A gap that grows from step to step at equal weights: something in the engine is not updated."""

import numpy as np

from mismatch_cli.diagnosis.by_step import FEWEST_STEPS, SCATTER
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.grouped import Mean, mean_over_prompts
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
    step_N = sample.step_S[sample.response_T[sample.kept]]
    steps = np.unique(step_N)
    if len(steps) < FEWEST_STEPS:
        return untested(NAME, f"needs at least {FEWEST_STEPS} steps, the trace has {len(steps)}")
    means = [_mean(sample, step_N == step) for step in steps]
    factor, t = _line(steps, means)
    rows = (
        ("first step, typical gaps", means[0].value),
        ("last step, typical gaps", means[-1].value),
        ("t", t),
    )
    change = evidence.change
    if change is not None and change.is_found and not evidence.weights_differ:
        reason = f"it changes {change.words}"
        return Finding(NAME, "clear", factor, _MEASURE, evidence=rows, reason=reason)
    if not (factor > _TIMES and t > _T):
        return Finding(NAME, "clear", factor, _MEASURE, evidence=rows)
    value = np.array([mean.value for mean in means])
    times = np.maximum(1.0, value / max(value.min(), 1e-9))
    left_N = sample.d_N / times[np.searchsorted(steps, step_N)]
    sentence = (
        f"From the first step to the last, the gap grows by a factor of {factor:.3g} at equal "
        "probabilities."
    )
    return Finding(NAME, "found", factor, _MEASURE, sentence, rows, left_N=left_N)


def _mean(sample: Sample, in_it_N: np.ndarray) -> Mean:
    return mean_over_prompts(sample.u_N[in_it_N], sample.group_N[in_it_N])


def _line(steps: np.ndarray, means: list[Mean]) -> tuple[float, float]:
    """The factor from the first step to the last by a straight line, and its t."""
    value = np.array([mean.value for mean in means])
    weight = _weight(value, np.array([mean.error for mean in means]))
    middle = float(np.average(value, weights=weight))
    x = (steps - np.average(steps, weights=weight)) / np.ptp(steps)
    squares = (weight * x * x).sum()
    slope = float((weight * x * (value - middle)).sum() / squares)
    left = value - middle - slope * x
    scatter = np.sqrt(max(1.0, (weight * left**2).sum() / (len(steps) - 2)) / squares)
    t = float(slope / scatter) if scatter > 0 else np.inf
    first, last = middle + slope * float(x[0]), middle + slope * float(x[-1])
    return last / max(first, SCATTER * last), t


def _weight(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Of each step: the inverse of its variance, the usual scatter included."""
    error = np.where(np.isfinite(error), error, value.max())
    return np.asarray(1 / (error**2 + (SCATTER * value.mean()) ** 2))
