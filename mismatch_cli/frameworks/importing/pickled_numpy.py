"""Reads numpy arrays and scalars from untrusted pickles.

numpy's own `__setstate__` trusts its input: with a dtype that claims to hold no objects, raw bytes
become an array of objects, pointers to anywhere. Stand-ins take the state here: numbers come as
bytes, objects as a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

_TYPE = re.compile(r"O8?|[?bB]|[iu][1248]|f[248]|b1|U\d{1,6}")
_ORDERS = ("<", ">", "=", "|")


class Dtype:
    """The letters of a type of numbers, text or objects; only the byte order of its state
    counts.
    """

    def __init__(self, letters: str = "", *_: Any) -> None:
        if not isinstance(letters, str) or not _TYPE.fullmatch(letters):
            raise ValueError(f"arrays of {str(letters)[:20]!r}")
        self.letters = letters
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]
        if self.order not in _ORDERS:
            raise ValueError("invalid byte order")

    @property
    def of_objects(self) -> bool:
        return self.letters[0] == "O"

    def of_bytes(self, data: Any) -> np.ndarray:
        """The values, which are numbers or text."""
        if self.of_objects:
            raise ValueError("objects as bytes")
        order = "" if self.order == "|" else self.order
        return np.frombuffer(bytes(data), np.dtype(order + self.letters))


class Array:
    """An array as its pickle describes it; `values` is set with its state."""

    values: np.ndarray | list[Any]

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if not dtype.of_objects:
            self.values = dtype.of_bytes(data).reshape(shape, order="F" if is_fortran else "C")
            return
        if not isinstance(data, list) or len(shape) != 1 or len(data) != shape[0]:
            raise ValueError("objects that are not in a list")
        self.values = data


def reconstruct(kind: Any, *_: Any) -> Array:
    """An array whose state follows."""
    if kind is not Array:
        raise ValueError("an array of another class")
    return Array()


def frombuffer(data: Any, dtype: Dtype, shape: Any, order: str) -> Array:
    """An array as protocol 5 of pickle holds it: its bytes, type and shape in one call."""
    array = Array()
    array.values = dtype.of_bytes(data).reshape(shape, order="F" if order == "F" else "C")
    return array


def scalar(dtype: Dtype, data: Any) -> Any:
    """A number or text as a Python value."""
    return dtype.of_bytes(data)[0].item()


# What a pickle calls them; `core` became `_core` in numpy 2
NAMES: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": Array,
    "numpy.dtype": Dtype,
    "numpy.core.multiarray._reconstruct": reconstruct,
    "numpy._core.multiarray._reconstruct": reconstruct,
    "numpy.core.multiarray.scalar": scalar,
    "numpy._core.multiarray.scalar": scalar,
    "numpy.core.numeric._frombuffer": frombuffer,
    "numpy._core.numeric._frombuffer": frombuffer,
}


def with_arrays(content: Any, converted: dict[int, Any] | None = None) -> Any:
    """The same containers with arrays instead of stand-ins; lists that begin with a number stay as
    they are.

    A container that occurs several times is converted once: `converted` maps its identity to the
    result.
    """
    if converted is None:
        converted = {}
    if not isinstance(content, Array | dict | list | tuple):
        return content
    # Lists of tokens are long, and hold no stand-in.
    if isinstance(content, list | tuple) and (not content or isinstance(content[0], int | float)):
        return content
    if id(content) not in converted:
        converted[id(content)] = None  # while it is converted: a cycle ends in None
        converted[id(content)] = _converted(content, converted)
    return converted[id(content)]


def _converted(content: Any, converted: dict[int, Any]) -> Any:
    if isinstance(content, Array):
        if isinstance(content.values, list):
            return with_arrays(content.values, converted)
        return content.values
    if isinstance(content, dict):
        return {key: with_arrays(value, converted) for key, value in content.items()}
    return type(content)(with_arrays(item, converted) for item in content)
