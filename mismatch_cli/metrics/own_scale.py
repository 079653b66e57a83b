"""What a trace says about its own scale: how coarse its logits are, and how far the trainer is from
itself.
"""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.logit_steps import MEAN_OF_ROUNDING, WEIGHT_SCALE, LogitSteps
from mismatch_cli.metrics.pairs import Pair

_CERTAIN = -0.01  # nats: tokens above it hardly move, however noisy the logits
_FEWEST_REPEATED = 200  # uncertain tokens scored twice
_MOSTLY = 0.5  # of them: noise that moves fewer is that of another order of a few sums
# Σ p_j² over the other tokens, relative to (1 − p_y)², is between 0 (many tokens) and 1 (one).
_OTHERS = 0.5
_NOISE_SCALE = 2**36  # 2 · 10^-11 nats; a slice of 2^20 tokens fits into 64 bits
_MOST_NOISE = 16.0  # nats of one token


class OwnScale(Accumulator):
    """The steps of both sides' logits, how uncertain the tokens are, and the trainer's gap to
    itself, over all tokens that count.

    Sums are whole numbers, so that they are the same in any order.
    """

    SETTINGS = ("pair",)

    def __init__(self, pair: Pair, temperatures: tuple[float, float] = (1.0, 1.0)) -> None:
        """`temperatures`: of the reference policy and of the current one."""
        self.pair = pair
        self.reference, self.current = map(LogitSteps, temperatures)
        self.tokens, self.uncertainty = 0, 0
        self.repeated, self.noise = 0, 0  # of tokens that the trainer scored twice
        self.uncertain, self.moved = 0, 0  # of these, the uncertain ones

    def update(self, gaps: TokenGaps) -> None:
        """Add tokens."""
        self.tokens += len(gaps.logq_N)
        self.uncertainty += int(np.rint((1 - gaps.q_N) * WEIGHT_SCALE).sum(dtype=np.float64))
        if self.pair.topk_measured_in(gaps.batch):
            reference_NK = gaps.column(str(self.pair.topk_reference))
            current_NK = gaps.column(str(self.pair.topk_current))
            self.reference.update(gaps.logq_N, reference_NK)  # type: ignore[arg-type]
            self.current.update(gaps.logp_N, current_NK)  # type: ignore[arg-type]
        self._update_noise(gaps)

    def _update_noise(self, gaps: TokenGaps) -> None:
        once_N = gaps.column("logp_trainer_T")
        again_N = gaps.column("logp_trainer_repeat_T")
        if once_N is None or again_N is None:
            return
        with np.errstate(invalid="ignore"):  # −inf − (−inf)
            noise_N = np.abs(again_N - once_N)
        measured_N = np.isfinite(noise_N)
        uncertain_N = measured_N & (gaps.logq_N < _CERTAIN)
        noise_N = np.minimum(noise_N[measured_N], _MOST_NOISE).astype(np.float64)
        self.repeated += len(noise_N)
        self.noise += int(np.rint(noise_N * _NOISE_SCALE).astype(np.int64).sum())
        self.uncertain += int(uncertain_N.sum())
        self.moved += int((again_N != once_N)[uncertain_N].sum())

    @property
    def shows_steps(self) -> bool:
        """Whether the top-K columns of a side show the steps of its logits."""
        return self.reference.are_rounded or self.current.are_rounded

    @property
    def trainer_noise(self) -> float | None:
        """The trainer's mean |Δlog p| to itself in other micro-batches, nats.

        None if that was not measured, or if it left most uncertain tokens as they were: then
        both passes ran the same kernels, whose error they share.
        """
        if self.uncertain < _FEWEST_REPEATED or self.moved < _MOSTLY * self.uncertain:
            return None
        return self.noise / _NOISE_SCALE / self.repeated

    def gap_of_rounding(self, step: float, temperature: float) -> float:
        """What rounding one side's logits to a known step makes, nats, without top-K columns."""
        mean_uncertainty = self.uncertainty / WEIGHT_SCALE / max(1, self.tokens)
        mean_weight = np.sqrt(1 + _OTHERS) * mean_uncertainty
        return float(MEAN_OF_ROUNDING * step * mean_weight / temperature)
