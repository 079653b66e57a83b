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
        rows = ((int(step), np.flatnonzero(step_S == step)) for step in np.unique(step_S))
        sums = {step: sum_by_group(group_S[row_U], sums_SM[row_U]) for step, row_U in rows}
        self._add(0, int(step_S.max(initial=0)), sums)

    def merge(self, other: StepSums) -> None:
        self._add(other.shift, other.latest, other.sums)

    def __iter__(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """The first step, last step and sums [GROUPS, M] of each stretch, in order."""
        for stretch, sums_GM in sorted(self.sums.items()):
            first = stretch << self.shift
            yield first, min(first + (1 << self.shift) - 1, self.latest), sums_GM

    def _add(self, shift: int, latest: int, sums: dict[int, np.ndarray]) -> None:
        self.latest = max(self.latest, latest)
        while self.shift < shift:
            self._halve()
        self._pool(sums, self.shift - shift)
        while len(self.sums) > self.most:
            self._halve()

    def _halve(self) -> None:
        finer, self.sums = self.sums, {}
        self.shift += 1
        self._pool(finer, 1)

    def _pool(self, finer: dict[int, np.ndarray], shift: int) -> None:
        for stretch, sums_GM in sorted(finer.items()):
            coarse = stretch >> shift
            self.sums[coarse] = self.sums[coarse] + sums_GM if coarse in self.sums else sums_GM
