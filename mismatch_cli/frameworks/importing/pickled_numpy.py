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
        self.letters, self.order = letters, "="

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
        _, shape, dtype, fortran, data = state
        if dtype.of_objects:
            if not isinstance(data, list) or len(shape) != 1 or len(data) != shape[0]:
                raise ValueError("objects that are not in a list")
            self.values = data
        else:
            self.values = dtype.of_bytes(data).reshape(shape, order="F" if fortran else "C")


def reconstruct(kind: Any, *_: Any) -> Array:
    if kind is not Array:
        raise ValueError("an array of another class")
    return Array()


def frombuffer(data: Any, dtype: Dtype, shape: Any, order: str) -> Array:
    array = Array()
    array.values = dtype.of_bytes(data).reshape(shape, order="F" if order == "F" else "C")
    return array


def scalar(dtype: Dtype, data: Any) -> Any:
    return dtype.of_bytes(data)[0].item()


NAMES: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": Array,
    "numpy.dtype": Dtype,
    **{f"numpy.{core}.multiarray._reconstruct": reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": frombuffer for core in ("core", "_core")},
}  # what a pickle calls them


def with_arrays(content: Any, known: dict[int, Any] | None = None) -> Any:
    """The same containers with arrays instead of stand-ins; lists that begin with a number stay as
    they are.

    A container that occurs several times is converted once: `known` maps its identity to the
    result.
    """
    known = {} if known is None else known
    if not isinstance(content, Array | dict | list | tuple):
        return content
    if isinstance(content, list | tuple) and (not content or isinstance(content[0], int | float)):
        return content
    if id(content) not in known:
        known[id(content)] = None  # while it is converted: a cycle ends in None
        known[id(content)] = _converted(content, known)
    return known[id(content)]


def _converted(content: Any, known: dict[int, Any]) -> Any:
    if isinstance(content, Array):
        return (
            with_arrays(content.values, known)
            if isinstance(content.values, list)
            else content.values
        )
    if isinstance(content, dict):
        return {key: with_arrays(value, known) for key, value in content.items()}
    return type(content)(with_arrays(item, known) for item in content)
