"""Arrow's columns and numpy: tables to single arrays, list columns to flat values and offsets, and
back, without a Python loop over tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.trace import foreign_values


def columns_of(table: pa.Table) -> dict[str, pa.Array]:
    """The columns of a table, each as one array."""
    return {name: foreign_values.single(table.column(name)) for name in table.column_names}


def select_rows(columns: Mapping[str, pa.Array], keep_S: np.ndarray) -> dict[str, pa.Array]:
    """The columns without the rows whose flag is not set."""
    keep = pa.array(keep_S)
    return {name: column.filter(keep) for name, column in columns.items()}


def lengths_of(lists: pa.Array) -> np.ndarray:
    """Number of values in each row; 0 for a null row."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def is_null(array: pa.Array) -> np.ndarray:
    """Flags of the null rows."""
    return np.asarray(array.is_null())


def holds_null(lists: pa.Array) -> np.ndarray:
    """Flags of the rows that are null or contain a null."""
    null_S = np.array(is_null(lists))
    values = lists.flatten()
    if values.null_count:
        null_S[rows_of(lengths_of(lists))[is_null(values)]] = True
    return null_S


def offsets_of(lengths_S: np.ndarray) -> np.ndarray:
    """Where each row begins among the flat values, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(lengths_S, dtype=np.int64)])


def position_in_row(lengths_S: np.ndarray) -> np.ndarray:
    """The position of each value in its row, from 0."""
    offset_S1 = offsets_of(lengths_S)
    return np.arange(offset_S1[-1]) - np.repeat(offset_S1[:-1], lengths_S)


def flat(lists: pa.Array) -> np.ndarray:
    """The values of all rows; a null inside a row is NaN for floats and an error for other
    types.
    """
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False))


def from_flat(
    values_T: np.ndarray, lengths_S: np.ndarray, null_S: np.ndarray | None = None
) -> pa.Array:
    """Rows of these lengths; rows in `null_S` are null and have no values."""
    null_S1 = None
    if null_S is not None and null_S.any():
        # Arrow marks a null row by a null in its offsets, of which there is one more than rows.
        null_S1 = np.append(null_S, False)
    offsets = pa.array(offsets_of(lengths_S).astype(np.int32), mask=null_S1)
    return pa.ListArray.from_arrays(offsets, pa.array(values_T))


def from_rows(rows: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """A list column with one row per array, null where that is None; `kind` is that of a value."""
    empty = np.empty(0, kind.to_pandas_dtype())
    arrays = [empty if row is None else row for row in rows]
    null_S = np.array([row is None for row in rows], dtype=bool)
    lengths_S = np.array(list(map(len, arrays)), dtype=np.int64)
    # numpy joins at least one array, also for a column without rows.
    return from_flat(np.concatenate([*arrays, empty]), lengths_S, null_S).cast(pa.list_(kind))


def rows_of(lengths_S: np.ndarray) -> np.ndarray:
    """The row of each value."""
    return np.repeat(np.arange(len(lengths_S)), lengths_S)


def ends_of(mask_T: np.ndarray, total_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last true position in each row; -1 where there is none."""
    offset_S1 = offsets_of(total_S)
    true_N = np.flatnonzero(mask_T)
    # `low` and `high` delimit the true positions of each row.
    low_S = np.searchsorted(true_N, offset_S1[:-1])
    high_S = np.searchsorted(true_N, offset_S1[1:])
    any_S = high_S > low_S
    # `low` of a row behind the last true position is the end: one more entry keeps it inside.
    padded = np.append(true_N, 0)
    first_S = np.where(any_S, padded[low_S] - offset_S1[:-1], -1)
    last_S = np.where(any_S, padded[high_S - 1] - offset_S1[:-1], -1)
    return first_S, last_S


def ranges(begin_S: np.ndarray, end_S: np.ndarray) -> np.ndarray:
    """The positions begin … end − 1 of all rows, concatenated."""
    lengths_S = end_S - begin_S
    offset_S1 = offsets_of(lengths_S)
    return np.arange(offset_S1[-1]) + np.repeat(begin_S - offset_S1[:-1], lengths_S)


def first_of_each(lists: pa.Array, lengths_S: np.ndarray) -> pa.Array:
    """The first `lengths_S` values of each row."""
    start_S = offsets_of(lengths_of(lists))[:-1]
    values = lists.flatten().take(pa.array(ranges(start_S, start_S + lengths_S)))
    return from_flat(values, lengths_S, is_null(lists))


def first_value(values: Sequence[Any]) -> Any:
    """The first of some Python values that is not None; None if there is none."""
    for value in values:
        if value is not None:
            return value
    return None


def depth_of(value: Any) -> int:
    """How many lists a Python value is nested in: 2 for a matrix."""
    depth = 0
    while isinstance(value, list):
        value = first_value(value)
        depth += 1
    return depth
