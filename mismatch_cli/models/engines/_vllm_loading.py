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

    def copy_back(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy this part of the engine's full parameter back into the folder's tensor; both are
        contiguous.
        """
        source, target = self.source, self.target
        values = parameter.as_strided(target.size, target.stride, target.offset)
        if source.elements is None:
            tensor.as_strided(source.size, source.stride, source.offset).copy_(values)
        else:
            tensor.view(-1)[source.elements.flatten()] = values.expand(source.size).flatten()


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
    dtype = vllm_config.model_config.dtype
    sources = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }
    # A loader takes the value of a tensor of one element, so these have one: a number each.
    scalars = [name for name, shape in shapes.items() if Size(shape).numel() == 1]
    for number, name in enumerate(scalars):
        sources[name] = _numbered(shapes[name], number).double()
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
    unplaced = {name: _reason(name, watch) for name in shapes if name not in placed}
    return _parameters(empty, pieces), unplaced


def _reason(name: str, watch: _Watch) -> str:
    """Why the place of a tensor is unknown."""
    if name in watch.failed:
        return f"vLLM's loader refuses it: {watch.failed[name]}"
    if name in watch.reordered:
        return "vLLM keeps only what it computes from it when it loads"
    return "vLLM does not load it"


def _parameters(model: nn.Module, pieces: list[tuple[int, TensorPiece]]) -> list[Parameter]:
    """The parameters that pieces were copied into, by their storages, in the order of the model."""
    # A loader may copy the same piece twice: the later copy counts.
    pieces_of: dict[int, dict[tuple[str, View], TensorPiece]] = defaultdict(dict)
    for storage, piece in pieces:
        pieces_of[storage][piece.name, replace(piece.source, elements=None)] = piece
    paths_of: dict[int, list[str]] = defaultdict(list)
    tensor_of: dict[int, Tensor] = {}
    for path, tensor in _tensors(model):
        storage = _storage(tensor)
        paths_of[storage].append(path)
        tensor_of.setdefault(storage, tensor)
    return [
        Parameter(tuple(paths_of[storage]), tensor, tuple(pieces_of[storage].values()))
        for storage, tensor in tensor_of.items()
        if storage in pieces_of
    ]


def _numbered(shape: tuple[int, ...], start: int = 0) -> Tensor:
    """A tensor of the numbers from `start`, on a grid that no values of a loader are on."""
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
        _preserved_classes(config.model_config.model),
        _preserved_ropes(),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        return initialize_model(config)


@contextmanager
def _preserved_classes(model: str) -> Iterator[None]:
    """Inside the block vLLM may decorate transformers' classes, as when the engine loaded."""
    before = ModelClasses.current(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _preserved_ropes() -> Iterator[None]:
    """Inside the block vLLM may fill its table of rotary embeddings, which models share: those
    without values do not stay there.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    before = dict(_ROPE_DICT)
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(before)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, tied ones under each of their paths."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, however nested."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf


def _storage(tensor: Tensor) -> int:
    """What views of the same memory have in common, even without values."""
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    """Records each copy of a folder's tensor into a parameter; nothing is copied, since
    parameters have no values.
    """

    def __init__(self, model: nn.Module, sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        # Some backends give small tensors values
        self._targets = {_storage(tensor) for _, tensor in _tensors(model)}
        self._sources = sources
        self._remaining = iter(sources.items())
        self._handed_out = 0
        self._last = ""  # the tensor that the loader is at
        # The folder's tensors without values by their storages, and the names of those with numbers
        self._plain = {_storage(tensor): name for name, tensor in sources.items() if tensor.is_meta}
        self._numbered = [name for name, tensor in sources.items() if not tensor.is_meta]
        self._derived: dict[int, set[str]] = {}  # storage → names of what it was computed from
        self._alive: list[Tensor] = []  # or new tensors would reuse the storages of these
        self.pieces: list[tuple[int, TensorPiece]] = []  # each with the storage of its parameter
        self.reordered: dict[str, None] = {}  # what the loader computes with before it copies
        self.failed: dict[str, str] = {}

    def load(self, model: Any) -> None:
        """Load all tensors; one that the loader refuses is skipped, and the others follow."""
        while self._handed_out < len(self._sources):
            try:
                with self:
                    model.load_weights(self._hand_out())
                return
            except Exception as error:  # each model's loader fails in its own way
                self.failed[self._last] = f"{type(error).__name__}: {first_line(error)}"

    def _hand_out(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._remaining:
            self._last = name
            self._handed_out += 1
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WRITES and (args[0].is_meta or _storage(args[0]) in self._targets):
            self._note_write(args[0], args[1])
            return args[0]
        # A loader may move a tensor to the device of its parameter, where numbers would be lost.
        if func is _aten._to_copy.default and not args[0].is_meta:
            kwargs = {**kwargs, "device": None}
        result = func(*args, **kwargs)
        names = set[str]().union(*map(self._names_behind, _tensors_in((args, kwargs))))
        for tensor in _tensors_in(result):
            if names and not self._names_behind(tensor):
                self._derived[_storage(tensor)] = names
                self._alive.append(tensor)
        return result

    def _names_behind(self, tensor: Tensor) -> set[str]:
        """The folder's tensors that a tensor is a view of, or was computed from."""
        storage = _storage(tensor)
        if storage in self._plain:
            return {self._plain[storage]}
        return self._derived.get(storage, set())

    def _note_write(self, target: Tensor, source: Tensor | float) -> None:
        if not isinstance(source, Tensor) or not source.is_meta:
            self._note_numbers(target, torch.as_tensor(source))
        elif _storage(source) in self._plain:
            name = self._plain[_storage(source)]
            # The target may be a parameter, or copied to one later
            self._derived.setdefault(_storage(target), {name})
            self._alive.append(target)
            view = View.of(source.expand(target.shape))
            self.pieces.append((_storage(target), TensorPiece(name, view, View.of(target))))
        else:
            self.reordered |= dict.fromkeys(self._names_behind(source))

    def _note_numbers(self, target: Tensor, source: Tensor) -> None:
        """Identify the elements by their numbers; anything else that a loader writes, such as
        zeros, is its own.
        """
        offset = source.double() - _FIRST
        number = (offset / _STEP).long()
        if not self._numbered or (number * _STEP != offset).any() or number.min() < 0:
            return
        name, elements = self._numbered[0], number
        # Several tensors are of one element each, and its number is that of the tensor.
        if len(self._numbered) > 1:
            name, elements = self._numbered[int(number.flatten()[0])], torch.zeros_like(number)
        view = View(tuple(target.shape), elements=elements.expand(target.shape))
        self.pieces.append((_storage(target), TensorPiece(name, view, View.of(target))))
