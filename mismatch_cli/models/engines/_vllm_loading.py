"""Where vLLM puts each tensor of a model folder: we watch its own loader, so that no family needs a
table here.

The loader gets tensors without values (device "meta") for a second model without values. Each copy
into a parameter shows which part of which tensor goes where. In reverse, that undoes fused
projections, experts, renamings and padding. A tensor that the loader reorders is loaded again with
its elements numbered.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mismatch_cli.base.errors import first_line
from mismatch_cli.models.engines import Shapes
from mismatch_cli.models.engines._vllm_process import ModelClasses

# Number of element 0, and the step to the next: arithmetic would leave this grid
_FIRST, _STEP = 1 << 40, 7919
_aten = torch.ops.aten
_WRITES = (_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor)


@dataclass(frozen=True)
class View:
    """A part of a tensor, as torch lays it out; `elements`: their numbers, if their order
    differs.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    elements: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    @property
    def numel(self) -> int:
        return Size(self.size).numel()


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor of the folder, and its place in a parameter of the engine."""

    name: str
    source: View
    target: View

    def read(self, parameter: Tensor, into: Tensor) -> None:
        """Copy this part of the engine's full parameter back to where it came from; both are
        contiguous.
        """
        part = parameter.as_strided(self.target.size, self.target.stride, self.target.offset)
        if self.source.elements is None:
            into.as_strided(self.source.size, self.source.stride, self.source.offset).copy_(part)
        else:
            into.view(-1)[self.source.elements.flatten()] = part.expand(self.source.size).flatten()


@dataclass(frozen=True)
class Parameter:
    """A parameter of the engine: its paths (several if weights are tied), its full shape, and
    its pieces.
    """

    paths: tuple[str, ...]
    like: Tensor  # without values
    pieces: tuple[TensorPiece, ...]


def loading_plan(vllm_config: Any, shapes: Shapes) -> tuple[list[Parameter], dict[str, str]]:
    """The parameters that a folder's tensors go to, in order; and why the place of a tensor is
    unknown.
    """
    empty = _without_values(vllm_config)
    # Loaders take its value
    single = [name for name, shape in shapes.items() if Size(shape).numel() == 1]
    with torch.device("meta"):
        sources = {
            name: torch.empty(shape, dtype=vllm_config.model_config.dtype)
            for name, shape in shapes.items()
        }
    sources |= {name: _numbered(shapes[name], start).double() for start, name in enumerate(single)}
    # vLLM's loader fuses, renames, reorders and pads tensors, in different ways for each family.
    # Only watching it shows where a tensor is: a table here would be wrong for the next family.
    watch = _Watch(empty, sources)
    watch.load(empty)
    pieces = watch.pieces
    for name in watch.reordered:
        numbered = _Watch(empty, {name: _numbered(shapes[name])})
        numbered.load(empty)
        pieces += numbered.pieces
    placed = {piece.name for _, piece in pieces}
    nowhere = {name: _reason(name, watch) for name in shapes if name not in placed}
    return _parameters(empty, pieces), nowhere


def _reason(name: str, watch: _Watch) -> str:
    if name in watch.failed:
        return f"vLLM's loader refuses it: {watch.failed[name]}"
    if name in watch.reordered:
        return "vLLM keeps only what it computes from it when it loads"
    return "vLLM does not load it"


def _parameters(model: nn.Module, pieces: list[tuple[int, TensorPiece]]) -> list[Parameter]:
    pieces_of: dict[int, dict[tuple[str, View], TensorPiece]] = defaultdict(dict)
    for storage, piece in pieces:
        pieces_of[storage][piece.name, replace(piece.source, elements=None)] = piece
    found: dict[int, Parameter] = {}
    for path, tensor in _tensors(model):
        known = found.get(key := _storage(tensor)) or Parameter(
            (), tensor, tuple(pieces_of[key].values())
        )
        found[key] = replace(known, paths=(*known.paths, path))
    return [parameter for parameter in found.values() if parameter.pieces]


def _numbered(shape: tuple[int, ...], start: int = 0) -> Tensor:
    return (torch.arange(start, start + Size(shape).numel()) * _STEP + _FIRST).view(shape)


def _without_values(vllm_config: Any) -> nn.Module:
    """A second copy of the engine's model: without values or quantisation, and unknown to the
    engine's caches.
    """
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.load_config = copy.copy(config.load_config)
    config.load_config.device = "meta"  # for parameters that a loader makes
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.quant_config = None
    with (
        _classes_kept(config.model_config.model),
        _ropes_kept(),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        return initialize_model(config)


@contextmanager
def _classes_kept(model: str) -> Iterator[None]:
    before = ModelClasses.current(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _ropes_kept() -> Iterator[None]:
    """Restore vLLM's table of rotary embeddings, which models share: one without values must not
    stay there.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    before = dict(_ROPE_DICT)
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(before)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    """Records each copy of a folder's tensor into a parameter; nothing is copied, since
    parameters have no values.
    """

    def __init__(self, model: nn.Module, sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        # Some backends give small tensors values
        self._targets = {_storage(tensor) for _, tensor in _tensors(model)}
        self._left, self._handed, self._last = iter(sources.items()), 0, ""
        self._sources = sources
        self._plain = {_storage(tensor): name for name, tensor in sources.items() if tensor.is_meta}
        self._numbered = [name for name, tensor in sources.items() if not tensor.is_meta]
        self._derived: dict[int, set[str]] = {}
        self._made: list[Tensor] = []  # kept alive, or others would reuse their storages
        self.pieces: list[tuple[int, TensorPiece]] = []
        self.reordered: dict[str, None] = {}
        self.failed: dict[str, str] = {}

    def load(self, model: Any) -> None:
        """Load all tensors; one that the loader refuses is skipped, and the others follow."""
        while self._handed < len(self._sources):
            try:
                with self:
                    model.load_weights(self._hand_out())
                return
            except Exception as error:  # each model's loader fails in its own way
                self.failed[self._last] = f"{type(error).__name__}: {first_line(error)}"

    def _hand_out(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._left:
            self._last, self._handed = name, self._handed + 1
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WRITES and (args[0].is_meta or _storage(args[0]) in self._targets):
            self._note(args[0], args[1])
            return args[0]
        if func is _aten._to_copy.default and not args[0].is_meta:
            kwargs = {**kwargs, "device": None}  # a numbered tensor keeps its numbers on any device
        made = func(*args, **kwargs)
        names = set().union(
            *(self._of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        )
        for tensor in tree_leaves(made):
            if names and isinstance(tensor, Tensor) and not self._of(tensor):
                self._derived[_storage(tensor)] = names
                self._made.append(tensor)
        return made

    def _of(self, tensor: Tensor) -> set[str]:
        key = _storage(tensor)
        return {self._plain[key]} if key in self._plain else self._derived.get(key, set())

    def _note(self, target: Tensor, source: Tensor | float) -> None:
        place = _storage(target)
        if not isinstance(source, Tensor) or not source.is_meta:
            self._note_numbers(target, torch.as_tensor(source))
        elif _storage(source) in self._plain:
            name = self._plain[_storage(source)]
            # The target may be a parameter, or copied to one later
            self._derived.setdefault(place, {name})
            self._made.append(target)
            self.pieces.append(
                (place, TensorPiece(name, View.of(source.expand(target.shape)), View.of(target)))
            )
        else:
            self.reordered |= dict.fromkeys(self._of(source))

    def _note_numbers(self, target: Tensor, source: Tensor) -> None:
        """Identify the elements by their numbers; anything else that a loader writes, such as
        zeros, is its own.
        """
        number = source.double() - _FIRST
        which = (number / _STEP).long()
        if not self._numbered or (which * _STEP != number).any() or which.min() < 0:
            return
        several = len(self._numbered) > 1  # of one element each
        name = self._numbered[int(which.flatten()[0]) if several else 0]
        elements = torch.zeros_like(which) if several else which
        view = View(tuple(target.shape), elements=elements.expand(target.shape))
        self.pieces.append((_storage(target), TensorPiece(name, view, View.of(target))))
