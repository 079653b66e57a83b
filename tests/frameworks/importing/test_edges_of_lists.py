"""List columns as flat values and lengths: small columns by hand, with nulls and empty rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.frameworks.importing import lists as _lists

INTS = pa.list_(pa.int32())
ROWS = pa.array([[3, 4], None, [], [5, None, 6]], INTS)


def test_lengths_nulls_and_places_of_rows():
    lengths_S = _lists.lengths_of(ROWS)
    assert lengths_S.tolist() == [2, 0, 0, 3] and lengths_S.dtype == np.int64
    assert _lists.is_null(ROWS).tolist() == [False, True, False, False]
    assert _lists.holds_null(ROWS).tolist() == [False, True, False, True]
    assert _lists.offsets_of(lengths_S).tolist() == [0, 2, 2, 2, 5]
    assert _lists.rows_of(lengths_S).tolist() == [0, 0, 3, 3, 3]
    assert _lists.position_in_row(lengths_S).tolist() == [0, 1, 0, 1, 2]


def test_lists_are_made_of_flat_values():
    made = _lists.from_flat(np.array([3, 4, 5], np.int32), np.array([2, 0, 0, 1]))
    assert made.to_pylist() == [[3, 4], [], [], [5]]
    null_S = np.array([False, True, False, False])
    made = _lists.from_flat(np.array([3, 4, 5], np.int32), np.array([2, 0, 0, 1]), null_S)
    assert made.to_pylist() == [[3, 4], None, [], [5]]
    made = _lists.from_rows([np.array([3.0]), None, np.array([])], pa.float32())
    assert made.to_pylist() == [[3.0], None, []] and made.type == pa.list_(pa.float32())
    assert _lists.from_rows([], pa.int32()).to_pylist() == []


def test_the_ends_of_a_mask_are_its_first_and_last_true_positions():
    """In the first row, in none of an empty one, at both ends, and nowhere behind the last."""
    flags = [0, 1, 1, 0, 1, 0, 1, 0, 0, 1, 0]
    first_S, last_S = _lists.ends_of(np.array(flags, bool), np.array([4, 0, 3, 2, 1, 1]))
    assert first_S.tolist() == [1, -1, 0, -1, 0, -1]
    assert last_S.tolist() == [2, -1, 2, -1, 0, -1]


def test_ranges_and_the_beginnings_of_rows():
    assert _lists.ranges(np.array([2, 7, 9]), np.array([5, 7, 11])).tolist() == [2, 3, 4, 9, 10]
    first = _lists.first_of_each(ROWS, np.array([1, 0, 0, 2]))
    assert first.to_pylist() == [[3], None, [], [5, None]]
    chosen = _lists.select_rows({"a": ROWS}, np.array([True, False, False, True]))
    assert chosen["a"].to_pylist() == [[3, 4], [5, None, 6]]


@pytest.mark.parametrize(
    ("value", "first", "depth"),
    [
        ([], None, 1),
        ([None, 0, 2], 0, 1),
        ([None, [7]], [7], 2),
        ([[], [[1]]], [], 2),
        ([[[1]]], [[1]], 3),
        ([None], None, 1),
    ],
)
def test_a_value_is_as_deep_as_its_first(value, first, depth):
    assert _lists.first_value(value) == first
    assert _lists.depth_of(value) == depth and _lists.depth_of(7) == 0
