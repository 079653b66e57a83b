"""Reads foreign values exactly or refuses them: one rule for importers, engines and hand-written
traces.

Libraries convert generously: 3.7 becomes token 3, "-0.5" a log-probability, 2 a true mask. Here a
value that would change is an error.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MOST_ID = 2**31 - 1  # token ids are int32 in a trace
# Nats: if the other side is below this, an exact 0.0 was not computed, not even under top-p
UNCERTAIN = -1.0
WRONG_VALUE, WRONG_TYPE = pa.ArrowInvalid, pa.ArrowTypeError  # what `exact` raises


def exact(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column (lists of any depth) in another type, with values unchanged except for the rounding
    of floats.

    Raises `WRONG_VALUE` for a fraction instead of a whole number, a number beyond the type, or a
    mask that is neither 0 nor 1; `WRONG_TYPE` for text, booleans or anything else instead of
    numbers. Nulls stay nulls.
    """
    if column.type.equals(kind):
        return column
    values, leaf = column, kind
    while is_list(leaf):
        if is_list(values.type):
            values = values.flatten()
        elif not pa.types.is_null(values.type):
            raise WRONG_TYPE(f"{values.type} where a list of {leaf.value_type} belongs")
        leaf = leaf.value_type
    _check(values, leaf)
    if not (pa.types.is_floating(leaf) or pa.types.is_null(values.type)):
        return column.cast(kind)
    # A safe cast refuses every number that a float rounds, so this one is not safe.
    # A number beyond the type becomes an infinity, which is recognised by the count of these.
    if pa.types.is_floating(values.type):
        rounded = values.cast(leaf, safe=False)
        if _infinities(rounded) > _infinities(values):
            raise WRONG_VALUE(f"a number beyond {leaf}")
    return column.cast(kind, safe=False)


def single(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array, without a copy (unlike `combine_chunks`) if it has a single chunk."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def unpacked_flags(values: pa.BooleanArray) -> np.ndarray:
    """Arrow's flags, one bit each, as numpy's, one byte each."""
    return np.from_dlpack(values.cast(pa.uint8())).view(bool)


def packed_flags(flags: np.ndarray) -> pa.BooleanArray:
    """numpy's flags as Arrow's: the inverse of `unpacked_flags`."""
    # `pa.array` would import pandas.
    bits = pa.py_buffer(np.packbits(flags, bitorder="little").tobytes())
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, bits])


def _infinities(values: pa.Array) -> int:
    return pc.sum(pc.is_inf(values)).as_py() or 0


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's lists."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def from_python(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Python values as a column of this type, with the checks of `exact`; text and structs are not
    checked.
    """
    if values.count(None) == len(values):  # most columns of the schema, in most files
        return pa.nulls(len(values), kind)
    leaf = kind
    while is_list(leaf):
        leaf = leaf.value_type
    if not _is_number(leaf):
        return pa.array(values, kind)
    column = pa.array(values)
    _refuse_hidden_flags(values, column)
    return exact(column, kind)


def flat_array(values: Any, kind: pa.DataType) -> np.ndarray:
    """A list, array or tensor of any shape as a flat numpy array, with the checks of `exact`; a
    null among floats is NaN.
    """
    if hasattr(values, "detach"):  # a tensor: numpy knows no bfloat16 and no gradients
        values = values.detach()
        if values.is_floating_point():
            values = values.double()
        values = values.numpy()
    if isinstance(values, np.ndarray):
        column = pa.array(np.ravel(values))
    else:
        values = list(values)
        column = pa.array(values)
        _refuse_hidden_flags([values], column)
    while is_list(column.type):
        column = column.flatten()
    column = exact(column, kind)
    if column.null_count and not pa.types.is_floating(kind):
        raise WRONG_VALUE("a null among its values")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def whole_number(value: Any, kind: type[np.signedinteger] = np.int64) -> int:
    """An integer from a number or an array scalar; a `WRONG_VALUE` for anything else, or a value
    beyond `kind`.
    """
    number = _python_value(value)
    # NaN differs from everything, and an infinity // 1 is NaN: neither passes as whole.
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number // 1:
        raise WRONG_VALUE(f"{str(number)[:40]!r} where a whole number belongs")
    if not np.iinfo(kind).min <= number <= np.iinfo(kind).max:
        raise WRONG_VALUE(f"{str(number)[:40]} is beyond {kind.__name__}")
    return int(number)


def finite_number(value: Any) -> float:
    """A finite float from a number or an array scalar, true and false as 1 and 0; a `WRONG_VALUE`
    for anything else.
    """
    number = _python_value(value)
    if isinstance(number, bool | int | float):
        # An integer may be beyond all floats; numpy refuses those beyond 64 bits.
        with suppress(OverflowError):
            if isfinite(number):
                return float(number)
    raise WRONG_VALUE(f"{str(number)[:40]!r} where a number belongs")


def strange_ids(ids_T: np.ndarray, vocabulary: int | None = None) -> np.ndarray:
    """Flags of invalid ids: negative ones, and those from `vocabulary` on, where it is known."""
    most = MOST_ID if vocabulary is None else vocabulary - 1
    return np.asarray((ids_T < 0) | (ids_T > most))


def are_token_ids(ids: Any, vocabulary: int) -> bool:
    """Whether this is a list of ids of a vocabulary, as parsed from JSON: only whole numbers."""
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary for i in ids)


def _python_value(value: Any) -> Any:
    """The value of an array scalar; anything else as it is."""
    if hasattr(value, "item"):
        return value.item()
    return value


def _refuse_hidden_flags(rows: Any, column: pa.Array) -> None:
    """Refuse true and false among floats, which Arrow reads as 1 and 0 after a float; `rows` are
    the lists or numbers that Arrow made the column of.
    """
    while is_list(column.type):
        column = column.flatten()
    if not pa.types.is_floating(column.type):
        return
    # Looking at every Python value takes long, and a hidden flag is a 0 or 1 in the column.
    # Log-probabilities hardly have any, so Arrow's look is mostly enough.
    if not pc.any(_is_0_or_1(column)).as_py():
        return
    for row in rows:
        numbers = row if isinstance(row, list) else [row]
        if bool in set(map(type, numbers)):
            raise WRONG_TYPE("true or false among numbers")


def _check(values: pa.Array, kind: pa.DataType) -> None:
    """Refuse values of a type that this one would change: text for numbers, flags for numbers."""
    actual = values.type
    if pa.types.is_dictionary(actual):
        actual = actual.value_type
    if actual in (kind, pa.null()):
        return
    if pa.types.is_string(kind) and is_text(actual):
        return
    if not _is_number(kind):
        raise WRONG_TYPE(f"{actual} where {kind} belongs")
    if pa.types.is_boolean(actual) or not _is_number(actual):
        expected = "0 and 1 belong" if pa.types.is_boolean(kind) else f"{kind} belongs"
        raise WRONG_TYPE(f"{actual} where {expected}")
    if pa.types.is_boolean(kind) and pc.all(_is_0_or_1(values), min_count=0).as_py() is False:
        raise WRONG_VALUE("a mask that is neither 0 nor 1")


def _is_0_or_1(numbers: pa.Array) -> pa.BooleanArray:
    return pc.or_(pc.equal(numbers, 0), pc.equal(numbers, 1))


def is_text(kind: pa.DataType) -> bool:
    """Whether values are texts, in any of Arrow's ways to hold them."""
    of_kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_of_kind(kind) for is_of_kind in of_kinds)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )
