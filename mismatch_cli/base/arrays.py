"""One formula for two libraries: numpy arrays in the analysis, torch tensors in training.

Formulas are written in the Python array API: operators, and the functions of `namespace(x)`. What
the standard lacks, or what is slow on a CPU, is implemented here for both. numpy is as silent here
as torch: an infinite ratio is a result, not a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import numpy as np

Array: TypeAlias = Any  # a numpy array or a torch tensor
_Function = TypeVar("_Function", bound=Callable[..., Any])


def namespace(x: Array) -> Any:
    """The array API functions for an array: numpy's own, or those of `array_api_compat` for
    torch.
    """
    if isinstance(x, np.ndarray | np.generic):
        return np
    # `array_api_compat.numpy` imports all of numpy, 0.1 s for every command.
    # So numpy answers for itself, above, and the package is imported for torch alone.
    from array_api_compat import array_namespace

    return array_namespace(x)


def silent(function: _Function) -> _Function:
    """The function without numpy's warnings about infinity and NaN."""
    # numpy warns where torch is silent, about results that are meant: r = ∞, log π = −∞.
    # Each trace with such a token would print warnings between the lines of a report.
    return np.errstate(all="ignore")(function)


def without_gradient(x: Array) -> AbstractContextManager[Any]:
    """A context in which torch records no gradients; for numpy it does nothing."""
    if isinstance(x, np.ndarray):
        return nullcontext()
    import torch

    return torch.no_grad()


def copied(x: Array) -> Array:
    """A copy of an array in memory of its own."""
    return namespace(x).asarray(x, copy=True)


def contiguous(x: Array) -> Array:
    """The array without gaps in memory, since numpy is slow on short rows that are far apart."""
    if not isinstance(x, np.ndarray):
        return x
    return np.ascontiguousarray(x)


def fill_where(x: Array, flags: Array, value: float) -> Array:
    """x, with `value` where the flag is set; in numpy x itself if no flag is set."""
    if isinstance(x, np.ndarray) and not flags.any():
        return x
    xp = namespace(x)
    return xp.where(flags, xp.asarray(value, dtype=x.dtype, device=x.device), x)


def clamp_min(x: Array, low: float) -> Array:
    """max(x, low); NaN stays.

    In numpy x itself if nothing is below, since checking is faster than computing.
    """
    if not isinstance(x, np.ndarray):
        return x.clamp(min=low)
    if x.min(initial=low) >= low:
        return x
    return np.maximum(x, x.dtype.type(low))


def clamp(x: Array, low: float, high: float) -> Array:
    """x clamped between two bounds; NaN stays."""
    if isinstance(x, np.ndarray):
        return np.clip(x, low, high)
    return x.clamp(low, high)


def select(flags: Array, x: Array, y: Array) -> Array:
    """x where the flag is set, else y; both are float32, or both float64."""
    xp = namespace(x)
    if xp is not np and (not flags.is_cpu or x.requires_grad or y.requires_grad):
        return xp.where(flags, x, y)
    # Branch prediction fails on random flags, which makes `where` take 4 ns an element.
    # x ^ y ^ y is x: masking the first x ^ y with the flag chooses without a branch, in 1 ns.
    bits = xp.int32 if x.dtype == xp.float32 else xp.int64
    y = y.view(bits)
    chosen = x.view(bits) ^ y
    chosen &= -xp.astype(flags, bits)
    chosen ^= y
    return chosen.view(x.dtype)


def keep_or_compute(
    flags: Array, x: Array, otherwise: Callable[..., Array], *arguments: Array
) -> Array:
    """x where the flag is set, else `otherwise(*arguments)`, which numpy computes only there; x
    may be overwritten.
    """
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        return select(flags, x, otherwise(*arguments))
    number = x.size - np.count_nonzero(flags)
    # Picking elements out takes time too: beyond a quarter of them, computing all is faster.
    if 4 * number > x.size:
        return select(flags, x, otherwise(*arguments))
    if number:
        others = np.flatnonzero(~flags)
        picked = [argument.reshape(-1)[others] for argument in arguments]
        x.reshape(-1)[others] = otherwise(*picked)
    return x


def with_sign(x: Array, y: Array) -> Array:
    """x with the sign of y; x may be overwritten."""
    if not isinstance(x, np.ndarray):
        return namespace(x).copysign(x, y)
    # np.copysign takes three times as long as moving the sign, which is the highest bit.
    bits: Any = np.int32 if x.dtype == np.float32 else np.int64
    sign_bit = np.iinfo(bits).min
    x_bits = x.view(bits)
    x_bits &= ~sign_bit
    x_bits |= y.view(bits) & sign_bit
    return x


def row_sums(x_TK: Array) -> Array:
    """Σ over each row; numpy's own sum takes four times as long where rows are short."""
    if isinstance(x_TK, np.ndarray):
        return np.einsum("tk->t", x_TK)
    return namespace(x_TK).sum(x_TK, axis=-1)


