"""Finds a model's modules by kind, layer by layer: norms, attention, MLPs or experts, routers,
rotary embeddings.

Engine and trainer name and nest modules differently; both have decoder layers, each with attention,
an MLP or experts, and norms.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mismatch_cli.base.errors import MismatchError

# In the order in which a token passes them. `mlp` and `experts` are whole blocks, `attention`
# includes its projections; `residual` is not a module but the precision of the stream between them.
# A graft of all kinds leaves no gap, to the last bit (tests/bisect/test_grafting.py).
# Whatever is left comes from a part of the model that is not found here.
KINDS = ("embedding", "residual", "norm", "rotary", "attention", "router", "mlp", "experts", "head")
_NORM = re.compile("Norm")
_ROTARY = re.compile(r"Rotary|RoPE|Rope")
_MIXES_TOKENS = re.compile(r"Attention|Attn|DeltaNet|Mamba|Mixer|Recurrent|ShortConv|Retention")
_MIXERS = (
    "self_attn",
    "attn",
    "attention",
    "self_attention",
    "linear_attn",
    "mamba",
    "mixer",
    "temporal_block",
)
_IS_MLP = re.compile(r"MLP|Mlp|FeedForward|FFN|MoE|Moe|SparseMoe")
_MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "mlp_block")
_ROUTERS = ("gate", "router")
BLOCKS = ("attention", "mlp", "experts")


@dataclass(frozen=True)
class Part:
    """A module of one kind; `place` is its name within its layer, or its own name outside the
    layers.
    """

    name: str
    kind: str
    layer: int | None
    inside: str  # the kind of block that it is nested in; empty for a direct child of the layer
    place: str
    module: Any

    @property
    def inputs(self) -> int:
        """How many hidden states it can take: a norm may take a residual or a gate with its
        input.
        """
        return 2 if self.kind == "norm" else 1

    @property
    def slot(self) -> tuple[Any, ...]:
        """Where to look for its counterpart in another model; a dense MLP may correspond to
        experts.
        """
        return self.layer, "mlp" if self.kind == "experts" else self.kind, bool(self.inside)


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model, and its decoder layers by name."""

    parts: list[Part]
    layers: dict[str, Any]

    @classmethod
    def of(cls, model: Any) -> ModelParts:
        """Find them; a `MismatchError` for a model without a stack of layers."""
        path, stack = _stack(model)
        layers = {f"{path}.{number}": layer for number, layer in enumerate(stack)}
        parts = [
            part
            for at, (name, layer) in enumerate(layers.items())
            for part in _of_layer(at, name, layer)
        ]
        return cls(parts + list(_outside(model, path)), layers)


def _stack(model: Any) -> tuple[str, Any]:
    """The decoder layers: the list with as many as the text model's configuration says, nearest
    to the root.
    """
    import torch

    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", 0)
    lists = [
        ((len(module) != layers, name.count("."), -len(module)), name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and any(
            _block_kind(own, child) == "attention"
            for layer in module
            for own, child in layer.named_children()
        )
    ]
    if not lists:
        raise MismatchError(
            f"{type(model).__name__} has no list of decoder layers with attention, so its "
            "modules cannot be compared one by one. Leave out that stage: --stages 0,1,2"
        )
    _, name, module = min(lists, key=lambda found: found[0])
    return name, module


def _of_layer(at: int, name: str, layer: Any) -> Iterator[Part]:
    for own, child in layer.named_children():
        kind = _block_kind(own, child)
        if kind is None:
            continue
        yield Part(f"{name}.{own}", kind, at, "", own, child)
        if kind in BLOCKS:
            yield from _inside(at, f"{name}.{own}", kind, child)


def _inside(at: int, name: str, block: str, module: Any) -> Iterator[Part]:
    for path, child in module.named_modules():
        kind = _inner_kind(path, child, block)
        if kind is not None:
            yield Part(f"{name}.{path}", kind, at, block, path, child)


def _inner_kind(path: str, module: Any, block: str) -> str | None:
    if path and _NORM.search(type(module).__name__):
        return "norm"
    if path in _ROUTERS and block == "experts":
        return "router"
    return "rotary" if path and _is_rotary(module) else None


def turns(module: Any) -> bool:
    """Whether a module rotates queries and keys by itself, as vLLM's do inside attention."""
    return bool(_ROTARY.search(type(module).__name__)) and hasattr(module, "head_size")


def _is_rotary(module: Any) -> bool:
    """Whether it computes cos and sin from positions, for another function to rotate with."""
    kind = type(module).__name__
    return bool(_ROTARY.search(kind)) and not kind.startswith("Apply") and not turns(module)


def _block_kind(name: str, module: Any) -> str | None:
    """The kind of a layer's child, by its class, else by its name; None for dropout and the
    like.
    """
    kind = type(module).__name__
    if _NORM.search(kind):
        return "norm"
    if _MIXES_TOKENS.search(kind):
        return "attention"
    if _IS_MLP.search(kind) or name in _MLPS:
        return "experts" if hasattr(module, "experts") else "mlp"
    return "attention" if name in _MIXERS else None


def _outside(model: Any, stack: str) -> Iterator[Part]:
    """The final norm, and a rotary embedding that all layers share; norms before the stack are
    of embeddings.
    """
    after_stack = False
    for name, module in model.named_modules():
        if name == stack or name.startswith(f"{stack}."):
            after_stack = True
        elif _NORM.search(type(module).__name__):
            if after_stack:
                yield Part(name, "norm", None, "", name.rpartition(".")[2], module)
        elif _is_rotary(module):
            yield Part(name, "rotary", None, "", name.rpartition(".")[2], module)


@dataclass(frozen=True)
class ModulePair:
    """A module of the trainer and its counterpart in the engine."""

    trainer: Part
    engine: Part


def match_parts(
    trainer: Iterable[Part], engine: Iterable[Part]
) -> tuple[list[ModulePair], list[Part]]:
    """Pairs by name within a layer, the rest of a layer and kind by order; and the trainer's
    parts without a pair.
    """
    offered: dict[tuple[Any, ...], list[Part]] = defaultdict(list)
    for part in engine:
        offered[part.slot].append(part)
    wanted: dict[tuple[Any, ...], list[Part]] = defaultdict(list)
    for part in trainer:
        wanted[part.slot].append(part)
    pairs, alone = list[ModulePair](), list[Part]()
    for slot, parts in wanted.items():
        found, left = _in_slot(parts, offered[slot])
        pairs += found
        alone += left
    return pairs, alone


def _in_slot(trainer: list[Part], engine: list[Part]) -> tuple[list[ModulePair], list[Part]]:
    named = {part.place: part for part in engine}
    pairs = [ModulePair(part, named.pop(part.place)) for part in trainer if part.place in named]
    taken = {id(pair.trainer) for pair in pairs}
    rest = [part for part in trainer if id(part) not in taken]
    if len(rest) == len(named):
        return pairs + [ModulePair(*both) for both in zip(rest, named.values(), strict=True)], []
    return pairs, rest
