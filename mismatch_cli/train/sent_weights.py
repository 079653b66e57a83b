"""The weights of a trainer as its engine holds them: an adapter merged, everything rounded to
the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mismatch_cli.models.adapters import MergedAdapter, adapted_layers
from mismatch_cli.models.sharding import local_shard
from mismatch_cli.train.temporary_values import copy_values, temporary_values

R = TypeVar("R")


class SentWeights:
    """Copies of what is trained, and the model as the engine would have it with one of them.

    The adapter is merged by peft, not by the code that merges for the engine: a fault there would
    prove itself.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, adapter: bool) -> None:
        self._model, self._dtype, self._adapter = model, dtype, adapter

    def copy(self) -> list[Tensor]:
        """This rank's part of every trained weight: those of an adapter as they are, others in
        the engine's dtype.
        """
        if self._adapter:
            return [part.to("cpu", copy=True) for part in self.trained()]
        return [self._rounded(part).to("cpu", copy=True) for part in self.trained()]

    def empty(self) -> list[Tensor]:
        """Room for a copy."""
        dtype = None if self._adapter else self._dtype  # None: each its own
        return [torch.empty_like(part, dtype=dtype, device="cpu") for part in self.trained()]

    def at_each(self, copies: Sequence[Sequence[Tensor]], measure: Callable[[], R]) -> list[R]:
        """What `measure` returns with the model at each copy; then the model has its own weights
        again, to the bit.
        """
        saved = [part.to("cpu", copy=True) for part in self._parts()]
        try:
            return [self._at(copy, saved, measure) for copy in copies]
        finally:
            copy_values(self._parts(), saved)

    def _at(self, copy: Sequence[Tensor], saved: Sequence[Tensor], measure: Callable[[], R]) -> R:
        layers = list(adapted_layers(self._model).values()) if self._adapter else []
        try:
            copy_values(self.trained(), copy)
            for layer in layers:
                layer.merge()
            copy_values(self._parts(), map(self._rounded, self._parts()))
            return measure()
        finally:
            for layer in layers:
                if layer.merged:
                    layer.unmerge()  # which only subtracts, inexactly
            if layers:
                copy_values(self._parts(), saved)

    def changed(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[int, int]:
        """How many of the weights that training changes differ between two copies, as the engine
        holds them; of all.
        """
        differ = total = 0
        for one, other in zip(self._held(before), self._held(after), strict=True):
            differ += int((one != other).sum())
            total += one.numel()
        return differ, total

    def trained(self) -> list[Tensor]:
        """This rank's part of every trained weight."""
        return [
            local_shard(weight.detach())
            for weight in self._model.parameters()
            if weight.requires_grad
        ]

    def _parts(self) -> Iterator[Tensor]:
        return (local_shard(weight.detach()) for weight in self._model.parameters())

    def _rounded(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype)

    def _held(self, copy: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the engine has instead of its first weights, given a copy."""
        if not self._adapter:
            return copy
        with temporary_values(self.trained(), copy):
            state = MergedAdapter(self._model).state_dict()
            return [self._rounded(state[name]) for name in adapted_layers(self._model)]
