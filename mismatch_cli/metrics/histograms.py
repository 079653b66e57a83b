"""Fixed logarithmic histograms, indexed by the bits of a float32, and quantiles from them.

A bin is one float32 exponent and the top bits of its mantissa, so no logarithm is taken: with 9
bits the bins are 0.1 to 0.2 % wide, with 3 bits 6 to 12 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatch_cli.base.hashing import GROUPS


@dataclass(frozen=True)
class LogBins:
    """Bins for |x| from 2^lowest to 2^highest; bin 0 holds smaller values (and counts as 0), the
    last larger ones.
    """

    lowest: int
    highest: int
    mantissa_bits: int = 5

    @cached_property
    def count(self) -> int:
        return ((self.highest - self.lowest) << self.mantissa_bits) + 2

    def index(self, x_N: np.ndarray) -> np.ndarray:
        """The bin of each |x|, int32; x must be float32 and not NaN."""
        # Without their sign, the bits of a float32 are its exponent, then its mantissa.
        # Cut to some bits of mantissa, they count the bins from the smallest float on.
        bits_N = x_N.view(np.int32) & np.int32(0x7FFFFFFF)
        bits_N >>= np.int32(23 - self.mantissa_bits)
        bits_N -= np.int32(((127 + self.lowest) << self.mantissa_bits) - 1)
        return np.clip(bits_N, 0, self.count - 1, out=bits_N)

    def coarser(self, index_N: np.ndarray, wider: LogBins) -> np.ndarray:
        """Convert bin indices to those of `wider` bins over the same octaves."""
        shift = np.int32(self.mantissa_bits - wider.mantissa_bits)
        return (index_N + ((np.int32(1) << shift) - np.int32(1))) >> shift

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper edges of the bins."""
        parts = 1 << self.mantissa_bits  # of each octave
        octave, part = np.divmod(np.arange(self.count - 1), parts)
        starts = np.ldexp(1 + part / parts, octave + self.lowest)
        return np.concatenate([[0.0], starts]), np.concatenate([[0.0], starts[1:], starts[-1:]])


@dataclass(frozen=True)
class SignedLogBins:
    """The bins of |x| for either sign, in ascending order of x; the middle bin holds values close
    to 0.
    """

    positive: LogBins

    @cached_property
    def count(self) -> int:
        return 2 * self.positive.count - 1

    def index(self, x_N: np.ndarray) -> np.ndarray:
        """The bin of each x, int32; x must be float32 and not NaN."""
        sign_N = x_N.view(np.int32) >> np.int32(31)  # 0 or −1
        index_N = self.positive.index(x_N)
        # In two's complement (i ^ −1) − (−1) is −i: a negative x counts down from the middle.
        index_N ^= sign_N
        index_N -= sign_N
        index_N += np.int32(self.positive.count - 1)
        return index_N

    def coarser(self, index_N: np.ndarray, wider: SignedLogBins) -> np.ndarray:
        """Convert bin indices to those of `wider` bins over the same octaves."""
        shift = np.int32(self.positive.mantissa_bits - wider.positive.mantissa_bits)
        from_middle_N = index_N - np.int32(self.positive.count - 1)
        # A shift rounds down: towards the middle above it, away from the middle below it.
        # What is added above makes both sides round away from it.
        up_N = ~(from_middle_N >> np.int32(31))
        up_N &= (np.int32(1) << shift) - np.int32(1)
        from_middle_N += up_N
        from_middle_N >>= shift
        from_middle_N += np.int32(wider.positive.count - 1)
        return from_middle_N

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper edges of the bins."""
        low, high = self.positive.edges
        return np.concatenate([-high[:0:-1], low]), np.concatenate([-low[:0:-1], high])

    def fold(self, counts: np.ndarray) -> np.ndarray:
        """Counts of |x| from counts of x, along the last axis."""
        middle = self.positive.count - 1
        folded = counts[..., middle:].copy()
        folded[..., 1:] += counts[..., middle - 1 :: -1]
        return folded


def bin_centres(bins: LogBins | SignedLogBins) -> tuple[np.ndarray, np.ndarray]:
    """Bin centres instead of edges: every value at most half a bin off, even if all are equal."""
    middle = (bins.edges[0] + bins.edges[1]) / 2
    return middle, middle


def quantiles(
    counts: np.ndarray, edges: tuple[np.ndarray, np.ndarray], shares: Sequence[float]
) -> np.ndarray:
    """[..., bins] → [..., shares]: quantiles of binned values, interpolated between neighbouring
    ranks as in numpy.

    The values of a bin are assumed to be spread evenly over it, so each is at most a bin's width
    off. NaN for empty counts.
    """
    through = np.cumsum(counts, axis=-1)
    last = through[..., -1:] - 1
    values = np.empty((*counts.shape[:-1], len(shares)))
    for column, share in enumerate(shares):
        rank = share * last
        below = np.floor(rank)
        lower = _ranked(counts, through, edges, np.minimum(below, last))
        upper = _ranked(counts, through, edges, np.minimum(below + 1, last))
        value = np.where(last < 0, np.nan, lower + (rank - below) * (upper - lower))
        values[..., column] = value[..., 0]
    return values


def _ranked(
    counts: np.ndarray, through: np.ndarray, edges: tuple[np.ndarray, np.ndarray], rank: np.ndarray
) -> np.ndarray:
    """The value at a rank from 0; [..., 1]."""
    bin_ = np.argmax(through > rank, axis=-1)[..., None]
    inside = np.take_along_axis(counts, bin_, -1)
    before = np.take_along_axis(through, bin_, -1) - inside
    low, high = edges[0][bin_], edges[1][bin_]
    with np.errstate(invalid="ignore", divide="ignore"):  # empty counts
        return low + (rank - before + 0.5) / inside * (high - low)


def without_each_group(counts_Gx: np.ndarray) -> np.ndarray:
    """Totals without one group at a time, for each nonempty group: [G', ...]."""
    occupied_G = counts_Gx.reshape(GROUPS, -1).any(axis=1)
    return counts_Gx.sum(axis=0) - counts_Gx[occupied_G]


def count_into(counts: np.ndarray, index_N: np.ndarray) -> None:
    """Add one at each index of the flattened counts."""
    # `np.add.at` loses more time with any other index type than the cast takes.
    np.add.at(counts.reshape(-1), index_N.astype(np.intp, copy=False), 1)
