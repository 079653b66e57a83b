"""Sums by training step in bounded memory: neighbouring steps are pooled if there are many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mismatch_cli.base.hashing import sum_by_group
from mismatch_cli.metrics.accumulator import Accumulator


class StepSums(Accumulator):
    """M sums per prompt group for each step or stretch of steps, float64."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.shift = 0  # a stretch holds the steps with the same step >> shift
        self.latest = 0
        self.sums: dict[int, np.ndarray] = {}  # [GROUPS, M]

    def update(self, step_S: np.ndarray, group_S: np.ndarray, sums_SM: np.ndarray) -> None:
        """Add per-response sums."""
        sums = {}
        for step in np.unique(step_S).tolist():
            responses = np.flatnonzero(step_S == step)
            sums[step] = sum_by_group(group_S[responses], sums_SM[responses])
        self._add(0, int(step_S.max(initial=0)), sums)

    def merge(self, other: StepSums) -> None:
        self._add(other.shift, other.latest, other.sums)

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """The first step, last step and sums [GROUPS, M] of each stretch, in order."""
        for stretch, sums_GM in sorted(self.sums.items()):
            first = stretch << self.shift
            last = first + (1 << self.shift) - 1
            yield first, min(last, self.latest), sums_GM

    def _add(self, shift: int, latest: int, sums: dict[int, np.ndarray]) -> None:
        """Add sums by `step >> shift`; both sides come to the coarser of their stretches first."""
        self.latest = max(self.latest, latest)
        while self.shift < shift:
            self._halve()
        self._pool(sums, self.shift - shift)
        while len(self.sums) > self.most:
            self._halve()

    def _halve(self) -> None:
        """Pool every two neighbouring stretches."""
        finer = self.sums
        self.sums = {}
        self.shift += 1
        self._pool(finer, 1)

    def _pool(self, finer: dict[int, np.ndarray], shift: int) -> None:
        """Add the sums of stretches that are 2^shift times shorter."""
        for stretch, sums_GM in sorted(finer.items()):
            coarse = stretch >> shift
            # A new array, since these may be the sums of another summary, which keeps its own.
            if coarse in self.sums:
                sums_GM = self.sums[coarse] + sums_GM
            self.sums[coarse] = sums_GM
