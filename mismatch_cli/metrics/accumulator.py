"""The base of every statistic over a trace: updated batch by batch, merged in shard order, then
read.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np


class Accumulator:
    """A statistic whose attributes are sums: arrays, numbers, other accumulators, and dicts and
    lists of these.

    Counts and extremes are exact in any order; float sums give the same bits if shards are merged
    in the same order. `SETTINGS` are attributes that both sides of a merge share, `LARGEST` those
    that keep the larger value. `READS` are the columns of a trace that it looks at, besides those
    that every trace has; a batch without one of them is "not measured".
    """

    READS: ClassVar[tuple[str, ...]] = ()
    SETTINGS: ClassVar[tuple[str, ...]] = ()
    LARGEST: ClassVar[tuple[str, ...]] = ()

    def merge(self, other: Self) -> None:
        """Add another accumulator's state."""
        for name, value in vars(self).items():
            if name in self.LARGEST:
                setattr(self, name, _larger(value, getattr(other, name)))
            elif name not in self.SETTINGS:
                setattr(self, name, _sum(value, getattr(other, name)))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle counts that are mostly 0 without their zeros, to move less between processes."""
        return {name: _without_zeros(value) for name, value in vars(self).items()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value.whole() if isinstance(value, _Occupied) else value)


def columns_read(*accumulators: type[Accumulator]) -> tuple[str, ...]:
    """The columns that these look at, each once."""
    return tuple(dict.fromkeys(chain.from_iterable(each.READS for each in accumulators)))


def _sum(total: Any, part: Any) -> Any:
    """The sum, in place unless `total` is a number; raises a `TypeError` if the two cannot be
    added.
    """
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
    """The elementwise maximum, in the type of `total`; NaN stays."""
    larger = np.maximum(total, part)
    return larger if isinstance(total, np.ndarray) else type(total)(larger)


class _Occupied(NamedTuple):
    """An array of counts, as its nonzero entries and their indices."""

    shape: tuple[int, ...]
    place_U: np.ndarray
    count_U: np.ndarray

    def whole(self) -> np.ndarray:
        counts = np.zeros(self.shape, dtype=np.int64)
        counts.reshape(-1)[self.place_U] = self.count_U
        return counts


_LARGE = 2**12  # numbers


def _without_zeros(value: Any) -> Any:
    """Large counts as `_Occupied` if that saves more than half of their size; else the value
    unchanged.
    """
    if not isinstance(value, np.ndarray) or value.dtype != np.int64 or value.size < _LARGE:
        return value
    place_U = np.flatnonzero(value)
    if 2 * len(place_U) > value.size:
        return value
    count_U = value.reshape(-1)[place_U]
    small = abs(count_U).max(initial=0) < 2**31
    return _Occupied(
        value.shape, place_U.astype(np.int32), count_U.astype(np.int32) if small else count_U
    )
