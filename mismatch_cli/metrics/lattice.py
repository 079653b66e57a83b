"""Detects the lattice that rounding logits to bf16 leaves in the data.

If only the sampled token's logit differs, by δ, its odds change by e^δ: the log-odds gap x =
log(π/(1 − π)) − log(μ/(1 − μ)) is δ exactly, which to first order is the streak r ≈ 1 + δ(1 − μ) of
the paper's Figure 2. Two engines that round their logits to bf16 differ by multiples of 1/16
(|logit| in [8, 16)), 1/8 ([16, 32)) or 1/4 ([32, 64)), so |x| piles up at these values. Rounding of
the other logits smears the peaks; a float32 head removes them.
"""

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.histograms import count_into, without_each_group

SPACINGS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
_BIN = 2.0**-9
_COUNT = 513  # bins of |x| below 1, and one for everything above
_LOG_MU_MAX = np.float32(-0.01)  # μ up to 0.99; beyond, the odds are mostly rounding
_FEWEST = 50  # tokens that a peak needs
_LEAST_RISE = 1.25
_LEAST_Z = 6.0


@dataclass(frozen=True)
class LatticeLine:
    """A peak of |x| at `spacing`: its height over the preceding valley, and its excess share of
    tokens.
    """

    spacing: float
    share: float  # of the tokens with μ ≤ 0.99, in excess of the valley
    rise: float  # tokens at the peak / tokens in the valley
    z: float  # log rise in standard errors


class Lattice(Accumulator):
    """Histogram of the log-odds gap |x| by prompt group, and the peaks in it."""

    def __init__(self) -> None:
        # The last column takes the tokens that do not count, so no array has to be copied.
        self._counts = np.zeros((GROUPS, _COUNT + 1), dtype=np.int64)

    @property
    def counts(self) -> np.ndarray:
        return self._counts[:, :_COUNT]

    def update(self, gaps: TokenGaps) -> None:
        excluded_N = gaps.logq_N > _LOG_MU_MAX
        if gaps.out_of_support_N is not None:
            excluded_N |= gaps.out_of_support_N
        height_N = np.minimum(np.abs(gaps.log_odds_gap_N), np.float32((_COUNT - 1) * _BIN))
        height_N *= np.float32(1 / _BIN)
        bin_N = height_N.astype(np.int32)
        np.maximum(bin_N, excluded_N * np.int32(_COUNT), out=bin_N)
        bin_N += gaps.per_token((gaps.group_S * (_COUNT + 1)).astype(np.int32))
        count_into(self._counts, bin_N)

    def result(self) -> list[LatticeLine]:
        """The spacings with a line: at least 25 % and 6 standard errors above the preceding valley.

        Smooth noise of any shape is densest at 0 and falls off, so it has no valley.
        """
        lines = []
        for spacing in SPACINGS:
            line = self._line(spacing)
            if line is not None and line.rise >= _LEAST_RISE and line.z >= _LEAST_Z:
                lines.append(line)
        return lines

    def _line(self, spacing: float) -> LatticeLine | None:
        total = self.counts.sum(axis=0)
        peak, valley = _peak_and_valley(total, spacing)
        if peak < _FEWEST:
            return None
        # Tokens of one prompt are not independent, so counting them may understate the error.
        # The jackknife over groups of prompts sees what they share.
        counting_error = np.sqrt(1 / (peak + 0.5) + 1 / (valley + 0.5))
        log_rises_G = [_log_rise(counts, spacing) for counts in without_each_group(self.counts)]
        group_error = np.sqrt((len(log_rises_G) - 1) * np.var(log_rises_G))
        log_rise = _log_rise(total, spacing)
        return LatticeLine(
            spacing,
            share=(peak - valley) / int(total.sum()),
            rise=float(np.exp(log_rise)),
            z=float(log_rise / max(counting_error, group_error)),
        )


def _peak_and_valley(counts: np.ndarray, spacing: float) -> tuple[int, int]:
    """Tokens within an eighth of the spacing around it, and around ½ or ¾ of it, whichever has
    fewer.
    """
    eighth = round(spacing / 8 / _BIN)  # whole bins
    half, three_quarters, peak = (
        int(counts[(k - 1) * eighth : (k + 1) * eighth].sum()) for k in (4, 6, 8)
    )
    return peak, min(half, three_quarters)


def _log_rise(counts: np.ndarray, spacing: float) -> float:
    peak, valley = _peak_and_valley(counts, spacing)
    return float(np.log((peak + 0.5) / (valley + 0.5)))
