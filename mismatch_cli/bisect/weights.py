"""Compares the tensors an engine computes with to those of the trainer's folder: which differ,
and how.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.bisect.altered_model import TensorWriter
from mismatch_cli.models.adapters import read_adapter
from mismatch_cli.models.engines import OpenEngine, UnreadTensor
from mismatch_cli.models.saved_tensors import SavedTensors, tied_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mismatch_cli.bisect.relations import Relation

ADAPTER = "adapter"  # used as a tensor's name


@dataclass(frozen=True)
class DifferingTensor:
    """A tensor of the trainer whose values differ in the engine; see `relations.Difference` for
    the numbers.
    """

    tensor: str
    relation: Relation
    relative: float
    share: float
    detail: str

    def to_json(self) -> dict[str, Any]:
        relative = self.relative if math.isfinite(self.relative) else None
        return {
            "tensor": self.tensor,
            "relation": self.relation,
            "relative": relative,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class TensorGroup:
    """Differing tensors that one experiment replaces together."""

    name: str
    relation: Relation
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class WeightComparison:
    """How many tensors were compared, which were not and why, and which differ, in the engine's
    order.
    """

    compared: int
    unread: Mapping[str, str] = field(default_factory=dict)  # name → reason
    differing: tuple[DifferingTensor, ...] = ()

    def groups(self) -> list[TensorGroup]:
        """Differing tensors by relation, without an adapter, which cannot be replaced like a
        tensor.
        """
        by_relation: dict[Relation, list[str]] = defaultdict(list)
        for row in self.differing:
            if row.tensor != ADAPTER:
                by_relation[row.relation].append(row.tensor)
        return [
            TensorGroup(group_name(names), relation, tuple(names))
            for relation, names in by_relation.items()
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "unread": [f"{name}: {reason}" for name, reason in self.unread.items()],
            "differing": [row.to_json() for row in self.differing],
        }


def compare_weights(
    engine: OpenEngine,
    trainer: str,
    *,
    trainer_dtype: str = "auto",
    keep_in: Path | None = None,
    on_compared: Callable[[int], None] = lambda _: None,
) -> WeightComparison:
    """Compare tensor by tensor; every tensor of the trainer's folder is compared or listed with a
    reason.

    Saves the engine's differing tensors in the folder `keep_in`, for `folder_with`.
    """
    import torch

    computes = None if trainer_dtype == "auto" else getattr(torch, trainer_dtype)
    saved = SavedTensors(trainer)
    with TensorWriter(keep_in) as store:
        comparing = _Comparing(saved, computes, store)
        for name, tensor in engine.weights(saved.shapes):
            comparing.take(name, tensor)
            on_compared(1)
        return comparing.result()


class _Comparing:
    """The comparison so far: of a tensor, only its numbers, and its digest if it differs."""

    def __init__(
        self, trainer: SavedTensors, computes: torch.dtype | None, store: TensorWriter
    ) -> None:
        self._trainer = trainer
        self._computes = computes
        self._store = store
        self._names = _Names(trainer)
        self._compared: set[str] = set()
        self._unread: dict[str, str] = {}
        self._differing: dict[str, DifferingTensor] = {}
        # Of unknown relation
        self._strangers: dict[str, tuple[tuple[int, ...], torch.dtype, bytes]] = {}

    def take(self, name: str, tensor: Tensor | UnreadTensor) -> None:
        """Compare a tensor of the engine with that of the trainer."""
        from mismatch_cli.bisect.relations import difference

        name, own = self._names.find(name)
        if isinstance(tensor, UnreadTensor):
            self._unread[name] = tensor.reason
            return
        if own is None:
            self._unread[name] = "the trainer's folder has no such tensor"
            return
        self._compared.add(name)
        differs = difference(tensor, self._trainer.read(own), self._computes)
        if differs is None:
            return
        self._store.add(name, tensor)
        self._differing[name] = DifferingTensor(
            name, differs.relation, differs.relative, differs.share, differs.detail
        )
        if differs.relation == "other":
            self._strangers[name] = tuple(tensor.shape), tensor.dtype, _digest(tensor)

    def result(self) -> WeightComparison:
        """The comparison, once the engine has no more tensors."""
        missing = self._trainer.shapes.keys() - self._compared - self._unread.keys()
        unread = self._unread | dict.fromkeys(sorted(missing), "the engine has no such tensor")
        # Two names of the engine may be one of the trainer's; it was compared if either was.
        unread = {name: reason for name, reason in unread.items() if name not in self._compared}
        for name, other in self._recognise_strangers():
            self._differing[name] = replace(self._differing[name], detail=f"the trainer's {other}")
        return WeightComparison(len(self._compared), unread, tuple(self._differing.values()))

    def _recognise_strangers(self) -> Iterator[tuple[str, str]]:
        """Which tensors of unknown relation equal another tensor of the trainer; only those of the
        same shape are read again.
        """
        kinds = {(shape, dtype) for shape, dtype, _ in self._strangers.values()}
        by_digest = {}
        for (shape, dtype), (own, own_shape) in product(kinds, self._trainer.shapes.items()):
            if own_shape == shape:
                tensor = self._trainer.read(own).to(dtype)
                by_digest[shape, dtype, _digest(tensor)] = own
        for name, key in self._strangers.items():
            if key in by_digest:
                yield name, by_digest[key]


class _Names:
    """Which tensor of the trainer's folder an engine's name refers to."""

    def __init__(self, trainer: SavedTensors) -> None:
        self._shapes = trainer.shapes
        self._tied = tied_names(trainer.model)
        self._tails = {_tail(name): name for name in trainer.shapes}

    def find(self, name: str) -> tuple[str, str | None]:
        """The trainer's name, and the tensor of its folder to read: under another name, if
        weights are tied.
        """
        if name in self._shapes:
            return name, name
        tied = self._tied.get(name)
        if tied in self._shapes:
            return name, tied
        # One side may prefix the names.
        own = self._tails.get(_tail(name))
        return own or name, own


def _tail(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")


def _digest(tensor: Tensor) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().flatten() + 0.0  # makes −0 equal 0
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data).digest()


def compare_adapters(
    rollout: Mapping[str, Any], trainer: Mapping[str, Any]
) -> DifferingTensor | None:
    """None if both sides of a manifest use the same adapter, or none."""
    digests = [_adapter_digest(side) for side in (rollout, trainer)]
    if digests[0] == digests[1]:
        return None
    detail = " instead of ".join(digest or "none" for digest in digests)
    return DifferingTensor(ADAPTER, "other", math.inf, 1.0, detail)


def _adapter_digest(side: Mapping[str, Any]) -> str | None:
    name = side.get("adapter")
    if name is None:
        return None
    return str(side.get("adapter_digest") or read_adapter(name).digest)


def group_name(names: Sequence[str]) -> str:
    """The tensor, or the module within one layer that has all of them; `weights` if they are in
    several layers.
    """
    if len(names) == 1:
        return names[0]
    shared = []
    for of_all in zip(*(name.split(".") for name in names), strict=False):
        if len(set(of_all)) > 1:
            break
        shared.append(of_all[0])
    # A number among the shared steps is that of the one layer they are in.
    if any(map(str.isdecimal, shared)):
        return ".".join(shared)
    return "weights"
