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
    return _all_of(modules, shapes, *loading_plan(config, shapes))


def _all_of(
    modules: Mapping[str, nn.Module],
    shapes: Shapes,
    parameters: list[Parameter],
    nowhere: dict[str, str],
) -> Iterator[tuple[str, Tensor | UnreadTensor]]:
    parts, told = _Parts(shapes), set[str]()
    for parameter in parameters:
        for name, tensor in _of_parameter(modules, parameter, parts):
            told.add(name)
            yield name, tensor
    yield from (
        (name, UnreadTensor(reason))
        for name, reason in {**nowhere, **parts.lacking()}.items()
        if name not in told
    )


def _itself(model: nn.Module) -> nn.Module:
    return model


class _Parts:
    """Partly read tensors of the folder: one may be spread over several parameters of the
    engine.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._begun: dict[str, tuple[Tensor, set[Any]]] = {}
        self._done: set[str] = set()

    def add(self, piece: TensorPiece, parameter: Tensor) -> Tensor | None:
        """Add one part; returns the full tensor once it is complete."""
        if piece.name in self._done:  # a second copy
            return None
        if piece.name not in self._begun:
            self._begun[piece.name] = parameter.new_empty(self._shapes[piece.name]), set()
        whole, seen = self._begun[piece.name]
        piece.read(parameter, whole)
        seen.add(
            (piece.source.numel, piece.source.offset, piece.source.stride, piece.target.offset)
        )
        if sum(numel for numel, *_ in seen) < whole.numel():
            return None
        self._done.add(piece.name)
        return self._begun.pop(piece.name)[0]

    def lacking(self) -> dict[str, str]:
        return dict.fromkeys(self._begun, "the engine in this process has only part of it")


def _of_parameter(
    modules: Mapping[str, nn.Module], parameter: Parameter, parts: _Parts
) -> Iterator[tuple[str, Tensor | UnreadTensor]]:
    """The tensors in one parameter; then those that a tied head computes with."""
    read = _read(modules, parameter.paths[0], parameter.like)
    for piece in parameter.pieces:
        if isinstance(read, UnreadTensor):
            yield piece.name, read
        elif (tensor := parts.add(piece, read)) is not None:
            yield piece.name, tensor
    for path, name in _tied_heads(modules, parameter.paths):
        head_parts = _Parts({name: parameter.pieces[0].source.size})
        read = _read(modules, path, parameter.like, head=True)
        if isinstance(read, UnreadTensor):
            yield name, read
        elif (tensor := head_parts.add(replace(parameter.pieces[0], name=name), read)) is not None:
            yield name, tensor


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

    yield from (
        (path, path) for path in paths[1:] if isinstance(_owner(modules, path), ParallelLMHead)
    )
    headless = not any(isinstance(module, ParallelLMHead) for module in modules.values())
    # As in Gemma: it is also the head
    if headless and isinstance(_owner(modules, paths[0]), VocabParallelEmbedding):
        yield paths[0], _HEAD


def _owner(modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
    return modules.get(path.rpartition(".")[0])


def _read(
    modules: Mapping[str, nn.Module], path: str, like: Tensor, *, head: bool = False
) -> Tensor | UnreadTensor:
    """A full parameter in the layout that it was loaded in."""
    layer, attribute = _owner(modules, path), path.rpartition(".")[2]
    if layer is None:
        return UnreadTensor("the engine has changed its module")
    try:
        if attribute in _EXPERTS and hasattr(
            getattr(layer, "quant_method", None), "unquantized_backend"
        ):
            return _unpacked_experts(layer, attribute, like)
        # On a CPU, kernels compute with packed copies, even of a tied head, not with parameters.
        # `embed_tokens.weight` may be newer than the copy, and show a sync that did not happen.
        if attribute == "weight" and (head or _is_packed(layer)):
            return _of_identity(layer, like)
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
    quantised = isinstance(method, LinearMethodBase) and not isinstance(
        method, UnquantizedLinearMethod
    )
    linear = isinstance(method, LinearMethodBase) or isinstance(layer, ParallelLMHead)
    return quantised or (linear and hasattr(layer, "cpu_linear"))


@torch.no_grad()
def _of_identity(layer: nn.Module, like: Tensor) -> Tensor:
    """Read a weight column by column from rows of the identity: a dot product with one nonzero
    term is exact.
    """
    outputs, inputs = like.shape
    method: Any = layer.quant_method
    read = torch.empty(outputs, inputs, dtype=like.dtype)
    device = next((p.device for p in layer.parameters()), None)
    for start in range(0, inputs, _TILE):
        stop = min(start + _TILE, inputs)
        rows = torch.zeros(stop - start, inputs, dtype=like.dtype, device=device)
        rows.diagonal(start).fill_(1)
        read[:, start:stop] = method.apply(layer, rows, None).t()
    return read


def _unpacked_experts(layer: Any, attribute: str, like: Tensor) -> Tensor:
    """Undo a packing, which only moves numbers: packing their indices the same way shows where
    each has gone.
    """
    live: Tensor = getattr(layer, attribute).detach()
    experts, places = like.shape[0], like[0].numel()
    origin = torch.zeros(live[0].numel(), dtype=torch.long)
    shift = 0
    while places >> shift:
        digits = (torch.arange(1, places + 1) >> shift) % (1 << _DIGIT_BITS)
        coded = digits.view(1, *like.shape[1:]).to(live)
        origin += _packed_again(layer, attribute, coded).flatten().cpu().long() << shift
        shift += _DIGIT_BITS
    (filled,) = origin.nonzero(as_tuple=True)
    if not torch.equal(origin[filled].sort().values, torch.arange(1, places + 1)):
        raise ValueError("the kernel's packing does more than move numbers")
    read = torch.empty(experts, places, dtype=live.dtype)
    for expert in range(experts):
        read[expert, origin[filled] - 1] = live[expert].flatten().cpu()[filled]
    return read.view(like.shape)


@torch.no_grad()
def _packed_again(layer: Any, attribute: str, coded: Tensor) -> Tensor:
    """Pack one expert's matrix as vLLM does when it loads, with its own two steps."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        convert_to_unquantized_kernel_format,
    )

    method, moe_config = layer.quant_method, copy.copy(layer.moe_config)
    first, second = _EXPERTS
    gated = 2 if moe_config.is_act_and_mul else 1
    single, rows, columns = coded.shape
    other = (
        (single, columns, rows // gated) if attribute == first else (single, gated * columns, rows)
    )
    matrices = {attribute: coded, second if attribute == first else first: coded.new_zeros(other)}
    made = nn.Module()
    for name, matrix in matrices.items():
        made.register_parameter(name, nn.Parameter(matrix, requires_grad=False))
    packed = convert_to_unquantized_kernel_format(
        method.unquantized_backend,
        moe_config=moe_config,
        layer=made,
        w13_weight=made.w13_weight,
        w2_weight=made.w2_weight,
    )
    for name, matrix in zip(_EXPERTS, packed, strict=True):
        made.register_parameter(name, nn.Parameter(matrix.detach(), requires_grad=False))
    copy.copy(method.moe_kernel.fused_experts).process_weights_after_loading(made)
    return getattr(made, attribute).detach()
