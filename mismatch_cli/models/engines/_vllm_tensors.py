"""The tensors that a vLLM in this process computes with, under the names of a model folder.

Kernels pack weights: a packed layer is read by applying it to the identity, packed experts by
packing numbers the same way. Both are exact.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mismatch_cli.base.errors import first_line
from mismatch_cli.models.engines import Shapes, UnreadTensor
from mismatch_cli.models.engines._vllm_loading import Parameter, TensorPiece, loading_plan

_TILE = 1024  # rows of the identity to read a layer with
_DIGIT_BITS = 8  # integers of this many bits are exact in every dtype of weights
_HEAD = "lm_head.weight"
_IN_PROCESS = (None, "uni", "external_launcher")  # executors whose model is in this process
_EXPERTS = ("w13_weight", "w2_weight")  # of all experts, as vLLM fuses them
# vLLM's wrapper around a layer that may have an adapter
_WRAPPED = re.compile(r"\.base_layer(?=\.|$)")


def live_tensors(llm: Any, shapes: Shapes) -> Iterator[tuple[str, Tensor | UnreadTensor]]:
    """Every tensor of a folder with these shapes, as the engine computes with it, one at a time; or
    why it is unread.

    A head that is tied to the embeddings is included, though folders leave it out: kernels have
    their own copy.
    """
    config = llm.llm_engine.vllm_config
    if config.parallel_config.distributed_executor_backend not in _IN_PROCESS:
        return ((name, UnreadTensor("the engine's model is in another process")) for name in shapes)
    (model,) = llm.apply_model(_itself)
    modules = {
        _WRAPPED.sub("", path): module
        for path, module in model.named_modules(remove_duplicate=False)
    }
    return _read_all(modules, shapes, *loading_plan(config, shapes))


def _read_all(
    modules: Mapping[str, nn.Module],
    shapes: Shapes,
    parameters: list[Parameter],
    unplaced: dict[str, str],
) -> Iterator[tuple[str, Tensor | UnreadTensor]]:
    assembly = _Assembly(shapes)
    yielded: set[str] = set()
    for parameter in parameters:
        for name, tensor in _read_parameter(modules, parameter, assembly):
            yielded.add(name)
            yield name, tensor
    for name, reason in (unplaced | assembly.incomplete()).items():
        if name not in yielded:
            yield name, UnreadTensor(reason)


def _itself(model: nn.Module) -> nn.Module:
    return model


class _Assembly:
    """Puts tensors of the folder together: one may be spread over several parameters of the
    engine.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        # Each with its pieces so far: their numbers of elements, and their places
        self._begun: dict[str, tuple[Tensor, set[Any]]] = {}
        self._complete: set[str] = set()

    def add(self, piece: TensorPiece, parameter: Tensor) -> Tensor | None:
        """Add one piece; returns the full tensor once it is complete."""
        if piece.name in self._complete:  # a second copy
            return None
        if piece.name not in self._begun:
            self._begun[piece.name] = parameter.new_empty(self._shapes[piece.name]), set()
        tensor, places = self._begun[piece.name]
        piece.copy_back(parameter, tensor)
        source = piece.source
        places.add((source.numel, source.offset, source.stride, piece.target.offset))
        if sum(numel for numel, *_ in places) < tensor.numel():
            return None
        self._complete.add(piece.name)
        return self._begun.pop(piece.name)[0]

    def incomplete(self) -> dict[str, str]:
        return dict.fromkeys(self._begun, "the engine in this process has only part of it")


def _read_parameter(
    modules: Mapping[str, nn.Module], parameter: Parameter, assembly: _Assembly
) -> Iterator[tuple[str, Tensor | UnreadTensor]]:
    """The tensors in one parameter; then those that a tied head computes with."""
    values = _read(modules, parameter.paths[0], parameter.like)
    for piece in parameter.pieces:
        tensor = _add(piece, values, assembly)
        if tensor is not None:
            yield piece.name, tensor
    for path, name in _tied_heads(modules, parameter.paths):
        piece = replace(parameter.pieces[0], name=name)
        values = _read(modules, path, parameter.like, head=True)
        tensor = _add(piece, values, _Assembly({name: piece.source.size}))
        if tensor is not None:
            yield name, tensor


def _add(
    piece: TensorPiece, values: Tensor | UnreadTensor, assembly: _Assembly
) -> Tensor | UnreadTensor | None:
    """What is known of a tensor after this piece of it; None while others are missing."""
    if isinstance(values, UnreadTensor):
        return values
    return assembly.add(piece, values)


