"""Blocked tokens by sign of the advantage and bin of μ, and by position in the response: exact counts."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.cells import CELLS, MU_BINS
from mismatch_cli.metrics.clipping.judged import Judged
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.positions import BINS as POSITION_BINS
from mismatch_cli.metrics.positions import cut_by_position, position_bin
from mismatch_cli.metrics.segments import Segments


class BlockedCells:
    """Counts for each sign, prompt group and bin: of all judged tokens in row 0, of each algorithm in the next ones."""

    def __init__(self, algorithms: int) -> None:
        self.by_mu = np.zeros((1 + algorithms, 2, GROUPS, MU_BINS), dtype=np.int64)
        self.by_position = np.zeros((1 + algorithms, 2, GROUPS, POSITION_BINS), dtype=np.int64)

    def update(self, judged: Judged) -> None:
        self._add_judged(judged)
        for row, index_U in enumerate(judged.blocked, start=1):
            if not len(index_U):
                continue
            sign_U = judged.sign(index_U)
            self._add(self.by_mu[row], sign_U * CELLS + judged.cells.cell_N[index_U])
            place_U = (sign_U * GROUPS + judged.group_N[index_U]) * POSITION_BINS + _position_bins(judged, index_U)
            self._add(self.by_position[row], place_U)

    def _add_judged(self, judged: Judged) -> None:
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

    def merge(self, other: BlockedCells) -> None:
        self.by_mu += other.by_mu
        self.by_position += other.by_position


def _position_bins(judged: Judged, index_U: np.ndarray) -> np.ndarray:
    """The bin of each token's distance from the first token of its response, counting masked tokens too."""
    gaps = judged.gaps
    place_U = index_U if gaps.kept is None else gaps.kept[index_U]
    return position_bin(place_U - gaps.response_offset_S1[judged.response_N[index_U]])
