"""One number of a framework's dashboard: its name there, what it is made of, and where that is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mismatch_cli.dialects._moments import mean
from mismatch_cli.dialects._quantities import Quantity

ENGINE_GAP, CURRENT, UPDATE = "mismatch", "total", "staleness"  # pairs of metrics/pairs.py
COMPARES = {
    ENGINE_GAP: ("recomputed", "rollout"),
    CURRENT: ("trainer", "rollout"),
    UPDATE: ("trainer", "recomputed"),
}


@dataclass(frozen=True)
class Line:
    """A metric of a framework: `reduce` of the quantities `of`, or a metric of `metrics/gap_table.py`.

    `pair` says which two policies the framework compares; in the formula π is the first of them and μ the second.
    `needs` are columns of the batch beside the log-probabilities. Lines with the same `word` go by one name in several
    frameworks and are different numbers.
    """

    name: str
    pair: str
    formula: str
    source: str  # the file that computes it
    of: Quantity | tuple[Quantity, ...] = ()
    reduce: Callable[..., float] = mean
    metric: str = ""
    note: str = ""
    word: str = ""
    needs: tuple[str, ...] = ()

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        return self.of if isinstance(self.of, tuple) else (self.of,)

    @property
    def compares(self) -> str:
        return " / ".join(COMPARES[self.pair])
