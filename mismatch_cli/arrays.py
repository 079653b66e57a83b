"""One formula for two worlds: numpy arrays in the analysis, torch tensors in training.

Formulas are written in the Python array API: operators, and the functions of `namespace(x)`. What the standard lacks,
or what a CPU does badly by it, stands here in both forms. numpy is silent here where torch is: an infinite ratio is an
answer, not a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import numpy as np

Array: TypeAlias = Any  # a numpy array or a torch tensor
_Function = TypeVar("_Function", bound=Callable[..., Any])


def namespace(x: Array) -> Any:
    """The functions of the array API for an array: numpy's own, or those that `array_api_compat` gives to torch."""
    if isinstance(x, np.ndarray | np.generic):
        return np
    from array_api_compat import array_namespace  # its numpy namespace would import all of numpy: 0.1 s

    return array_namespace(x)


def silent(function: _Function) -> _Function:
    """Without numpy's warnings about what is infinite or NaN."""
    return np.errstate(all="ignore")(function)


def without_gradient(x: Array) -> AbstractContextManager[Any]:
    """Around what nobody differentiates."""
    if isinstance(x, np.ndarray):
        return nullcontext()
    import torch

    return torch.no_grad()


def copied(x: Array) -> Array:
    """The same in memory of its own."""
    return namespace(x).asarray(x, copy=True)


def filled(x: Array, flags: Array, value: float) -> Array:
    """x, and `value` where the flag is set."""
    return namespace(x).where(flags, namespace(x).asarray(value, dtype=x.dtype, device=x.device), x)


def at_least(x: Array, low: float) -> Array:
    """max(x, low); NaN stays."""
    return np.maximum(x, x.dtype.type(low)) if isinstance(x, np.ndarray) else x.clamp(min=low)


def between(x: Array, low: float, high: float) -> Array:
    """x held between two bounds; NaN stays."""
    return np.clip(x, low, high) if isinstance(x, np.ndarray) else x.clamp(low, high)


def select(flags: Array, x: Array, y: Array) -> Array:
    """x where the flag is set, else y, by bits: a CPU guesses flags in no order, often wrong (4 ns against 1)."""
    xp = namespace(x)
    if xp is not np and (not flags.is_cpu or x.requires_grad or y.requires_grad):
        return xp.where(flags, x, y)
    bits = xp.int32 if x.dtype == xp.float32 else xp.int64
    y = y.view(bits)
    chosen = x.view(bits) ^ y
    chosen &= -xp.astype(flags, bits)
    chosen ^= y
    return chosen.view(x.dtype)


def response_sums(x_T: Array, offset_S1: Array, response_T: Array) -> Array:
    """Σ x over the tokens of each response, float64; 0 for an empty one."""
    if isinstance(x_T, np.ndarray):
        sum_S, filled_S = np.zeros(len(offset_S1) - 1), np.flatnonzero(np.diff(offset_S1))
        if len(filled_S):
            sum_S[filled_S] = np.add.reduceat(x_T, offset_S1[filled_S], dtype=np.float64)
        return sum_S
    zeros_S = x_T.new_zeros(len(offset_S1) - 1, dtype=namespace(x_T).float64)
    return zeros_S.index_add_(0, response_T, x_T.double())


def blocks(size: int, rows: int) -> list[slice]:
    """Rows `0 … size` in slices of at most `rows`, and at least one."""
    return [slice(start, start + rows) for start in range(0, max(size, 1), rows)]


def is_on_cpu(x: Array) -> bool:
    return isinstance(x, np.ndarray) or x.is_cpu
