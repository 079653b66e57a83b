"""How a pass called a module, so that it can be called again on other tensors as it was then."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_cli.errors import MismatchError

Key = int | str  # of an argument: its position or its name
_NOT_HIDDEN = ("mask", "position", "cos", "sin", "cache")  # words in the names of arguments that are no hidden states
_ADDRESSES = ("scheduler_metadata",)  # of vLLM's attention on a CPU: it points into itself, and nobody writes to it


class Unlike(MismatchError):
    """Both sides' modules take hidden states of different shapes: they do not do the same."""


class Flow(NamedTuple):
    """What hidden states of a call looked like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def of(self, other: Tensor) -> Tensor:
        """Another tensor made to look so: a copy, since kernels work in place."""
        if other.numel() != self.shape.numel():
            raise Unlike(f"{tuple(other.shape)} beside {tuple(self.shape)}")
        return other.detach().to(self.device, self.dtype, copy=True).reshape(self.shape)


@dataclass(frozen=True)
class Call:
    """One call: its arguments, and which of them were hidden states, of which only the look is known."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flows: dict[Key, Flow]
    output: Any  # of a rotary embedding, which depends on positions alone; of others None

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
        """The first `most` tensors of hidden states are to be others; what stands behind them stays as it is.

        `copied`: for vLLM gives views of buffers that its next pass overwrites.
        """
        keep = kept if copied else _as_it_is
        found = list(flowing(args, kwargs).items())[:most]
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
        """Whether it was given a residual beside its input, as vLLM's norms are."""
        return len(self.flows) == 2

    def again(self, *tensors: Tensor) -> Any:
        """The module's answer to other hidden states; fewer than it had leave out the last: a norm's residual."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for (key, flow), tensor in zip(self.flows.items(), tensors, strict=False):
            if isinstance(key, int):
                args[key] = flow.of(tensor)
            else:
                kwargs[key] = flow.of(tensor)
        return self.module(*args, **kwargs)


def _as_it_is(value: Any) -> Any:
    return value


def flowing(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Key, Tensor]:
    """The arguments that are hidden states, by position or by name: tensors of numbers, but for masks and positions."""
    named = {name: value for name, value in kwargs.items() if not any(word in name for word in _NOT_HIDDEN)}
    given: dict[Key, Any] = dict(enumerate(args))
    given.update(named)
    return {key: value for key, value in given.items() if is_hidden(value)}


def is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def first(output: Any) -> Tensor:
    """The tensor that a module answers with, behind which others may stand."""
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


def put_as(own: Tensor, new: Tensor) -> Tensor:
    """A tensor in the shape, dtype and place of another."""
    if new.numel() != own.numel():
        raise Unlike(f"{tuple(new.shape)} beside {tuple(own.shape)}")
    return new.to(own).reshape(own.shape)


def kept(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy that stays as it is now: of tensors, and of dicts, lists and dataclasses that hold them."""
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
