"""Earlier weights of the trainer, for an engine that samples with weights some updates old."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mismatch_cli.models.sharding import local_shard
from mismatch_cli.train.checkpoint import by_name, loaded, trained_weights
from mismatch_cli.train.temporary_values import temporary_values


class PastWeights:
    """The trained weights as they were before each of the last N optimiser steps.

    After v steps the oldest copy is θ(max(0, v − N)): with it the engine samples. The copies are in
    CPU memory, in the weights' own dtype: N times what this rank trains, or of an adapter alone.
    """

    def __init__(self, model: Any, updates: int) -> None:
        self._weights = trained_weights(model)
        self._updates = updates
        self._copies: dict[int, list[Tensor]] = {}  # by optimiser steps that led to them

    def keep_copy(self, version: int) -> None:
        """Copy the weights, which the next optimiser step will change; the oldest copy goes."""
        if not self._updates:
            return
        if len(self._copies) == self._updates:
            del self._copies[min(self._copies)]
        self._copies[version] = [shard.to("cpu", copy=True) for shard in self._shards()]

    def version(self, newest: int) -> int:
        """The optimiser steps that led to the weights that sample, given those made so far."""
        return min(self._copies, default=newest)

    @contextmanager
    def sampling_weights(self) -> Iterator[None]:
        """Let the model have the weights that sample inside the block, then its own again, to the
        bit.
        """
        if not self._copies:
            yield
            return
        with temporary_values(self._shards(), self._copies[min(self._copies)]):
            yield

    def tensors(self) -> dict[str, Tensor]:
        """The copies by version and name, for a checkpoint."""
        named: dict[str, Tensor] = {}
        for version, copy in self._copies.items():
            named |= by_name(f"past-{version}", self._weights, copy)
        return named

    def versions(self) -> list[int]:
        return list(self._copies)

    def restore(self, versions: Iterable[int], load: Callable[[dict[str, Tensor]], None]) -> None:
        """Continue from `versions()`; `load` fills tensors of the names of `tensors()`."""
        self._copies = {}
        for version in versions:
            room = [torch.empty_like(shard, device="cpu") for shard in self._shards()]
            self._copies[version] = loaded(f"past-{version}", self._weights, room, load)

    def _shards(self) -> list[Tensor]:
        """This rank's shard of every trained weight."""
        return [local_shard(weight.detach()) for weight in self._weights.values()]
