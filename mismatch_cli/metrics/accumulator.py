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


def _sum(total: Any, part: Any) -> Any:
    """Their sum, in place where `total` is no number; a `TypeError` where the two cannot be added."""
    if isinstance(total, Accumulator):
        total.merge(part)
    elif isinstance(total, dict):
        for key, value in part.items():
            total[key] = _sum(total[key], value) if key in total else value
    elif isinstance(total, list):
        total[:] = [_sum(*pair) for pair in zip(total, part, strict=True)]
    elif total is not None or part is not None:
        total += part
    return total


def _larger(total: Any, part: Any) -> Any:
    """The larger of each, of the same type; NaN stays."""
    larger = np.maximum(total, part)
    return larger if isinstance(total, np.ndarray) else type(total)(larger)
