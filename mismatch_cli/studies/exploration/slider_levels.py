"""What an algorithm blocks at each position of its slider: counts over traces, and the level of
each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice, Needs, apply_masks
from mismatch_cli.rules.algorithms.algorithm import Algorithm, keep_T
from mismatch_cli.rules.algorithms.masks_and_factors import Mask, Rule
from mismatch_cli.rules.algorithms.sliders import Position, slider_positions
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.rules.joint_batches import BatchValues
from mismatch_cli.studies.exploration.explored import BlockedLevels

STAYS = "moves with --compare"


@dataclass(frozen=True)
class SliderAlgorithms:
    """The algorithms that judge traces, what their masks need, and which of them have thresholds
    that move.

    `first_pass` is the result of the first pass of rules on whole batches.
    """

    algorithms: Sequence[Algorithm]
    needs: Needs
    first_pass: Mapping[Rule, BatchValues]
    compared: Sequence[Algorithm]
    moved: Sequence[Algorithm]

    @property
    def signs(self) -> tuple[str, ...]:
        """The sign that each slice of tokens is judged under; without advantages, both."""
        return ("",) if self.needs.advantages else (">", "<")

    def sliders(self) -> dict[SliderKey, Slider]:
        """A slider for each algorithm and sign; algorithms with equal masks share it."""
        moved = {algorithm.masks for algorithm in self.moved}
        sliders = {}
        for algorithm in self.algorithms:
            for place, sign in enumerate(self.signs):
                key = SliderKey(algorithm.masks, sign)
                sliders[key] = Slider(algorithm, place, algorithm.masks in moved)
        return sliders

    def slices(self, batch: TokenBatch, trace: int) -> Iterator[list[MaskedSlice]]:
        """Slices of complete responses, a `MaskedSlice` per sign; none if a column is missing."""
        if self.algorithms and not self.needs.first_missing_in(batch):
            yield from apply_masks(batch, self.needs, (), self.first_pass, trace)


class SliderKey(NamedTuple):
    """Masks, and the sign that they judge under."""

    masks: tuple[Mask, ...]
    sign: str


class Slider:
    """An algorithm at every position of its slider; only at its own unless it `moves`, or if its
    blocked share does not fall.
    """

    def __init__(self, algorithm: Algorithm, place: int, moves: bool) -> None:
        self._place = place  # of the sign among those of a slice
        self._positions: list[Position] = slider_positions(algorithm)
        # By identity, as another position may have equal thresholds after rounding
        self._published = [moved is algorithm for moved, _ in self._positions].index(True)
        self._judged = np.zeros(2, dtype=np.int64)  # A > 0, A < 0
        self._blocked = np.zeros((2, len(self._positions)), dtype=np.int64)
        self._unmoved = "" if len(self._positions) > 1 else "no threshold to move"
        if not moves and not self._unmoved:
            self._keep_published(STAYS)

    def count(self, cases: Sequence[MaskedSlice]) -> np.ndarray:
        """Add the tokens of a slice; returns which of them are blocked at the algorithm's own
        thresholds.
        """
        masked = cases[self._place]
        blocked_PN = self._blocked_PN(masked)
        own_N: np.ndarray = blocked_PN[self._published]
        # A level says only up to where a token is blocked: none may be blocked again beyond it.
        if (blocked_PN[:-1] < blocked_PN[1:]).any():
            self._keep_published("not ordered by its threshold")
            blocked_PN = own_N[None]
        for row, sign_N in enumerate((masked.positive_N, masked.negative_N)):
            self._judged[row] += np.count_nonzero(sign_N)
            self._blocked[row] += np.count_nonzero(blocked_PN & sign_N, axis=1)
        return own_N

    def _keep_published(self, reason: str) -> None:
        own = slice(self._published, self._published + 1)
        self._positions = self._positions[own]
        self._blocked = self._blocked[:, own]
        self._published = 0
        self._unmoved = reason

    def fill(self, level_T: np.ndarray, cases: Sequence[MaskedSlice]) -> None:
        """Write the levels of a slice's judged tokens into those of its batch."""
        masked = cases[self._place]
        level_N = self._blocked_PN(masked).sum(axis=0)
        level_T[masked.gaps.index_N[masked.judged_N]] = level_N[masked.judged_N]

    def result(self, algorithm: Algorithm, sign: str, level_T: np.ndarray) -> BlockedLevels:
        """The counts over the traces of an algorithm with these masks, with the levels of the
        tokens on a page.
        """
        return BlockedLevels(
            algorithm.name,
            sign,
            tuple(thresholds for _, thresholds in self._positions),
            self._published,
            self._judged,
            self._blocked,
            level_T,
            self._unmoved,
        )

    def _blocked_PN(self, masked: MaskedSlice) -> np.ndarray:
        return np.stack(
            [~keep_T(moved, masked.policies, masked.advantage_N) for moved, _ in self._positions]
        )
