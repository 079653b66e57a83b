"""What every statistic over a trace is: updated batch by batch, merged in shard order, asked for its result."""

from typing import Any, ClassVar, Self

import numpy as np


class Accumulator:
    """A statistic whose attributes are sums: arrays, numbers, other accumulators, and dicts and lists of these.

    Counts and extremes are exact in any order; float sums give the same bits where shards are merged in the same order.
    `SETTINGS` are the attributes that both sides of a merge share, `LARGEST` those of which the larger one stays.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()
    LARGEST: ClassVar[tuple[str, ...]] = ()

    def merge(self, other: Self) -> None:
        """Add what another one has seen."""
        for name, value in vars(self).items():
            if name in self.LARGEST:
                setattr(self, name, _larger(value, getattr(other, name)))
            elif name not in self.SETTINGS:
                setattr(self, name, _sum(value, getattr(other, name)))


def _sum(mine: Any, theirs: Any) -> Any:
    """Their sum, in place where `mine` is no number; a `TypeError` where the two cannot be added."""
    if isinstance(mine, Accumulator):
        mine.merge(theirs)
    elif isinstance(mine, dict):
        for key, value in theirs.items():
            mine[key] = _sum(mine[key], value) if key in mine else value
    elif isinstance(mine, list):
        mine[:] = [_sum(*pair) for pair in zip(mine, theirs, strict=True)]
    elif mine is not None or theirs is not None:
        mine += theirs
    return mine


def _larger(mine: Any, theirs: Any) -> Any:
    """The larger of each, of the same type; NaN stays."""
    larger = np.maximum(mine, theirs)
    return larger if isinstance(mine, np.ndarray) else type(mine)(larger)
