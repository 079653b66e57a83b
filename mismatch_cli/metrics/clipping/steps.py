"""Sums by training step and prompt group, in bounded memory: many steps are held as stretches of 2, 4, 8 … steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mismatch_cli.metrics.hashing import sum_by_group


class StepSums:
    """For each step, or stretch of steps, M sums in each prompt group, float64."""

    def __init__(self, width: int, most: int) -> None:
        self.width, self.most = width, most
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
