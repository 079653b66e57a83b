"""Blocked tokens by sign of the advantage and bin of μ, and by position in the response: exact counts."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.cells import CELLS, MU_BINS
from mismatch_cli.metrics.clipping.judged import Judged
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.positions import BINS as POSITION_BINS
from mismatch_cli.metrics.positions import position_bin


class BlockedCells:
    """Counts for each sign, prompt group and bin: of all judged tokens in row 0, of each algorithm in the next ones."""

    def __init__(self, algorithms: int) -> None:
        self.by_mu = np.zeros((1 + algorithms, 2, GROUPS, MU_BINS), dtype=np.int64)
        self.by_position = np.zeros((1 + algorithms, 2, GROUPS, POSITION_BINS), dtype=np.int64)

    def update(self, judged: Judged) -> None:
        position_N = _position_bins(judged)
        group_N = judged.cells.cell_N // MU_BINS
        for row, index_U in enumerate((np.flatnonzero(judged.judged_N), *judged.blocked)):
            sign_U = judged.sign(index_U)
            mu_U = sign_U * CELLS + judged.cells.cell_N[index_U]
            self.by_mu[row] += np.bincount(mu_U, minlength=2 * CELLS).reshape(self.by_mu.shape[1:])
            place_U = (sign_U * GROUPS + group_N[index_U]) * POSITION_BINS + position_N[index_U]
            counts = np.bincount(place_U, minlength=2 * GROUPS * POSITION_BINS)
            self.by_position[row] += counts.reshape(self.by_position.shape[1:])

    def merge(self, other: BlockedCells) -> None:
        self.by_mu += other.by_mu
        self.by_position += other.by_position


def _position_bins(judged: Judged) -> np.ndarray:
    """The bin of each token's distance from the first token of its response, counting masked tokens too."""
    gaps = judged.gaps
    place_N = np.arange(gaps.response_offset_S1[-1]) if gaps.kept is None else gaps.kept
    return position_bin(place_N - gaps.per_token(gaps.response_offset_S1[:-1]))
