"""What every accumulator shares: one way to merge."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.accumulator import Accumulator


class _Sums(Accumulator):
    SETTINGS = ("bins",)
    LARGEST = ("most", "largest")

    def __init__(self, value: int) -> None:
        self.bins, self.most, self.largest = 3, float(value), np.array([value, 0])
        self.count, self.by_name, self.parts = value, {value: value, 0: 1}, [np.full(2, value)]


def test_everything_is_added_but_settings_and_the_largest() -> None:
    one = _Sums(1)
    array = one.parts[0]
    one.merge(_Sums(5))
    assert (one.bins, one.most, one.count) == (3, 5.0, 6) and type(one.most) is float
    assert one.largest.tolist() == [5, 0] and one.by_name == {1: 1, 5: 5, 0: 2}
    assert one.parts[0] is array and array.tolist() == [6, 6]


def test_what_cannot_be_added_is_refused() -> None:
    one, other = _Sums(1), _Sums(2)
    one.count = other.count = object()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        one.merge(other)
