"""Records how a pass called a module, so that it can be called the same way on other tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError

Key = int | str  # an argument's position or name
# Argument names with these words are not hidden states
_NOT_HIDDEN = ("mask", "position", "cos", "sin", "cache")
# vLLM's CPU attention has metadata that points into itself, and is never written.
# A copy of it points to freed memory, and ends the process.
_ADDRESSES = ("scheduler_metadata",)


class ShapesDiffer(MismatchError):
    """The two sides' modules take hidden states of different shapes, so they are not
    counterparts.
    """


class Flow(NamedTuple):
    """Shape, dtype and device of a call's hidden states."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def of(self, other: Tensor) -> Tensor:
        """Another tensor in this form: a copy, since kernels work in place."""
        if other.numel() != self.shape.numel():
            raise ShapesDiffer(f"{tuple(other.shape)} versus {tuple(self.shape)}")
        return other.detach().to(self.device, self.dtype, copy=True).reshape(self.shape)


@dataclass(frozen=True)
class Call:
    """One call: its arguments, and which of them were hidden states, of which only the form is
    kept.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flows: dict[Key, Flow]
    output: Any  # of a rotary embedding, which depends only on positions; else None

    @classmethod
    def of(
        cls,
        module: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any = None,
        *,
        most: int = 1,
        copied: bool = True,
    ) -> Call:
        """Record a call whose first `most` hidden states will be replaced; arguments after them are
        kept.

        `copied`: copy them, since vLLM passes views of buffers that its next pass overwrites.
        """
        keep = kept if copied else _unchanged
        found = list(hidden_arguments(args, kwargs).items())[:most]
        flows = {key: Flow(x.shape, x.dtype, x.device) for key, x in found}
        given: dict[Key, Any] = dict(enumerate(args))
        given.update(kwargs)
        rest = {key: keep(value) for key, value in given.items() if key not in flows}
        return cls(
            module,
            tuple(rest.get(at) for at in range(len(args))),
            {name: rest.get(name) for name in kwargs},
            flows,
            keep(output),
        )

    @property
    def fuses(self) -> bool:
        """Whether it was given a residual with its input, as vLLM's norms are."""
        # vLLM's norms add the residual unrounded, the trainer's sum is rounded before its norm.
        # Called with the sum alone, the engine's norm would not show this difference.
        return len(self.flows) == 2

    def again(self, *tensors: Tensor) -> Any:
        """The module's output for other hidden states; with fewer than it had, the last (a
        norm's residual) is None.
        """
        args, kwargs = list(self.args), dict(self.kwargs)
        for (key, flow), tensor in zip(self.flows.items(), tensors, strict=False):
            if isinstance(key, int):
                args[key] = flow.of(tensor)
            else:
                kwargs[key] = flow.of(tensor)
        return self.module(*args, **kwargs)


def _unchanged(value: Any) -> Any:
    return value


def hidden_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Key, Tensor]:
    """The arguments that are hidden states, by position or name: float tensors other than masks
    and positions.
    """
    named = {
        name: value
        for name, value in kwargs.items()
        if not any(word in name for word in _NOT_HIDDEN)
    }
    given: dict[Key, Any] = dict(enumerate(args))
    given.update(named)
    return {key: value for key, value in given.items() if is_hidden(value)}


def is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def first_tensor(output: Any) -> Tensor:
    """The tensor that a module returns, or the first of several."""
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


def convert_as(own: Tensor, new: Tensor) -> Tensor:
    """A tensor in the shape, dtype and device of another."""
    if new.numel() != own.numel():
        raise ShapesDiffer(f"{tuple(new.shape)} versus {tuple(own.shape)}")
    return new.to(own).reshape(own.shape)


def kept(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """An independent copy of tensors, and of dicts, lists and dataclasses that hold them."""
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo[id(value)] = _copied(value, memo)
    return memo[id(value)]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: kept(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(kept(item, memo) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    twin = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name) and field.name not in _ADDRESSES:
            object.__setattr__(twin, field.name, kept(getattr(value, field.name), memo))
    return twin
