"""Reads foreign values exactly or refuses them: one rule for importers, engines and hand-written
traces.

Libraries convert generously: 3.7 becomes token 3, "-0.5" a log-probability, 2 a true mask. Here a
value that would change is an error.
"""

from collections.abc import Sequence
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
        if not (is_list(values.type) or pa.types.is_null(values.type)):
            raise WRONG_TYPE(f"{values.type} where a list of {leaf.value_type} belongs")
        values = values.flatten() if is_list(values.type) else values
        leaf = leaf.value_type
    _check(values, leaf)
    if pa.types.is_floating(leaf) or pa.types.is_null(values.type):
        if pa.types.is_floating(values.type) and _infinities(
            values.cast(leaf, safe=False)
        ) > _infinities(values):
            raise WRONG_VALUE(f"a number beyond {leaf}")
        return column.cast(kind, safe=False)
    return column.cast(kind)


def single(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array, without a copy (unlike `combine_chunks`) if it has a single chunk."""
    if isinstance(column, pa.Array):
        return column
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    )


def unpacked_flags(values: pa.BooleanArray) -> np.ndarray:
    """Arrow's flags, one bit each, as numpy's, one byte each."""
    return np.from_dlpack(values.cast(pa.uint8())).view(bool)


def packed_flags(flags: np.ndarray) -> pa.BooleanArray:
    """The inverse, without `pa.array`, which imports pandas."""
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
    """Like `exact`, from a list of Python values; text and structs are not checked."""
    if values.count(None) == len(values):  # most columns of the schema, in most files
        return pa.nulls(len(values), kind)
    if not _is_number(_leaf(kind)):
        return pa.array(values, kind)
    found = pa.array(values)
    _refuse_hidden_flags(values, found)
    return exact(found, kind)


def flat_array(values: Any, kind: pa.DataType) -> np.ndarray:
    """Like `exact`, from a list, array or tensor of any shape, as a flat numpy array; a null
    among floats is NaN.
    """
    if hasattr(values, "detach"):  # a tensor: numpy knows no bfloat16 and no gradients
        values = values.detach()
        values = (values.double() if values.is_floating_point() else values).numpy()
    values = np.ravel(values) if isinstance(values, np.ndarray) else list(values)
    found = pa.array(values)
    if isinstance(values, list):
        _refuse_hidden_flags([values], found)
    while is_list(found.type):
        found = found.flatten()
    found = exact(found, kind)
    if found.null_count and not pa.types.is_floating(kind):
        raise WRONG_VALUE("a null among its values")
    return np.asarray(found.to_numpy(zero_copy_only=False))


def whole_number(value: Any, kind: type[np.signedinteger] = np.int64) -> int:
    """An integer from a number or an array scalar; a `WRONG_VALUE` for anything else, or a value
    beyond `kind`.
    """
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number // 1:
        raise WRONG_VALUE(f"{str(number)[:40]!r} where a whole number belongs")
    if not np.iinfo(kind).min <= number <= np.iinfo(kind).max:
        raise WRONG_VALUE(f"{str(number)[:40]} is beyond {kind.__name__}")
    return int(number)


def finite_number(value: Any) -> float:
    """A finite float from the same, true and false as 1 and 0; a `WRONG_VALUE` for anything
    else.
    """
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, bool | int | float) or not np.isfinite(number):
        raise WRONG_VALUE(f"{str(number)[:40]!r} where a number belongs")
    return float(number)


def strange_ids(ids_T: np.ndarray, vocabulary: int | None = None) -> np.ndarray:
    """Flags of invalid ids: negative ones, and those from `vocabulary` on, where it is known."""
    return np.asarray((ids_T < 0) | (ids_T > (MOST_ID if vocabulary is None else vocabulary - 1)))


def are_token_ids(ids: Any, vocabulary: int) -> bool:
    """Whether this is a list of ids of a vocabulary, as parsed from JSON: only whole numbers."""
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary for i in ids)


def _refuse_hidden_flags(rows: Any, found: pa.Array) -> None:
    """Refuse true and false among floats, which Arrow reads as 1 and 0 after a float; `rows` are
    lists or numbers.
    """
    while is_list(found.type):
        found = found.flatten()
    if (
        not pa.types.is_floating(found.type)
        or not pc.any(pc.or_(pc.equal(found, 0), pc.equal(found, 1))).as_py()
    ):
        return
    if any(bool in set(map(type, row if isinstance(row, list) else (row,))) for row in rows):
        raise WRONG_TYPE("true or false among numbers")


def _check(values: pa.Array, kind: pa.DataType) -> None:
    given = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if given.equals(kind) or pa.types.is_null(given):
        return
    if not _is_number(kind):
        if pa.types.is_string(kind) and (
            pa.types.is_string(given) or pa.types.is_large_string(given)
        ):
            return
        raise WRONG_TYPE(f"{given} where {kind} belongs")
    if pa.types.is_boolean(given) or not _is_number(given):
        raise WRONG_TYPE(
            f"{given} where {'0 and 1 belong' if pa.types.is_boolean(kind) else f'{kind} belongs'}"
        )
    if pa.types.is_boolean(kind):
        is_flag = pc.or_(pc.equal(values, 0), pc.equal(values, 1))
        if pc.all(is_flag, min_count=0).as_py() is False:
            raise WRONG_VALUE("a mask that is neither 0 nor 1")


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _leaf(kind: pa.DataType) -> pa.DataType:
    while is_list(kind):
        kind = kind.value_type
    return kind