def row_any(flags_TK: Array) -> Array:
    """Whether a flag is set in each row; for booleans, the sum of einsum is `or`."""
    if isinstance(flags_TK, np.ndarray):
        return np.einsum("tk->t", flags_TK)
    return flags_TK.any(dim=-1)


class Segments:
    """Consecutive segments of flat tokens in numpy; some may be empty."""

    def __init__(self, offset_S1: np.ndarray) -> None:
        self.length_S = np.diff(offset_S1)
        # `reduceat` would give an empty segment the first value of the next one: it gets none.
        self._nonempty = np.flatnonzero(self.length_S)
        self._starts = offset_S1[self._nonempty]

    def sum(self, values_N: np.ndarray) -> np.ndarray:
        """Σ over each segment, in float64; 0 for an empty one."""
        sums_S = np.zeros(len(self.length_S))
        if values_N.dtype == bool:
            if values_N.all():
                return self.length_S.astype(np.float64)
            values_N = values_N.view(np.uint8)
        if len(self._nonempty):
            sums_S[self._nonempty] = np.add.reduceat(values_N, self._starts, dtype=np.float64)
        return sums_S

    def largest(self, values_N: np.ndarray) -> np.ndarray:
        """The largest value of each segment; 0 for an empty one."""
        return self._extremes(np.maximum, values_N)

    def smallest(self, values_N: np.ndarray) -> np.ndarray:
        """The smallest value of each segment; 0 for an empty one."""
        return self._extremes(np.minimum, values_N)

    def _extremes(self, larger_or_smaller: np.ufunc, values_N: np.ndarray) -> np.ndarray:
        extremes_S = np.zeros(len(self.length_S), dtype=values_N.dtype)
        if len(self._nonempty):
            extremes_S[self._nonempty] = larger_or_smaller.reduceat(values_N, self._starts)
        return extremes_S


def response_sums(x_T: Array, offset_S1: Array, response_T: Array) -> Array:
    """Σ x over the tokens of each response, float64; 0 for an empty one."""
    if isinstance(x_T, np.ndarray):
        return Segments(offset_S1).sum(x_T)
    zeros_S = x_T.new_zeros(len(offset_S1) - 1, dtype=namespace(x_T).float64)
    return zeros_S.index_add_(0, response_T, x_T.double())


def response_extremes(x_T: Array, offset_S1: Array, response_T: Array, *, largest: bool) -> Array:
    """The largest, or smallest, x of each response; 0 for an empty one."""
    if isinstance(x_T, np.ndarray):
        segments = Segments(offset_S1)
        return segments.largest(x_T) if largest else segments.smallest(x_T)
    zeros_S = x_T.new_zeros(len(offset_S1) - 1)
    reduction = "amax" if largest else "amin"
    return zeros_S.scatter_reduce(0, response_T, x_T, reduction, include_self=False)


def sorted_within(x_T: Array, response_T: Array) -> Array:
    """x in ascending order within each response."""
    if not isinstance(x_T, np.ndarray) or x_T.dtype != np.float32:
        xp = namespace(x_T)
        order_T = xp.argsort(x_T, stable=True)
        by_response_T = xp.argsort(response_T[order_T], stable=True)
        return x_T[order_T[by_response_T]]
    # Sorting integers takes numpy a quarter of the time of two sorts of indices.
    # A key has the response in its upper 32 bits and x in the lower ones: one sort does both.
    bits_T = _floats_as_integers(x_T.view(np.int32))
    key_T = (response_T.astype(np.int64) << 32) + (bits_T.astype(np.int64) + 2**31)
    key_T.sort()
    bits_T = ((key_T & 0xFFFFFFFF) - 2**31).astype(np.int32)
    return _floats_as_integers(bits_T).view(np.float32)


def _floats_as_integers(bits_T: np.ndarray) -> np.ndarray:
    """The bits of float32 values as integers in the same order; its own inverse.

    A negative float is smaller the larger its bits are: all but its sign are inverted.
    """
    return bits_T ^ ((bits_T >> 31) & np.int32(0x7FFFFFFF))


def convert_like(x_T: Array, values: np.ndarray) -> Array:
    """A numpy array in the library and on the device of x."""
    if isinstance(x_T, np.ndarray):
        return values
    return namespace(x_T).asarray(values, device=x_T.device)


def as_numpy(x: Array) -> np.ndarray:
    """The array as numpy, without gradients."""
    if isinstance(x, np.ndarray):
        return x
    return np.asarray(x.detach().cpu())


def blocks(size: int, rows: int) -> list[slice]:
    """Rows `0 … size` in slices of at most `rows`; at least one slice."""
    return [slice(start, start + rows) for start in range(0, max(size, 1), rows)]


def is_on_cpu(x: Array) -> bool:
    """Whether an array is in the memory of the CPU; every one of numpy is."""
    return isinstance(x, np.ndarray) or x.is_cpu
