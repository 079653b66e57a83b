"""How coarsely each side's logits are rounded, and the gap that this alone makes.

A bfloat16 logit of 28 is a multiple of 1/8, one of 3 of 1/64. Within one token's top-K
columns the normaliser cancels, so differences between ranks are differences between logits, over
the side's temperature: the largest power of two that divides them all is the grid's step.
"""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator

RANKS = 8  # enough to tell a step from its multiples: by chance once in 2^7 tokens
_FINEST, _COARSEST = -12, 4  # exponents of two; float16 logits of at least 1/2 have steps of 2^-11
_EXPONENTS = np.arange(_FINEST, _COARSEST + 1)
# Logits: float32 log-probabilities down to −16 are this accurate
_TOLERANCE = 4e-6
_DEEPEST = -16.0  # nats at temperature 1
_FEWEST_DIFFERENCES = 3  # of a token; with fewer, a multiple of the step looks like the step
_FEWEST_TOKENS = 50
_MOSTLY = 0.6  # of the tokens on a grid: one by chance is on the finest once in 10,000
WEIGHT_SCALE = 2**28  # 10^10 tokens fit into 64 bits
# Of |e| for normal e with the spread of rounding to a step of 1: √(2/π) / √12
MEAN_OF_ROUNDING = np.sqrt(2 / np.pi) / np.sqrt(12)


class LogitSteps(Accumulator):
    """The steps of one side's logits, by token.

    Rounding a logit to a step s moves it by e, with spread s/√12. The log-probability of the
    sampled token y then moves by e_y − Σ_j p_j e_j, with spread s/√12 · √((1 − p_y)² + Σ_{j≠y}
    p_j²): nothing for a certain token, most for an uncertain one.
    """

    SETTINGS = ("temperature",)

    def __init__(self, temperature: float = 1.0) -> None:
        """`temperature`: that of this side, by which its logits were divided."""
        self.temperature = temperature
        self.tokens = 0
        self.off_grid = 0
        # By exponent of the step: tokens, and the sum of their √((1 − p_y)² + Σ p_j²).
        # Weights are whole numbers of 1 / WEIGHT_SCALE, so sums are the same in any order.
        self.on_grid_E = np.zeros(len(_EXPONENTS), dtype=np.int64)
        self.weight_E = np.zeros(len(_EXPONENTS), dtype=np.int64)
        self.unknown_weight = 0  # of tokens with too few ranks to tell

    def update(self, logp_N: np.ndarray, topk_logp_NK: np.ndarray) -> None:
        """Add tokens: the log-probability of the sampled one, and of the top K, likeliest first."""
        measured_N = np.isfinite(logp_N) & np.isfinite(topk_logp_NK[:, 0])
        logp_N, topk_logp_NK = logp_N[measured_N], topk_logp_NK[measured_N]
        self.tokens += len(logp_N)
        enough_N, exponent_N = step_exponents(topk_logp_NK[:, :RANKS], self.temperature)
        on_grid_N = enough_N & (exponent_N >= _FINEST)
        self.off_grid += int((enough_N & ~on_grid_N).sum())
        index_N = exponent_N[on_grid_N] - _FINEST
        self.on_grid_E += np.bincount(index_N, minlength=len(_EXPONENTS))
        weight_N = np.rint(_weights(logp_N, topk_logp_NK) * WEIGHT_SCALE)
        weight_E = np.bincount(index_N, weight_N[on_grid_N], minlength=len(_EXPONENTS))
        self.weight_E += weight_E.astype(np.int64)
        self.unknown_weight += int(weight_N[~on_grid_N].sum())

    @property
    def share_on_grid(self) -> float | None:
        """The share on the grid of the tokens with enough ranks; None for too few."""
        on_grid = int(self.on_grid_E.sum())
        tokens = on_grid + self.off_grid
        return on_grid / tokens if tokens >= _FEWEST_TOKENS else None

    @property
    def are_rounded(self) -> bool:
        """Whether the logits are multiples of a coarse step: bfloat16 or float16."""
        return (self.share_on_grid or 0.0) > _MOSTLY

    @property
    def step(self) -> float:
        """The mean step of a logit on the grid, nats at temperature 1."""
        return float(self.on_grid_E @ 2.0**_EXPONENTS / max(1, self.on_grid_E.sum()))

    @property
    def gap_of_rounding(self) -> float:
        """Mean |Δlog p| that rounding the logits of this one side makes, nats per token; 0 if they
        are not rounded.

        Tokens with too few ranks to tell have the mean step.
        """
        if not self.are_rounded:
            return 0.0
        steps_by_weight = self.weight_E @ 2.0**_EXPONENTS + self.unknown_weight * self.step
        mean = steps_by_weight / WEIGHT_SCALE / self.tokens
        return float(MEAN_OF_ROUNDING * mean / self.temperature)


def _weights(logp_N: np.ndarray, topk_logp_NK: np.ndarray) -> np.ndarray:
    """√((1 − p_y)² + Σ_{j≠y} p_j²), of the sampled token y and the others among the top K."""
    p_N = np.exp(logp_N.astype(np.float64))
    topk_p_NK = np.exp(topk_logp_NK.astype(np.float64))
    squares_N = np.nansum(topk_p_NK**2, axis=1)
    return np.asarray(np.sqrt((1 - p_N) ** 2 + np.maximum(squares_N - p_N**2, 0.0)))


def step_exponents(topk_logp_NK: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Whether a token has enough ranks, and the exponent of its step; below `_FINEST` if its logits
    are on no grid.
    """
    logp_NK = topk_logp_NK.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference_NK = np.abs(np.diff(logp_NK, axis=1)) * temperature
        usable_NK = np.isfinite(difference_NK) & (logp_NK[:, 1:] * temperature > _DEEPEST)
    difference_NK = np.where(usable_NK, difference_NK, 0.0)
    multiples_NK = np.rint(difference_NK / 2.0**_FINEST)
    off_NK = np.abs(difference_NK - multiples_NK * 2.0**_FINEST) > _TOLERANCE
    off_N = off_NK.any(axis=1)
    # The lowest bit that is set in any multiple is their largest common power of two.
    # It is 0 if all ranks are equal.
    bits_N = np.bitwise_or.reduce(multiples_NK.astype(np.int64), axis=1)
    lowest_N = bits_N & -bits_N
    exponent_N = np.log2(np.maximum(lowest_N, 1)).astype(np.int64) + _FINEST
    exponent_N = np.minimum(exponent_N, _COARSEST)
    differences_N = (usable_NK & (multiples_NK != 0)).sum(axis=1)
    enough_N = off_N | (differences_N >= _FEWEST_DIFFERENCES)
    return enough_N, np.where(off_N, _FINEST - 1, exponent_N)
