"""The tokens that lead lists: the largest gaps, and fair samples of what algorithms block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import numpy as np

from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.retained_rows import SmallestRows
from mismatch_cli.studies.exploration.passages import Leader

LEADERS = 500  # of each list
_NAMES = ("change", "gap", "gap_b", "probability", "only", "blocked")
_ROW = np.dtype(
    [
        ("key", np.float64),
        ("response", np.int64),
        ("position", np.int64),
        ("length", np.int64),
    ]
)


class Leaders:
    """The leaders of each list in one pass, independent of order and sharding, and how many tokens
    each list was taken of.

    A sample is of the tokens with the smallest hashes of response and position.
    """

    def __init__(self) -> None:
        self._rows = {name: SmallestRows(_ROW, LEADERS) for name in _NAMES}
        self.population: Counter[str] = Counter()

    def measure(self, gaps: TokenGaps, sizes: Mapping[str, np.ndarray], first: int) -> None:
        """Offer the largest of a slice's tokens to each list by its sizes `_N`; the batch begins
        with response number `first`.
        """
        for name, size_N in sizes.items():
            self._rows[name].offer_largest(size_N, partial(_rows, gaps, first))
            self.population[name] += len(size_N)

    def draw(self, name: str, blocked_N: np.ndarray, gaps: TokenGaps, first: int) -> None:
        """Offer blocked tokens to a list, which retains a fair sample of them."""
        index_U = np.flatnonzero(blocked_N)
        # A hash of its place decides whether a token stays, so no order of reading changes that.
        hash_U = gaps.token_hash_N[index_U]
        self._rows[name].offer_hashed(hash_U, lambda chosen: _rows(gaps, first, index_U[chosen]))
        self.population[name] += len(index_U)

    def lists(self) -> Mapping[str, list[Leader]]:
        """The leaders of each list that has any, in order."""
        lists = {}
        for name, smallest in self._rows.items():
            rows = smallest.rows()
            if len(rows):
                lists[name] = list(map(Leader._make, rows[list(Leader._fields)].tolist()))
        return lists


def _rows(gaps: TokenGaps, first: int, index: np.ndarray) -> np.ndarray:
    """The rows of counted tokens of a slice, without their key."""
    rows = np.zeros(len(index), dtype=_ROW)
    response, rows["position"] = gaps.place_of(index)
    rows["response"] = first + gaps.first + response
    rows["length"] = np.diff(gaps.response_offset_S1)[response]
    return rows
