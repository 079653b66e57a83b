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
            if isinstance(value, _NonzeroCounts):
                value = value.with_zeros()
            setattr(self, name, value)


def columns_read(*accumulators: type[Accumulator]) -> tuple[str, ...]:
    """The columns that any of these accumulators looks at, each once."""
    return tuple(dict.fromkeys(chain.from_iterable(each.READS for each in accumulators)))


def _sum(total: Any, other: Any) -> Any:
    """The sum, in place unless `total` is a number; raises a `TypeError` if the two cannot be
    added.
    """
    if isinstance(total, Accumulator):
        total.merge(other)
    elif isinstance(total, dict):
        for key, value in other.items():
            total[key] = _sum(total[key], value) if key in total else value
    elif isinstance(total, list):
        total[:] = [_sum(*pair) for pair in zip(total, other, strict=True)]
    elif total is not None or other is not None:
        total += other
    return total


def _larger(total: Any, other: Any) -> Any:
    """The elementwise maximum, in the type of `total`; NaN stays."""
    larger = np.maximum(total, other)
    return larger if isinstance(total, np.ndarray) else type(total)(larger)


class _NonzeroCounts(NamedTuple):
    """An array of counts, as its nonzero entries and their indices."""

    shape: tuple[int, ...]
    index_U: np.ndarray
    count_U: np.ndarray

    def with_zeros(self) -> np.ndarray:
        counts = np.zeros(self.shape, dtype=np.int64)
        counts.reshape(-1)[self.index_U] = self.count_U
        return counts


_LARGE = 2**12  # numbers


def _without_zeros(value: Any) -> Any:
    """Large counts as `_NonzeroCounts` if that saves more than half of their size; else the value
    unchanged.
    """
    if not isinstance(value, np.ndarray) or value.dtype != np.int64 or value.size < _LARGE:
        return value
    index_U = np.flatnonzero(value)
    if 2 * len(index_U) > value.size:
        return value
    count_U = value.reshape(-1)[index_U]
    # Most counts fit into half of the bytes.
    if abs(count_U).max(initial=0) < 2**31:
        count_U = count_U.astype(np.int32)
    return _NonzeroCounts(value.shape, index_U.astype(np.int32), count_U)
