"""A Hugging Face model whose weights are spread over the ranks: FSDP2, through transformers' own
configuration.

Every rank holds a part of every weight, in float32 if it is trained. A layer is gathered only while
it computes, in the trainer's dtype. A pass enters the model through one method only, since the
module that is called first becomes the root of all communication; there the LM head is a module
like any other, whose weight is gathered during its forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes.ranks import World

R = TypeVar("R")
# A function of the last hidden states [B, L, H], and of weight [V, H] and bias [V] of the head
AtHead = Callable[[Tensor, Tensor, Tensor | None], R]
# `model.layers.3.` for what is inside a layer, else empty
_UP_TO_NUMBER = re.compile(r"([^.]*\.)*?\d+\.|")
# transformers' term: a module's weight is gathered only while it computes
_FREE = "free_full_weight"


@dataclass(frozen=True)
class Sharding:
    """How a model is spread: over which ranks, to train or only to score, and whether shards stay
    in main memory.

    `dealt`: every rank requests the same scores, and each computes its share of them.
    """

    world: World
    learns: bool = False
    cpu_offload: bool = False
    dealt: bool = False

    def options(self, config: Any, dtype: str) -> dict[str, Any]:
        """Options for `from_pretrained`; trained weights load in float32, since the optimiser
        updates these shards.
        """
        try:
            from transformers.distributed import DistributedConfig
            from transformers.distributed.mixin import apply_fully_sharded_data_parallelism  # noqa: F401
        except ImportError as error:
            raise MismatchError(
                "Spreading a model over ranks needs transformers 5.19 or newer: pip install "
                "'transformers>=5.19'"
            ) from error
        return {
            "config": config,
            "distributed_config": DistributedConfig(
                fsdp_size=self.world.size, fsdp_cpu_offload=self.cpu_offload
            ),
            "dtype": torch.float32 if self.learns else dtype,
        }

    @contextmanager
    def policy(self, dtype: torch.dtype) -> Iterator[None]:
        """Let modules compute in `dtype` and sum gradients in float32; transformers' own policy
        only knows bfloat16.

        Inputs are not cast: positions of rotary embeddings stay float32.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy
        from transformers.distributed import fsdp, mixin

        compute_dtype = dtype if self.learns else None
        policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
        shard_module = fsdp.fully_shard
        spread_model = mixin.apply_fully_sharded_data_parallelism
        fsdp.fully_shard = partial(shard_module, mp_policy=policy)
        mixin.apply_fully_sharded_data_parallelism = partial(_spread_tied, spread_model)
        try:
            yield
        finally:
            fsdp.fully_shard = shard_module
            mixin.apply_fully_sharded_data_parallelism = spread_model


def _spread_tied(spread: Callable[..., Any], model: Any, mesh: Any) -> Any:
    """Tie weights before spreading them, and leave tied ones to the root, which stays gathered
    during a whole pass.
    """
    # transformers ties them after spreading, and FSDP2 then keeps a copy for the head.
    # It never learns if the vocabulary is not divisible by the number of ranks.
    model.tie_weights()
    if model.all_tied_weights_keys:
        model._fsdp_plan = {name: kind for name, kind in model._fsdp_plan.items() if "*" in name}
    return spread(model, mesh)


