"""Which of two sets of weights an engine sampled with: a paired test on what it says of its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_DEVIATIONS = 3.0  # standard errors of a paired difference before anything is said
# The difference must also be a part of the smaller gap. The engine's weights are those of the trainer rounded, and all
# responses share that rounding: where the step is small against it, either weights can fit better, significantly.
_PART = 0.25


class Fit(NamedTuple):
    """mean |π − μ| over responses at two sets of weights, and by how many standard errors the second is farther."""

    first: float
    second: float
    deviations: float
    decided: bool

    @property
    def first_fits(self) -> bool:
        return self.decided and self.first < self.second

    @property
    def second_fits(self) -> bool:
        return self.decided and self.second < self.first


def compare_fit(
    logp_rollout: Sequence[np.ndarray], logp_first: Sequence[np.ndarray], logp_second: Sequence[np.ndarray]
) -> Fit:
    """A paired test over responses on the mean |π − μ| of each; not decided where the weights are too near, or NaN."""
    mu, first, second = ([np.exp(x) for x in side] for side in (logp_rollout, logp_first, logp_second))
    gap_S2 = np.array(
        [(np.abs(f - m).mean(), np.abs(s - m).mean()) for m, f, s in zip(mu, first, second, strict=True) if len(m)]
    ).reshape(-1, 2)
    if not len(gap_S2):
        return Fit(0.0, 0.0, 0.0, False)
    better_S = gap_S2[:, 1] - gap_S2[:, 0]
    error = better_S.std(ddof=1) / np.sqrt(len(better_S)) if len(better_S) > 1 else np.inf
    decided = abs(better_S.mean()) > max(_DEVIATIONS * error, _PART * gap_S2.mean(axis=0).min())
    deviations = float(better_S.mean() / error) if error > 0 else float(np.sign(better_S.mean()) * np.inf)
    return Fit(float(gap_S2[:, 0].mean()), float(gap_S2[:, 1].mean()), deviations, bool(decided))
