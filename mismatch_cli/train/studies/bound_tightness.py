"""How close lower bounds of the total variation are while a run trains, on the tokens that
`train` also scores over the whole vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.training import Curve, TrainingAnalysis, mean_curve

BOUNDS = {"binary TV": "tv_binary", "top-K TV": "tv_topk"}
_GROUP, _FULL, _TOKENS = "bounds", "tv_full", "tokens"


def quality(runs: Sequence[TrainingRun], bound: str) -> Curve:
    """The share of the full TV that a bound sees, by step: mean bound / mean full TV over the same
    tokens (DPPO, App. B.1), from 0 to 1.

    The mean over the runs, with the range of seeds; a gap where a run did not measure it, or
    where the full TV is 0.
    """
    return mean_curve([(run.step_N, _share(run, bound)) for run in runs])


def bound_qualities(study: TrainingAnalysis) -> dict[str, dict[str, Curve]]:
    """The quality of every bound that an algorithm's runs measured."""
    qualities: dict[str, dict[str, Curve]] = {}
    for name, runs in study.algorithms.items():
        for words, bound in BOUNDS.items():
            curve = quality(runs, bound)
            if curve.has_values:
                qualities.setdefault(name, {})[words] = curve
    return qualities


def _share(run: TrainingRun, bound: str) -> np.ndarray:
    full_N = run.series(_GROUP, _FULL)
    return run.series(_GROUP, bound) / np.where(full_N > 0, full_N, np.nan)


def tokens_per_step(runs: Sequence[TrainingRun]) -> int:
    """The median number of tokens of a step that were scored over the whole vocabulary; 0 if none
    were.
    """
    counts = [run.measured(_GROUP, _TOKENS) for run in runs]
    count_N = np.concatenate([np.zeros(0), *counts])
    if not len(count_N):
        return 0
    return round(float(np.median(count_N)))
