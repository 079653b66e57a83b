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
from operator import itemgetter
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
        path, stack = _find_stack(model)
        layers: dict[str, Any] = {}
        parts: list[Part] = []
        for number, layer in enumerate(stack):
            name = f"{path}.{number}"
            layers[name] = layer
            parts += _parts_of_layer(number, name, layer)
        parts += _parts_outside(model, path)
        return cls(parts, layers)


def _find_stack(model: Any) -> tuple[str, Any]:
    """The name and the list of the decoder layers: if several lists have attention, the one with as
    many layers as the text model's configuration says, nearest to the root.
    """
    import torch

    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    candidates = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and any(map(_has_attention, module)):
            preference = (len(module) != layers, name.count("."), -len(module))
            candidates.append((preference, name, module))
    if not candidates:
        raise MismatchError(
            f"{type(model).__name__} has no list of decoder layers with attention, so its "
            "modules cannot be compared one by one. Leave out that stage: --stages 0,1,2"
        )
    _, name, module = min(candidates, key=itemgetter(0))
    return name, module


def _has_attention(layer: Any) -> bool:
    children = layer.named_children()
    return any(_block_kind(name, child) == "attention" for name, child in children)


def _parts_of_layer(number: int, layer_name: str, layer: Any) -> Iterator[Part]:
    for place, child in layer.named_children():
        kind = _block_kind(place, child)
        if kind is None:
            continue
        name = f"{layer_name}.{place}"
        yield Part(name, kind, number, "", place, child)
        if kind in BLOCKS:
            yield from _parts_of_block(number, name, kind, child)


def _parts_of_block(number: int, block_name: str, block: str, module: Any) -> Iterator[Part]:
    for path, child in module.named_modules():
        kind = _inner_kind(path, child, block)
        if kind is not None:
            yield Part(f"{block_name}.{path}", kind, number, block, path, child)


def _inner_kind(path: str, module: Any, block: str) -> str | None:
    """The kind of a module inside a block; None for linear layers and the like."""
    if not path:  # the block itself
        return None
    if _NORM.search(type(module).__name__):
        return "norm"
    if path in _ROUTERS and block == "experts":
        return "router"
    return "rotary" if _is_rotary(module) else None


def rotates_itself(module: Any) -> bool:
    """Whether a module rotates queries and keys by itself, as vLLM's do inside attention."""
    return bool(_ROTARY.search(type(module).__name__)) and hasattr(module, "head_size")


def _is_rotary(module: Any) -> bool:
    """Whether a module computes cos and sin from positions, for another function to rotate with."""
    class_name = type(module).__name__
    if not _ROTARY.search(class_name) or class_name.startswith("Apply"):
        return False
    return not rotates_itself(module)


def _block_kind(name: str, module: Any) -> str | None:
    """The kind of a layer's child, by its class, else by its name; None for dropout and the
    like.
    """
    class_name = type(module).__name__
    if _NORM.search(class_name):
        return "norm"
    if _MIXES_TOKENS.search(class_name):
        return "attention"
    if _IS_MLP.search(class_name) or name in _MLPS:
        return "experts" if hasattr(module, "experts") else "mlp"
    return "attention" if name in _MIXERS else None


def _parts_outside(model: Any, stack: str) -> Iterator[Part]:
    """The final norm, and a rotary embedding that all layers share; norms before the stack are
    of embeddings.
    """
    after_stack = False
    for name, module in model.named_modules():
        kind = None
        if name == stack or name.startswith(f"{stack}."):
            after_stack = True
        elif _NORM.search(type(module).__name__):
            kind = "norm" if after_stack else None
        elif _is_rotary(module):
            kind = "rotary"
        if kind is not None:
            yield Part(name, kind, None, "", name.rpartition(".")[2], module)


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
    pairs: list[ModulePair] = []
    alone: list[Part] = []
    engine_parts = _by_slot(engine)
    for slot, trainer_parts in _by_slot(trainer).items():
        pairs_of_slot, alone_in_slot = _match_slot(trainer_parts, engine_parts.get(slot, []))
        pairs += pairs_of_slot
        alone += alone_in_slot
    return pairs, alone


def _by_slot(parts: Iterable[Part]) -> dict[tuple[Any, ...], list[Part]]:
    slots: dict[tuple[Any, ...], list[Part]] = defaultdict(list)
    for part in parts:
        slots[part.slot].append(part)
    return slots


def _match_slot(trainer: list[Part], engine: list[Part]) -> tuple[list[ModulePair], list[Part]]:
    engine_at = {part.place: part for part in engine}
    pairs: list[ModulePair] = []
    rest: list[Part] = []
    for part in trainer:
        if part.place in engine_at:
            pairs.append(ModulePair(part, engine_at.pop(part.place)))
        else:
            rest.append(part)
    # Where the names differ, the order decides, but only if each has a counterpart.
    if len(rest) == len(engine_at):
        pairs += map(ModulePair, rest, engine_at.values())
        rest = []
    return pairs, rest
