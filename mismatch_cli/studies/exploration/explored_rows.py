"""Which responses of a trace are explored, and what their batches hold besides what it recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mismatch_cli.rules.batch import TokenBatch


def _as_recorded(batch: TokenBatch, _row_S: np.ndarray) -> TokenBatch:
    return batch


@dataclass(frozen=True)
class ExploredRows:
    """By default all responses, as recorded.

    `completed` gets a batch and the rows of its responses in the trace; it may replace columns, not
    responses or tokens.
    """

    explored_S: np.ndarray | None = None  # bool, in the order of the trace's files; None: all
    completed: Callable[[TokenBatch, np.ndarray], TokenBatch] = _as_recorded

    def within(self, first: int, rows: int) -> np.ndarray:
        """The explored ones of `rows` rows that begin at row `first` of the trace, by index among
        these.
        """
        if self.explored_S is None:
            return np.arange(rows)
        return np.flatnonzero(self.explored_S[first : first + rows])
