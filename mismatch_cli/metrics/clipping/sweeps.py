"""What any threshold would block, from histograms of each family's statistic.

A family is a one-sided mask on trainer/rollout: it blocks a token if its statistic, positive if the
update moves π further away, is above the threshold. So one histogram covers all thresholds at once,
exactly at the edges of its bins (3 % apart).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.base.json_form import beside
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.estimate import (
    FEW_AT_EDGE,
    SIGNED,
    Estimate,
    grouped_ratio,
    grouped_share,
    point_estimate,
)
from mismatch_cli.metrics.histograms import LogBins

BINS = LogBins(-8, 7)
LOWEST, HIGHEST = float(BINS.edges[0][1]), float(BINS.edges[0][-1])  # thresholds of a sweep
BELOW_SWEEP = f"below the sweep, {LOWEST:.2g}"
ABOVE_SWEEP = f"above the sweep, {HIGHEST:.3g}"
_EVERY = 8  # bins per row of the table: four rows for each doubling of the threshold
FAMILIES = {
    "ratio_clip": "ratio-clip",
    "binary_tv": "binary-tv",
    "binary_kl": "binary-kl",
    "top_k_tv": "top-k-tv",
    "top_k_kl": "top-k-kl",
}


@dataclass(frozen=True)
class ThresholdRow:
    """The shares of tokens and of the update that a threshold blocks; KL in nats."""

    threshold: float
    blocked: Estimate
    lost: Estimate


@dataclass(frozen=True)
class CapRow:
    """The share of tokens whose ratio is above a cap, and of the update that it takes."""

    cap: float
    share: Estimate
    lost: Estimate

    @property
    def threshold(self) -> float:
        """The cap, along which a sweep goes."""
        return self.cap

    @property
    def blocked(self) -> Estimate:
        """The share of tokens that the cap holds back."""
        return self.share


@dataclass(frozen=True, kw_only=True)
class SweepTables:
    """A table for each family of masks, by name, and one for the cap of the weight."""

    families: Mapping[str, Sequence[ThresholdRow]] = beside()
    cap: Sequence[CapRow]

    def rows(self, name: str) -> Sequence[ThresholdRow | CapRow]:
        """The table of a family, empty where it was not measured, or of `cap`."""
        return self.cap if name == "cap" else self.families.get(name, ())


class Sweeps(Accumulator):
    """For each family, tokens and Σ r·|A| by bin of the outward statistic; for r above 1, also
    Σ|A|.
    """

    SETTINGS = ("top_k",)

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        names = [name for name in FAMILIES if top_k or not name.startswith("top_k")]
        self.sums = {name: np.zeros((2, GROUPS, BINS.count)) for name in names}
        self.sums["cap"] = np.zeros((3, GROUPS, BINS.count))
        self.total = np.zeros((2, GROUPS))  # judged tokens, and their Σ r·|A|

    def update(self, judged: MaskedSlice) -> None:
        judged.add_by_group(self.total[0], judged.judged_N)
        judged.add_by_group(self.total[1], judged.update_N)
        for name, sums in self.sums.items():
            index_U, outward_U = _outward(judged, name, self.top_k)
            cell_U = judged.group_N[index_U] * BINS.count + BINS.index(outward_U)
            flat = sums.reshape(len(sums), -1)  # a view, with one cell for each group and bin
            np.add.at(flat[0], cell_U, 1.0)
            np.add.at(flat[1], cell_U, judged.update_N[index_U])
            if name == "cap":
                np.add.at(flat[2], cell_U, judged.abs_advantage_N[index_U].astype(np.float64))

    def result(self, prompts: int) -> SweepTables:
        return SweepTables(
            families={name: self._thresholds(name, prompts) for name in self.families},
            cap=self._caps(prompts),
        )

    @property
    def families(self) -> list[str]:
        """The families that the trace allows, by name."""
        return [name for name in self.sums if name in FAMILIES]

    def _thresholds(self, name: str, prompts: int) -> list[ThresholdRow]:
        counts, updates = _from_bin_up(self.sums[name])
        highest = 1.0 if name.endswith("tv") else np.inf
        return [ThresholdRow(*row) for row in self._rows(counts, updates, (0.0, highest), prompts)]

    def _caps(self, prompts: int) -> list[CapRow]:
        """The cap C takes Σ (r − C)·|A| from the tokens with r above it."""
        counts, updates, advantages = _from_bin_up(self.sums["cap"])
        updates = updates - BINS.edges[0] * advantages
        return [CapRow(*row) for row in self._rows(counts, updates, (1.0, np.inf), prompts)]

    def _rows(
        self, counts: np.ndarray, updates: np.ndarray, ends: tuple[float, float], prompts: int
    ) -> Iterator[tuple[float, Estimate, Estimate]]:
        """The edge of every eighth bin between these ends with both shares, up to the first one
        with nothing left above it.
        """
        tokens_G, update_G = self.total
        occupied_B = np.flatnonzero(counts.any(axis=0))
        last = int(occupied_B[-1]) if len(occupied_B) else 0
        for b in range(1, min(last + 2 * _EVERY, BINS.count), _EVERY):
            edge = float(BINS.edges[0][b])
            if ends[0] <= edge <= ends[1]:
                blocked = grouped_share(counts[:, b], tokens_G, prompts)
                lost = grouped_share(updates[:, b], update_G, prompts)
                yield edge, blocked, lost

    def threshold_for(self, name: str, blocked_G: np.ndarray, prompts: int) -> Estimate:
        """The threshold of a family that blocks as many tokens as given, by group of prompts.

        Its interval contains every threshold at which the two shares may be equal: where the 95 %
        interval of their difference contains 0 (Woodruff 1952, doi 10.1080/01621459.1952.10483443),
        to the next bin edge.
        """
        counts_GB = self.sums[name][0]
        value = _threshold(counts_GB.sum(axis=0), blocked_G.sum())
        if not LOWEST <= value <= HIGHEST:
            return Estimate(None, note=BELOW_SWEEP if value < LOWEST else ABOVE_SWEEP)
        more_GB = _from_bin_up(counts_GB) - blocked_G[:, None]

        def difference(b: int) -> Estimate:
            return grouped_ratio(more_GB[:, b], self.total[0], prompts, SIGNED)

        # The nearest edges below and above at which the interval of the difference excludes 0.
        # Bisection finds them, since an interval at every edge would take long.
        edge_B = BINS.edges[0]
        middle = int(edge_B.searchsorted(value))
        below = bisect_left(range(middle), True, key=lambda b: not above_0(difference(b).low)) - 1
        above = bisect_left(
            range(BINS.count), True, middle, key=lambda b: above_0(difference(b).high, -1)
        )
        if below < 1 or above >= BINS.count - 1:
            return point_estimate(value, FEW_AT_EDGE)
        return Estimate(value, float(edge_B[below]), float(edge_B[above]))


def above_0(limit: float | None, sign: int = 1) -> bool:
    """Whether an end of an interval, times `sign`, is above 0; without an interval it is not."""
    return limit is not None and sign * limit > 0


def _outward(judged: MaskedSlice, name: str, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens above the lowest edge, and their statistic less one unit in the last place.

    A mask blocks values *above* its threshold, but a bin holds values at or above its edge.
    """
    if name == "cap":
        outward_N = np.where(judged.judged_N, judged.ratio_N, 0)
        lowest = np.float32(1)
    else:
        statistic_N = judged.statistic(FAMILIES[name], top_k)
        # An infinite divergence times A = 0 is NaN, which is above nothing
        with np.errstate(invalid="ignore"):
            outward_N = statistic_N * np.sign(judged.advantage_N)
        lowest = np.float32(BINS.edges[0][1])
    index_U = np.flatnonzero(outward_N > lowest)
    return index_U, np.nextafter(outward_N[index_U].astype(np.float32), np.float32(0))


def _from_bin_up(values_xB: np.ndarray) -> np.ndarray:
    """Σ from each bin to the last one."""
    return values_xB[..., ::-1].cumsum(axis=-1)[..., ::-1]


def _threshold(counts_B: np.ndarray, blocked: float) -> float:
    """The value with `blocked` tokens above it, of which there is one at least, linear within a
    bin; 0 or infinite if only a threshold below or above the sweep has that.
    """
    above_B = _from_bin_up(counts_B)
    if blocked > above_B[1]:
        return 0.0
    if blocked < above_B[-1]:
        return np.inf
    b = int(np.flatnonzero(above_B >= blocked)[-1])
    low, high = BINS.edges[0][b], BINS.edges[1][b]
    share_below = (above_B[b] - blocked) / counts_B[b]
    return float(low + share_below * (high - low))
