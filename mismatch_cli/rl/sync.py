"""Weight sync that proves itself: what the engine says of its own tokens, against the weights it should have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatch_cli.errors import MismatchError

PROVEN, UNDECIDABLE = "proven", "undecidable"
_SAME = 1e-5  # mean |π − μ| between two float32 implementations of the same weights; measured: 3.4e-7
_DEVIATIONS = 3.0  # standard errors of a paired difference before anybody is accused


def prove_equal(logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray]) -> str:
    """In float32 on both sides log μ must be log π: a `MismatchError` where it is not."""
    gap = float(np.abs(np.exp(np.concatenate(logp_trainer)) - np.exp(np.concatenate(logp_rollout))).mean())
    if not gap <= _SAME:  # false for NaN too
        raise MismatchError(
            f"The weight sync failed: the engine's probabilities are {gap:.2g} away from those of the trainer's "
            f"weights, on average, and in float32 they should agree to {_SAME:g}. The engine has old or broken weights."
        )
    return PROVEN


def prove_newer(
    logp_rollout: Sequence[np.ndarray], logp_new: Sequence[np.ndarray], logp_old: Sequence[np.ndarray]
) -> str:
    """In lower precision: whether the engine agrees better with the new weights than with those of the step before.

    A paired test over responses on the mean |π − μ| of each. Where the step was too small to tell, "undecidable"; a
    `MismatchError` where the old weights fit better.
    """
    mu, new, old = ([np.exp(x) for x in side] for side in (logp_rollout, logp_new, logp_old))
    pairs = [(np.abs(n - m).mean(), np.abs(o - m).mean()) for m, n, o in zip(mu, new, old, strict=True) if len(m)]
    better = np.array([before - after for after, before in pairs])
    if np.isnan(better).any():
        raise MismatchError("The weight sync failed: the engine or the trainer answers NaN.")
    error = better.std(ddof=1) / np.sqrt(len(better)) if len(better) > 1 else np.inf
    if better.mean() > _DEVIATIONS * error:
        return PROVEN
    if better.mean() < -_DEVIATIONS * error:
        raise MismatchError(
            "The weight sync failed: the engine's probabilities fit the weights of the step before better than the new "
            f"ones ({-better.mean():.2g} in mean |π − μ|, {-better.mean() / error:.0f} standard errors)."
        )
    return UNDECIDABLE
