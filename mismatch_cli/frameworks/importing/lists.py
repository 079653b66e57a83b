"""Converts Arrow list columns to flat numpy values and offsets, and back, without a Python loop
over tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def lengths_of(lists: pa.Array) -> np.ndarray:
    """Number of values in each row; 0 for a null row."""
    return (
        pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )


def is_null(array: pa.Array) -> np.ndarray:
    return np.asarray(array.is_null())


def holds_null(lists: pa.Array) -> np.ndarray:
    """Rows that are null or contain a null."""
    found_S = np.array(is_null(lists))
    values = lists.flatten()
    if values.null_count:
        found_S[rows_of(lengths_of(lists))[is_null(values)]] = True
    return found_S


def offsets_of(lengths_S: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_S, dtype=np.int64)])


def flat(lists: pa.Array) -> np.ndarray:
    """The values of all rows; a null inside a row is NaN for floats and an error for other
    types.
    """
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False))


def from_flat(
    values_T: np.ndarray, lengths_S: np.ndarray, null_S: np.ndarray | None = None
) -> pa.Array:
    """Rows of these lengths; rows in `null_S` are null and have no values."""
    offsets = pa.array(
        offsets_of(lengths_S).astype(np.int32),
        mask=None if null_S is None or not null_S.any() else np.append(null_S, False),
    )
    return pa.ListArray.from_arrays(offsets, pa.array(values_T))


def from_rows(rows: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """A list column from one array, or None, per row."""
    lengths_S = np.array([0 if row is None else len(row) for row in rows], dtype=np.int64)
    known = [row for row in rows if row is not None]
    values_T = np.concatenate(known) if known else np.empty(0, kind.to_pandas_dtype())
    return from_flat(values_T, lengths_S, np.array([row is None for row in rows], dtype=bool)).cast(
        pa.list_(kind)
    )


def rows_of(lengths_S: np.ndarray) -> np.ndarray:
    """The row of each value."""
    return np.repeat(np.arange(len(lengths_S)), lengths_S)


def ends_of(mask_T: np.ndarray, total_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last true position in each row; -1 where there is none."""
    offset_S1 = offsets_of(total_S)
    inside = np.flatnonzero(mask_T)
    low, high = np.searchsorted(inside, offset_S1[:-1]), np.searchsorted(inside, offset_S1[1:])
    any_S = high > low
    padded = np.append(inside, 0)
    first_S = np.where(any_S, padded[low] - offset_S1[:-1], -1)
    last_S = np.where(any_S, padded[high - 1] - offset_S1[:-1], -1)
    return first_S, last_S


def ranges(begin_S: np.ndarray, end_S: np.ndarray) -> np.ndarray:
    """The positions begin … end − 1 of all rows, concatenated."""
    lengths_S = end_S - begin_S
    offset_S1 = offsets_of(lengths_S)
    return np.arange(offset_S1[-1]) + np.repeat(begin_S - offset_S1[:-1], lengths_S)


def first_of_each(lists: pa.Array, lengths_S: np.ndarray) -> pa.Array:
    """The first `lengths_S` values of each row."""
    start_S = offsets_of(lengths_of(lists))[:-1]
    kept = lists.flatten().take(pa.array(ranges(start_S, start_S + lengths_S)))
    return from_flat(kept, lengths_S, is_null(lists))


def depth_of(value: Any) -> int:
    """How many lists a Python value is nested in: 2 for a matrix."""
    depth = 0
    while isinstance(value, list):
        depth, value = depth + 1, next((each for each in value if each is not None), None)
    return depth
