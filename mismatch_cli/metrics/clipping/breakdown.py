"""Blocked tokens by bin of μ, by position and by step, and a bounded sample of judged tokens: exact counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked import Masked
from mismatch_cli.metrics.gaps import Segments
from mismatch_cli.metrics.hashing import GROUPS, sum_by_group
from mismatch_cli.metrics.kept_rows import SmallestRows
from mismatch_cli.metrics.profiles import POSITION_BINS, cut_by_position, position_bin
from mismatch_cli.metrics.volatility import CELLS, MU_BINS


class BlockedCells(Accumulator):
    """Counts for each sign, prompt group and bin: of all judged tokens in row 0, of each algorithm in the next ones."""

    def __init__(self, algorithms: int) -> None:
        self.by_mu = np.zeros((1 + algorithms, 2, GROUPS, MU_BINS), dtype=np.int64)
        self.by_position = np.zeros((1 + algorithms, 2, GROUPS, POSITION_BINS), dtype=np.int64)

    def update(self, judged: Masked) -> None:
        self._add_judged(judged)
        for row, index_U in enumerate(judged.blocked, start=1):
            if not len(index_U):
                continue
            sign_U = judged.sign(index_U)
            self._add(self.by_mu[row], sign_U * CELLS + judged.cells.cell_N[index_U])
            place_U = (sign_U * GROUPS + judged.group_N[index_U]) * POSITION_BINS + _position_bins(judged, index_U)
            self._add(self.by_position[row], place_U)

    def _add_judged(self, judged: Masked) -> None:
        """All judged tokens, which are many: positions are counted by the stretch rather than by the token."""
        starts, response, bin_, _ = cut_by_position(judged.gaps.response_offset_S1)
        pieces = Segments(judged.gaps.kept_before(starts))
        cell = judged.gaps.group_S[response] * POSITION_BINS + bin_
        place_N = judged.cells.cell_N + judged.negative_N * CELLS
        self._add(self.by_mu[0], place_N if judged.judged_N.all() else place_N[judged.judged_N])
        for sign, flags_N in enumerate((judged.positive_N, judged.negative_N)):
            counts = np.bincount(cell, weights=pieces.sum(flags_N), minlength=GROUPS * POSITION_BINS)
            self.by_position[0, sign] += counts.astype(np.int64).reshape(GROUPS, POSITION_BINS)

    @staticmethod
    def _add(counts: np.ndarray, place_U: np.ndarray) -> None:
        counts += np.bincount(place_U, minlength=counts.size).reshape(counts.shape)


def _position_bins(judged: Masked, index_U: np.ndarray) -> np.ndarray:
    """The bin of each token's distance from the first token of its response, counting masked tokens too."""
    gaps = judged.gaps
    place_U = index_U if gaps.kept is None else gaps.kept[index_U]
    return position_bin(place_U - gaps.response_offset_S1[judged.response_N[index_U]])


class StepSums(Accumulator):
    """For each step, or stretch of steps, M sums in each prompt group, float64."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.shift = 0  # a stretch holds the steps with the same step >> shift
        self.latest = 0
        self.sums: dict[int, np.ndarray] = {}  # [GROUPS, M]

    def update(self, step_S: np.ndarray, group_S: np.ndarray, sums_SM: np.ndarray) -> None:
        """Add per-response sums."""
        self.latest = max(self.latest, int(step_S.max(initial=0)))
        for step in np.unique(step_S):
            rows = np.flatnonzero(step_S == step)
            self._add(int(step) >> self.shift, sum_by_group(group_S[rows], sums_SM[rows]))
        self._shrink()

    def merge(self, other: StepSums) -> None:
        self.latest = max(self.latest, other.latest)
        while self.shift < other.shift:
            self._coarsen()
        for stretch, sums_GM in sorted(other.sums.items()):
            self._add(stretch >> (self.shift - other.shift), sums_GM)
        self._shrink()

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """First step, last step and sums [GROUPS, M] of each stretch, in order."""
        for stretch, sums_GM in sorted(self.sums.items()):
            first = stretch << self.shift
            yield first, min(first + (1 << self.shift) - 1, self.latest), sums_GM

    def _add(self, stretch: int, sums_GM: np.ndarray) -> None:
        self.sums[stretch] = self.sums[stretch] + sums_GM if stretch in self.sums else sums_GM

    def _shrink(self) -> None:
        while len(self.sums) > self.most:
            self._coarsen()

    def _coarsen(self) -> None:
        finer, self.sums = self.sums, {}
        self.shift += 1
        for stretch, sums_GM in sorted(finer.items()):
            self._add(stretch >> 1, sums_GM)


SAMPLE_TOKENS = 10_000
_VALUES = [(name, np.float32) for name in ("logp_rollout", "logp_trainer", "logp_recomputed", "advantage")]
_ROW = np.dtype([("key", np.float64), *_VALUES, ("blocked_by", np.uint64)])


class JudgedSample(Accumulator):
    """The judged tokens with the smallest hashes of response and position: the same ones in any order and sharding."""

    def __init__(self) -> None:
        self.tokens = SmallestRows(_ROW, SAMPLE_TOKENS)

    def update(self, judged: Masked) -> None:
        index_U = np.flatnonzero(judged.judged_N)
        self.tokens.offer_hashed(judged.gaps.token_hash_N[index_U], lambda chosen: _rows(judged, index_U[chosen]))

    def result(self) -> np.ndarray:
        """A structured array; `blocked_by` has bit i set where algorithm i blocks the token; NaN: not recomputed."""
        return self.tokens.rows()


def _rows(judged: Masked, index_U: np.ndarray) -> np.ndarray:
    rows = np.zeros(len(index_U), dtype=_ROW)
    gaps, recomputed = judged.gaps, judged.policies.recomputed
    rows["logp_rollout"], rows["logp_trainer"] = gaps.logq_N[index_U], gaps.logp_N[index_U]
    rows["logp_recomputed"] = np.nan if recomputed is None else recomputed.numpy()[index_U]
    rows["advantage"] = judged.advantage_N[index_U]
    rows["blocked_by"] = judged.blocked_by_N[index_U]
    return rows