def _tied_heads(
    modules: Mapping[str, nn.Module], paths: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """The path in the engine, and the name in a folder, of each head that shares the parameter
    of the embeddings.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    for path in paths[1:]:
        if isinstance(_owner(modules, path), ParallelLMHead):
            yield path, path
    headless = not any(isinstance(module, ParallelLMHead) for module in modules.values())
    # As in Gemma: the embeddings are also the head.
    if headless and isinstance(_owner(modules, paths[0]), VocabParallelEmbedding):
        yield paths[0], _HEAD


def _owner(modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
    """The module that a parameter belongs to."""
    return modules.get(path.rpartition(".")[0])


def _read(
    modules: Mapping[str, nn.Module], path: str, like: Tensor, *, head: bool = False
) -> Tensor | UnreadTensor:
    """A full parameter, as the engine computes with it, in the layout that it was loaded in."""
    layer = _owner(modules, path)
    attribute = path.rpartition(".")[2]
    if layer is None:
        return UnreadTensor("the engine has changed its module")
    method = getattr(layer, "quant_method", None)
    try:
        if attribute in _EXPERTS and hasattr(method, "unquantized_backend"):
            return _unpack_experts(layer, attribute, like)
        # On a CPU, kernels compute with packed copies, even of a tied head, not with parameters.
        # `embed_tokens.weight` may be newer than the copy, and show a sync that did not happen.
        if attribute == "weight" and (head or _is_packed(layer)):
            return _multiply_identity(layer, like)
    except Exception as error:  # each packing can fail in its own way
        return UnreadTensor(
            f"its packing cannot be undone ({type(error).__name__}: {first_line(error)})"
        )
    live = getattr(layer, "_cpu_unpacked_conv_weight", getattr(layer, attribute, None))
    if live is None or live.numel() != like.numel():
        return UnreadTensor(f"the engine keeps it in a different form ({type(layer).__name__})")
    return live.detach().reshape(like.shape).contiguous()


def _is_packed(layer: nn.Module) -> bool:
    """Whether a layer multiplies with something else than its `weight`: a kernel's copy, or
    integers and scales.
    """
    from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    method = getattr(layer, "quant_method", None)
    linear = isinstance(method, LinearMethodBase)
    if linear and not isinstance(method, UnquantizedLinearMethod):
        return True
    return (linear or isinstance(layer, ParallelLMHead)) and hasattr(layer, "cpu_linear")


@torch.no_grad()
def _multiply_identity(layer: nn.Module, like: Tensor) -> Tensor:
    """Read a weight column by column from rows of the identity: a dot product with one nonzero
    term is exact.
    """
    outputs, inputs = like.shape
    method: Any = layer.quant_method
    weight = torch.empty(outputs, inputs, dtype=like.dtype)
    device = getattr(next(layer.parameters(), None), "device", None)
    for start in range(0, inputs, _TILE):
        stop = min(start + _TILE, inputs)
        rows = torch.zeros(stop - start, inputs, dtype=like.dtype, device=device)
        rows.diagonal(start).fill_(1)
        weight[:, start:stop] = method.apply(layer, rows, None).t()
    return weight


def _unpack_experts(layer: Any, attribute: str, like: Tensor) -> Tensor:
    """Undo a packing, which only moves numbers. A `ValueError` if it does more."""
    packed: Tensor = getattr(layer, attribute).detach()
    experts, elements = like.shape[0], like[0].numel()
    origin = _packed_origins(layer, attribute, like, packed)
    (filled,) = origin.nonzero(as_tuple=True)
    if not torch.equal(origin[filled].sort().values, torch.arange(1, elements + 1)):
        raise ValueError("the kernel's packing does more than move numbers")
    weights = torch.empty(experts, elements, dtype=packed.dtype)
    for expert in range(experts):
        weights[expert, origin[filled] - 1] = packed[expert].flatten().cpu()[filled]
    return weights.view(like.shape)


def _packed_origins(layer: Any, attribute: str, like: Tensor, packed: Tensor) -> Tensor:
    """Where each element of one expert's packed matrix was before, counted from 1; 0 for padding.

    The numbers 1, 2, … are packed like weights, whose dtype holds only small ones exactly: so they
    are packed digit by digit.
    """
    elements = like[0].numel()
    origin = torch.zeros(packed[0].numel(), dtype=torch.long)
    shift = 0
    while elements >> shift:
        digits = (torch.arange(1, elements + 1) >> shift) % (1 << _DIGIT_BITS)
        coded = digits.view(1, *like.shape[1:]).to(packed)
        origin += _pack(layer, attribute, coded).flatten().cpu().long() << shift
        shift += _DIGIT_BITS
    return origin


@torch.no_grad()
def _pack(layer: Any, attribute: str, matrix: Tensor) -> Tensor:
    """Pack one expert's matrix as vLLM does when it loads, with its own two steps."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        convert_to_unquantized_kernel_format,
    )

    method = layer.quant_method
    moe_config = copy.copy(layer.moe_config)
    w13, w2 = _EXPERTS
    gated = 2 if moe_config.is_act_and_mul else 1
    single, rows, columns = matrix.shape
    # vLLM packs both matrices of an expert together: the other one is zero.
    if attribute == w13:
        matrices = {w13: matrix, w2: matrix.new_zeros(single, columns, rows // gated)}
    else:
        matrices = {w2: matrix, w13: matrix.new_zeros(single, gated * columns, rows)}
    expert = nn.Module()
    for name, values in matrices.items():
        expert.register_parameter(name, nn.Parameter(values, requires_grad=False))
    converted = convert_to_unquantized_kernel_format(
        method.unquantized_backend,
        moe_config=moe_config,
        layer=expert,
        **dict(expert.named_parameters()),
    )
    for name, values in zip(_EXPERTS, converted, strict=True):
        expert.register_parameter(name, nn.Parameter(values.detach(), requires_grad=False))
    copy.copy(method.moe_kernel.fused_experts).process_weights_after_loading(expert)
    return getattr(expert, attribute).detach()
