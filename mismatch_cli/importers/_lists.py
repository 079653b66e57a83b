"""List columns of Arrow as flat numpy values and offsets, and back: nothing here runs once per token in Python."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def lengths_of(lists: pa.Array) -> np.ndarray:
    """How many values each row holds; a null row holds none."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def is_null(array: pa.Array) -> np.ndarray:
    return np.asarray(array.is_null())


def holds_null(lists: pa.Array) -> np.ndarray:
    """Rows that are null, or have a null among their values."""
    found_S = np.array(is_null(lists))
    values = lists.flatten()
    if values.null_count:
        found_S[rows_of(lengths_of(lists))[is_null(values)]] = True
    return found_S


def offsets_of(lengths_S: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_S, dtype=np.int64)])


def flat(lists: pa.Array) -> np.ndarray:
    """The values of all rows; a null inside a row is NaN among floats, and an error among others."""
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False))


def from_flat(values_T: np.ndarray, lengths_S: np.ndarray, null_S: np.ndarray | None = None) -> pa.Array:
    """Rows of these lengths; where `null_S` says so, the row is null and has no values."""
    offsets = pa.array(
        offsets_of(lengths_S).astype(np.int32),
        mask=None if null_S is None or not null_S.any() else np.append(null_S, False),
    )
    return pa.ListArray.from_arrays(offsets, pa.array(values_T))


def from_rows(rows: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """A list column of one array, or nothing, per row."""
    lengths_S = np.array([0 if row is None else len(row) for row in rows], dtype=np.int64)
    known = [row for row in rows if row is not None]
    values_T = np.concatenate(known) if known else np.empty(0, kind.to_pandas_dtype())
    return from_flat(values_T, lengths_S, np.array([row is None for row in rows], dtype=bool)).cast(pa.list_(kind))


def rows_of(lengths_S: np.ndarray) -> np.ndarray:
    """The row of each value."""
    return np.repeat(np.arange(len(lengths_S)), lengths_S)
