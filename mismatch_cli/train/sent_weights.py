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
        self._model = model
        self._dtype = dtype
        self._adapter = adapter

    def copy(self) -> list[Tensor]:
        """This rank's shard of every trained weight: those of an adapter as they are, others in
        the engine's dtype.
        """
        if self._adapter:
            return [shard.to("cpu", copy=True) for shard in self.trained()]
        return [self._round(shard).to("cpu", copy=True) for shard in self.trained()]

    def empty(self) -> list[Tensor]:
        """Room for a copy."""
        dtype = None if self._adapter else self._dtype  # None: each its own
        return [torch.empty_like(shard, dtype=dtype, device="cpu") for shard in self.trained()]

    def measure_at(self, copies: Sequence[Sequence[Tensor]], measure: Callable[[], R]) -> list[R]:
        """What `measure` returns with the model at each copy; then the model has its own weights
        again, to the bit.
        """
        own = [shard.to("cpu", copy=True) for shard in self._shards()]
        try:
            return [self._measure_at(copy, own, measure) for copy in copies]
        finally:
            copy_values(self._shards(), own)

    def _measure_at(
        self, copy: Sequence[Tensor], own: Sequence[Tensor], measure: Callable[[], R]
    ) -> R:
        layers = list(adapted_layers(self._model).values()) if self._adapter else []
        try:
            copy_values(self.trained(), copy)
            for layer in layers:
                layer.merge()
            copy_values(self._shards(), map(self._round, self._shards()))
            return measure()
        finally:
            for layer in layers:
                if layer.merged:
                    layer.unmerge()
            # peft unmerges by a subtraction, which is inexact, so the values come back too.
            if layers:
                copy_values(self._shards(), own)

    def count_changes(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[int, int]:
        """How many of the weights that training changes differ between two copies, as the engine
        holds them; of all.
        """
        differ = 0
        total = 0
        pairs = zip(self._engine_weights(before), self._engine_weights(after), strict=True)
        for one, other in pairs:
            differ += int((one != other).sum())
            total += one.numel()
        return differ, total

    def trained(self) -> list[Tensor]:
        """This rank's shard of every trained weight."""
        trained = (weight for weight in self._model.parameters() if weight.requires_grad)
        return [local_shard(weight.detach()) for weight in trained]

    def _shards(self) -> Iterator[Tensor]:
        return (local_shard(weight.detach()) for weight in self._model.parameters())

    def _round(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype)

    def _engine_weights(self, copy: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights that training changes in the engine, if it was sent a copy."""
        if not self._adapter:
            return copy
        with temporary_values(self.trained(), copy):
            state = MergedAdapter(self._model).state_dict()
            return [self._round(state[name]) for name in adapted_layers(self._model)]
