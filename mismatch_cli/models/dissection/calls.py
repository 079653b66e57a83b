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


class HiddenForm(NamedTuple):
    """Shape, dtype and device of hidden states that a module was called with."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def convert(self, other: Tensor) -> Tensor:
        """Another tensor in this form: a copy, since kernels work in place."""
        if other.numel() != self.shape.numel():
            raise ShapesDiffer(f"{tuple(other.shape)} versus {tuple(self.shape)}")
        return other.detach().to(self.device, self.dtype, copy=True).reshape(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of a module: its arguments, with None for the hidden states, of which only the form
    is recorded.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_forms: dict[Key, HiddenForm]
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
        """Record a call whose first `most` hidden states will be replaced; other arguments stay.

        `copied`: copy them, since vLLM passes views of buffers that its next pass overwrites.
        """
        replaced = list(hidden_arguments(args, kwargs).items())[:most]
        hidden_forms = {key: HiddenForm(x.shape, x.dtype, x.device) for key, x in replaced}

        def keep(key: Key, value: Any) -> Any:
            if key in hidden_forms:
                return None
            return deep_copy(value) if copied else value

        return cls(
            module,
            tuple(keep(position, value) for position, value in enumerate(args)),
            {name: keep(name, value) for name, value in kwargs.items()},
            hidden_forms,
            deep_copy(output) if copied else output,
        )

    @property
    def fuses(self) -> bool:
        """Whether it had a residual with its input, as vLLM's norms have."""
        # vLLM's norms add the residual unrounded, the trainer's sum is rounded before its norm.
        # Called with the sum alone, the engine's norm would not show this difference.
        return len(self.hidden_forms) == 2

    def repeat(self, *tensors: Tensor) -> Any:
        """The module's output for other hidden states; with fewer than it had, the last (a
        norm's residual) is None.
        """
        args = list(self.args)
        kwargs = dict(self.kwargs)
        for (key, form), tensor in zip(self.hidden_forms.items(), tensors, strict=False):
            if isinstance(key, int):
                args[key] = form.convert(tensor)
            else:
                kwargs[key] = form.convert(tensor)
        return self.module(*args, **kwargs)


def hidden_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Key, Tensor]:
    """The arguments that are hidden states, by position or name: float tensors other than masks
    and positions.
    """
    hidden: dict[Key, Tensor] = {}
    for position, value in enumerate(args):
        if is_hidden(value):
            hidden[position] = value
    for name, value in kwargs.items():
        if is_hidden(value) and not any(word in name for word in _NOT_HIDDEN):
            hidden[name] = value
    return hidden


def is_hidden(value: Any) -> bool:
    """Whether a value has the form of hidden states: floats in at least two dimensions."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def first_tensor(output: Any) -> Tensor:
    """The tensor that a module returns, or the first of several."""
    tensor: Tensor = output[0] if isinstance(output, tuple | list) else output
    return tensor


def convert_as(own: Tensor, new: Tensor) -> Tensor:
    """A tensor in the shape, dtype and device of another."""
    if new.numel() != own.numel():
        raise ShapesDiffer(f"{tuple(new.shape)} versus {tuple(own.shape)}")
    return new.to(own).reshape(own.shape)


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """An independent copy of tensors, and of dicts, lists and dataclasses that hold them; other
    objects are shared.

    `memo` has the copies so far, by `id`: what occurs twice is copied once.
    """
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo[id(value)] = _copy(value, memo)
    return memo[id(value)]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: deep_copy(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(deep_copy(item, memo) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    twin = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name) and field.name not in _ADDRESSES:
            # Past a frozen dataclass, which refuses to be changed.
            object.__setattr__(twin, field.name, deep_copy(getattr(value, field.name), memo))
    return twin
