"""Sums over consecutive tokens: of a response, or of a stretch of positions in it."""

from __future__ import annotations

import numpy as np


class Segments:
    """Consecutive pieces of the counted tokens, some perhaps empty."""

    def __init__(self, offset_S1: np.ndarray) -> None:
        self.length_S = np.diff(offset_S1)
        self._filled = np.flatnonzero(self.length_S)
        self._starts = offset_S1[self._filled]

    def sum(self, values_N: np.ndarray) -> np.ndarray:
        """Σ over each piece, in float64; 0 for an empty one."""
        sums_S = np.zeros(len(self.length_S))
        if len(self._filled):
            sums_S[self._filled] = np.add.reduceat(values_N, self._starts, dtype=np.float64)
        return sums_S
