"""The one way to merge that every accumulator shares."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.accumulator import _LARGE, Accumulator, _without_zeros


class _Sums(Accumulator):
    SETTINGS = ("bins",)
    LARGEST = ("most", "largest")

    def __init__(self, value: int) -> None:
        self.bins, self.most, self.largest = 3, float(value), np.array([value, 0])
        self.count, self.by_name, self.parts = value, {value: value, 0: 1}, [np.full(2, value)]


def test_everything_except_settings_and_largest_is_added() -> None:
    first = _Sums(1)
    array = first.parts[0]
    first.merge(_Sums(5))
    assert (first.bins, first.most, first.count) == (3, 5.0, 6) and type(first.most) is float
    assert first.largest.tolist() == [5, 0] and first.by_name == {1: 1, 5: 5, 0: 2}
    assert first.parts[0] is array and array.tolist() == [6, 6]


def test_values_that_cannot_be_added_are_refused() -> None:
    first, other = _Sums(1), _Sums(2)
    first.count = other.count = object()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        first.merge(other)


def test_counts_beyond_32_bits_are_pickled_whole() -> None:
    for largest in (2**31 - 1, 2**31, 2**40):
        counts = np.zeros((2, _LARGE // 2), dtype=np.int64)
        counts[1, 3], counts[0, 0] = largest, -largest
        np.testing.assert_array_equal(_without_zeros(counts).with_zeros(), counts)