def add_plan(config: Any, name: str) -> None:
    """Add a plan for a model that has none in transformers: each layer is a unit, and the root
    holds the rest.

    Raises a `MismatchError` if the model does not say what its layers are.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layer_classes = set(model._no_split_modules or ())
    paths = set()
    plan = {}
    for path, module in model.base_model.named_modules():
        paths.add(_with_stars(path))
        if type(module).__name__ in layer_classes:
            plan[_with_stars(path)] = _FREE
    # A plan without such a path is the default of all configurations, with Llama's layer names.
    if any("*" in path and path in paths for path in config.base_model_fsdp_plan or ()):
        return
    if not plan:
        raise MismatchError(
            f"{name} ({type(model).__name__}) does not say which of its modules are layers, so "
            "it cannot be spread over ranks. Use one process, or leave out sharded if the "
            "model fits on one device."
        )
    config.base_model_fsdp_plan = plan


def _with_stars(path: str) -> str:
    """The path with a star for every number, as plans write it."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def prepare_for_passes(model: Any, sharding: Sharding, dtype: torch.dtype) -> Any:
    """Make a spread model ready for passes; trained weights are rounded to the dtype that
    computes.
    """
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if sharding.learns and dtype != torch.float32:
        if model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict:
            raise MismatchError(
                f"{type(model).__name__} keeps some of its weights in float32, which is not "
                "possible when it is spread over ranks. Use --trainer-dtype float32."
            )
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.to(dtype))
    for module in _managed(model):
        assert isinstance(module, FSDPModule)
        # The loss is divided by the whole minibatch, so ranks add their gradients up.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    head = model.get_output_embeddings()
    head.forward = partial(_head_forward, head, head.forward)
    model.computes = dtype
    model.pass_through = MethodType(_pass_through, model)
    # The module that FSDP2 sees first becomes the root of all communication.
    # A pass that enters elsewhere would make a part of the model the root.
    register_fsdp_forward_method(model, "pass_through")
    return model


