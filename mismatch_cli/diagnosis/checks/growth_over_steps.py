"""A gap that grows from step to step at equal weights: something in the engine is not updated."""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.grouped import mean_over_prompts

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
_FEWEST_STEPS, _TIMES, _T = 4, 1.5, 4.0
_SCATTER = 0.1  # of the mean: steps differ by this much regardless of their errors


def check(evidence: Evidence) -> Finding:
    """Fit a line through the mean normalised gap by step, weighted by its error over prompts."""
    sample = evidence.sample
    step_N = sample.step_S[sample.response_T[sample.kept]]
    steps = np.unique(step_N)
    if len(steps) < _FEWEST_STEPS:
        return untested(NAME, f"needs at least {_FEWEST_STEPS} steps, the trace has {len(steps)}")
    means = [
        mean_over_prompts(sample.u_N[step_N == step], sample.group_N[step_N == step])
        for step in steps
    ]
    value = np.array([mean.value for mean in means])
    error = np.array([mean.error if np.isfinite(mean.error) else value.max() for mean in means])
    weight = 1 / (error**2 + (_SCATTER * value.mean()) ** 2)
    x = (steps - np.average(steps, weights=weight)) / np.ptp(steps)
    y = value - np.average(value, weights=weight)
    slope = float((weight * x * y).sum() / (weight * x * x).sum())
    left = y - slope * x
    scatter = np.sqrt(
        max(1.0, (weight * left**2).sum() / (len(steps) - 2)) / (weight * x * x).sum()
    )
    t = float(slope / scatter) if scatter > 0 else np.inf
    first, last = (float(np.average(value, weights=weight) + slope * x[end]) for end in (0, -1))
    factor = last / max(first, _SCATTER * last)
    rows = (
        ("first step, typical gaps", means[0].value),
        ("last step, typical gaps", means[-1].value),
        ("t", t),
    )
    if not (factor > _TIMES and t > _T):
        return Finding(
            NAME, "clear", factor, "times from the first step to the last", evidence=rows
        )
    times = np.maximum(1.0, value / max(value.min(), 1e-9))
    left_N = sample.d_N / times[np.searchsorted(steps, step_N)]
    sentence = (
        f"From the first step to the last, the gap grows by a factor of {factor:.3g} at equal "
        "probabilities."
    )
    return Finding(
        NAME,
        "found",
        factor,
        "times from the first step to the last",
        sentence,
        rows,
        left_N=left_N,
    )