def _managed(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _pass_through(model: Any, inputs: Mapping[str, Tensor], at_head: AtHead[R]) -> R:
    decoded = decoder_of(model)(**inputs, use_cache=False)
    result: R = model.get_output_embeddings()(decoded.last_hidden_state, at_head)
    return result


def _head_forward(
    head: Any, own_forward: Callable[[Tensor], Tensor], hidden_BLH: Tensor, at_head: Any = None
) -> Any:
    if at_head is None:
        return own_forward(hidden_BLH)
    return at_head(hidden_BLH, head.weight, head.bias)


def pass_through(model: Any, inputs: Mapping[str, Tensor], at_head: AtHead[R]) -> R:
    """One forward pass of a model, spread or whole, over these inputs of its decoder.

    Returns what `at_head` makes of the hidden states and the head's weights.

    If the model is spread, every rank must call it equally often, and, with gradients enabled,
    backpropagate through the result (tensors, or tuples of them).
    """
    if not is_spread(model):
        head = model.get_output_embeddings()
        decoded = decoder_of(model)(**inputs, use_cache=False)
        return at_head(decoded.last_hidden_state, head.weight, getattr(head, "bias", None))
    result: R = model.pass_through(inputs, at_head)
    free_gathered_weights(model)
    return result


def decoder_of(model: Any) -> Any:
    """The part of a model that makes the last hidden states: all but its head."""
    decoder = model.get_decoder()
    # By the names of their parts, transformers takes all of Llama 4 for its decoder, and the head
    # of ModernBERT's decoder.
    if decoder is model or decoder is model.get_output_embeddings():
        return model.model
    return decoder


def without_gradients(model: Any) -> Any:
    """A mode without gradients; a spread model cannot use inference mode, whose tensors cannot
    be communicated.
    """
    return torch.no_grad() if is_spread(model) else torch.inference_mode()


def free_gathered_weights(model: Any) -> None:
    """Free weights that a pass without gradients left gathered."""
    # FSDP2 frees the full weights in backward, which such a pass does not have.
    # The next pass would compute with them, though the optimiser has changed its parts since.
    if not torch.is_grad_enabled():
        for module in _managed(model):
            module.reshard()


def is_spread(model: Any) -> bool:
    """Whether each rank holds only a part of the weights."""
    return hasattr(model, "pass_through")


def whole(weight: Tensor) -> Tensor:
    """The whole weight on every rank; all ranks must call it."""
    from torch.distributed.tensor import DTensor

    return weight.full_tensor().detach() if isinstance(weight, DTensor) else weight


def local_shard(weight: Tensor) -> Tensor:
    """This rank's shard of a weight."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def shard_like(weight: Tensor, shard: Tensor) -> Tensor:
    """This rank's shard as a tensor that is spread like a weight."""
    from torch.distributed.tensor import DTensor

    if not isinstance(weight, DTensor):
        return shard
    shard = shard.to(weight.to_local().device)
    return DTensor.from_local(
        shard,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


@torch.no_grad()
def fill_weight(weight: Tensor, full: Tensor) -> None:
    """Give a weight, spread or not, the values of a whole one."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(weight, DTensor):
        full = distribute_tensor(full.to(weight.to_local()), weight.device_mesh, weight.placements)
    weight.copy_(full)


def sum_replicated(gradient: Tensor, world: World) -> None:
    """Sum over ranks, in place, the gradient of a weight that is not spread, such as a small
    adapter's.
    """
    from torch.distributed.tensor import DTensor

    if world.size > 1 and not isinstance(gradient, DTensor):
        torch.distributed.all_reduce(gradient)


class WholeWeights(Mapping[str, Tensor]):
    """The weights of a state by name, each gathered and cast only when requested.

    All ranks must request the same weights in the same order.
    """

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._state = state
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._state[name]).to(self._dtype)

    def shape(self, name: str) -> torch.Size:
        """The shape of a whole weight, without gathering it; an adapter changes none."""
        state: Mapping[str, Tensor] = getattr(self._state, "base", self._state)
        return state[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def whole_state(model: Any) -> Mapping[str, Tensor]:
    """The state of a model, perhaps with an adapter merged, in its compute dtype."""
    learning = getattr(model, "learning", model)
    state: Mapping[str, Tensor] = model.state_dict()
    return WholeWeights(state, learning.computes) if is_spread(learning) else state


def saved_state(model: Any) -> Mapping[str, Tensor]:
    """The weights of a Hugging Face model, perhaps with an adapter merged, under the names in its
    folder.

    A model that is spread over ranks is gathered layer by layer: all ranks must request the same
    names in the same order, best the order of the mapping.
    """
    from transformers.core_model_loading import revert_weight_conversion

    learning = getattr(model, "learning", model)
    state = whole_state(model)
    if not is_spread(learning):
        # transformers fuses experts and renames old weights when it loads.
        # Engines look for the names in the folder, and would not find these.
        saved: Mapping[str, Tensor] = revert_weight_conversion(learning, dict(state))
        return saved
    if isinstance(state, WholeWeights) and learning._weight_conversions:
        return _SavedLayers(learning, state)
    return state


class _SavedLayers(Mapping[str, Tensor]):
    """A spread model's weights under the names in its folder; holds one whole layer at a time."""

    def __init__(self, learning: Any, state: WholeWeights) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._learning = learning
        self._state = state
        self._revert = revert_weight_conversion
        self._names = _by_layer(state)
        self._home = {}  # the layer of each name in the folder
        for layer, names in self._names.items():
            shapes = {name: torch.empty(state.shape(name), device="meta") for name in names}
            for saved_name in revert_weight_conversion(learning, shapes):
                self._home[saved_name] = layer
        self._layer = ""  # the one whose weights are here
        self._weights: Mapping[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        layer = self._home[name]
        if self._layer != layer:
            # The layer before goes first, so that only one takes memory.
            self._layer = ""
            self._weights = {}
            gathered = {inner: self._state[inner] for inner in self._names[layer]}
            self._weights = self._revert(self._learning, gathered)
            self._layer = layer
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of weights by their layer, such as `model.layers.3.`; a weight outside of numbered
    layers is alone.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _UP_TO_NUMBER.match(name)
        layer = match[0] if match else ""
        layers.setdefault(layer or name, []).append(name)
    return layers


def saved_by_layer(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A model's state under the names in its folder, layer by layer; split weights are copies."""
    from transformers.core_model_loading import revert_weight_conversion

    for names in _by_layer(state).values():
        yield from revert_weight_conversion(model, {name: state[name] for name in names}).items()


def gather_on_first(state: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The whole state in the first rank's main memory, gathered one weight at a time; empty on
    other ranks.
    """
    weights = {}
    for name in state:
        # Every rank takes part in gathering it.
        weight = state[name]
        if world.first:
            weights[name] = weight.cpu()
    return weights


def pad_for_all_ranks(batches: Sequence[list[int]], world: World) -> list[list[int]]:
    """The batches, padded with empty ones to the most that any rank has: all must communicate
    equally often.
    """
    # Every pass communicates: a rank with fewer of them would leave the others waiting.
    most = max(world.gather(len(batches)))
    padded = list(batches)
    while len(padded) < most:
        padded.append([])
    return padded
