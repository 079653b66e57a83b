"""The engine's modules in the trainer's forward pass: how much of the gap remains when one kind of
them is grafted.

A graft is the trainer's own pass over a response, except that the engine computes every module of
one kind, on the input that the trainer has there. That kind causes what |log π − log μ| loses. Of
nested kinds (norms inside attention) the outer one takes the inner along.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mismatch_cli.base.errors import first_line
from mismatch_cli.models.dissection.calls import (
    ShapesDiffer,
    convert_as,
    first_tensor,
    hidden_arguments,
)
from mismatch_cli.models.dissection.engine_pass import EnginePass
from mismatch_cli.models.dissection.listener import Listener
from mismatch_cli.models.dissection.model_parts import BLOCKS, ModulePair, Part
from mismatch_cli.models.dissection.streams import sum_stream

_RECENT = 4  # inputs of norms and outputs of modules to search for a residual and a branch
# The function in transformers' model files that rotates queries and keys
_ROTATION = "apply_rotary_pos_emb"
# Name and kind of a module, the engine's answer and the trainer's
Report = Callable[[str, str, Tensor, Tensor], None]


class Grafts:
    """Hooks on the trainer's model that call the engine's modules, and use their outputs or only
    report them.
    """

    def __init__(self, engine: EnginePass, trainer: Listener, pairs: Sequence[ModulePair]) -> None:
        self._engine, self._trainer = engine, trainer
        self._pairs = {pair.trainer.name: pair for pair in pairs}
        # Trainer modules whose counterpart cannot compute this, and why
        self.refused: dict[str, str] = {}
        self._kinds: Collection[str] = ()
        self._report: Report | None = None
        self._inner = True
        self._times = Counter[str]()  # how often each module has been called in the pass
        self._norm_inputs = deque[Tensor](maxlen=_RECENT)
        # As the trainer adds them, and as they came
        self._outputs = deque[tuple[Tensor, Tensor]](maxlen=_RECENT)
        self._stream: Tensor | None = None  # the input of the trainer's layer
        self._blocks = list[Tensor]()  # outputs of the layer's blocks
        self._branches = set(trainer.branches)
        # The engine's counterpart of the attention that is running
        self._attention: Part | None = None
        self._hooks: list[Any] = []

    @contextmanager
    def on(
        self, kinds: Collection[str], report: Report | None = None, *, inner: bool = True
    ) -> Iterator[None]:
        """Within the `with` block, modules of these kinds are the engine's; with `report`, outputs
        are only reported.

        `inner`: also modules inside attention, MLPs or experts.
        """
        self._kinds = kinds
        self._report = report
        self._inner = inner
        self._times.clear()
        self._norm_inputs.clear()
        self._outputs.clear()
        try:
            for part in self._trainer.called:
                self._hook(part)
            self._hook_layers()
            with self._rotating():
                yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _hook(self, part: Part) -> None:
        pair = self._pairs.get(part.name)
        if pair is not None and part.kind in self._kinds and self._reaches(part):
            answers = {"rotary": self._answer_rotary, "router": self._answer_router}
            hook = partial(self._leave, answers.get(part.kind, self._answer), pair)
            self._hooks.append(part.module.register_forward_hook(hook, with_kwargs=True))
        if pair is not None and part.kind == "attention":
            enter = partial(self._enter_attention, pair.engine)
            self._hooks.append(part.module.register_forward_pre_hook(enter))
        # After the graft: the trainer continues with its outputs
        if not part.inside and part.kind != "rotary":
            remember = partial(self._remember, part)
            self._hooks.append(part.module.register_forward_hook(remember, with_kwargs=True))

    def _hook_layers(self) -> None:
        layers = list(self._trainer.parts.layers.values())
        if "embedding" in self._kinds:
            enter = layers[0].register_forward_pre_hook(self._enter_stack, with_kwargs=True)
            self._hooks.append(enter)
        if self._rounds():
            for layer in layers:
                enter = layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
                self._hooks += [enter, layer.register_forward_hook(self._leave_layer)]

    def _reaches(self, part: Part) -> bool:
        """Whether this part is replaced by itself, not inside a block that is the engine's as a
        whole.
        """
        if not part.inside:
            return True
        within_graft = self._report is None and part.inside in self._kinds
        return self._inner and not within_graft

    def _leave(
        self,
        answer: Callable[..., Any],
        pair: ModulePair,
        _module: Any,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> Any:
        """Replace the output of the trainer's module with the engine's, where there is one."""
        name = pair.trainer.name
        time = self._times[name]
        self._times[name] += 1
        if name in self.refused:
            return None
        try:
            theirs = answer(pair, args, kwargs, output, time)
            if self._report is None:
                return _in_place_of(theirs, output)
        # A third-party module on inputs that it was not written for may raise anything.
        except Exception as error:
            self.refused[name] = _why(error)
            return None
        self._report(name, pair.trainer.kind, first_tensor(theirs), first_tensor(output))
        return None

    def _answer(self, pair: ModulePair, args: Any, kwargs: Any, _output: Any, time: int) -> Any:
        tensors = list(hidden_arguments(args, kwargs).values())[: pair.trainer.inputs]
        # vLLM's norms add the residual unrounded, while the trainer's norm gets a rounded sum.
        # From the sum, the engine's norm would not compute what it computes in its own pass.
        if self._engine.call_of(pair.engine, time).fuses and len(tensors) == 1:
            tensors = self._unfused(tensors[0])
        return [first_tensor(self._engine.call(pair.engine, *tensors, time=time))]

    def _unfused(self, stream: Tensor) -> list[Tensor]:
        """A branch's output and the residual if they sum to this input: the engine's norm adds
        them unrounded.
        """
        for residual in reversed(self._norm_inputs):
            for added, branch in reversed(self._outputs):
                is_one_shape = added.shape == residual.shape == stream.shape
                if is_one_shape and torch.equal(self._sum(residual, added), stream):
                    return [branch, residual]
        return [stream]

    def _answer_router(
        self, pair: ModulePair, args: Any, kwargs: Any, output: Any, time: int
    ) -> Any:
        """The engine's logits and its choice of experts, however many, in the form of the
        trainer's router.
        """
        (hidden, *_) = hidden_arguments(args, kwargs).values()
        theirs = self._engine.route(pair.engine, hidden, time)
        if isinstance(output, tuple) and len(output) == 3:
            return theirs
        return [theirs[0]]

    def _answer_rotary(
        self, pair: ModulePair, _args: Any, _kwargs: Any, _output: Any, time: int
    ) -> Any:
        """cos and sin of these positions, which are the same on both sides."""
        return self._engine.call_of(pair.engine, time).output

    def _remember(self, part: Part, _module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Note what `_unfused` and `_leave_layer` need of a module, and round the sum of stream and
        branch where the stream is grafted.
        """
        if part.kind == "norm":
            self._norm_inputs.extend(list(hidden_arguments(args, kwargs).values())[:1])
        own = added = first_tensor(output)
        if part.kind in BLOCKS:
            self._blocks.append(own)
        if self._stream is not None and part.name in self._branches:
            # The layer adds this to the stream, and gets the sum in the engine's precision.
            added = (self._stream + own).to(self.stream_dtype).to(own) - self._stream
            output = _in_place_of([added], output)
        self._outputs.append((added, own))
        return output

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the engine's residual stream."""
        return self._engine.streams[-1]["mlp"][0].dtype

    def _sum(self, residual: Tensor, branch: Tensor) -> Tensor:
        total = residual + branch
        return total.to(self.stream_dtype).to(total) if self._rounds() else total

    def _rounds(self) -> bool:
        """Whether the trainer's stream is rounded as the engine's is."""
        return "residual" in self._kinds and self._report is None

    def _enter_layer(self, _layer: Any, args: Any, kwargs: Any) -> None:
        (self._stream, *_) = hidden_arguments(args, kwargs).values()
        self._blocks = []

    def _leave_layer(self, _layer: Any, _args: Any, output: Any) -> Any:
        stream, self._stream = self._stream, None
        if stream is None or not self._trainer.parallel:
            total = first_tensor(output)
        else:
            # Of parallel blocks, the outputs are summed before the stream is added.
            blocks = [block.to(self.stream_dtype) for block in self._blocks]
            total = sum(blocks) + stream.to(self.stream_dtype)
        return _in_place_of([total.to(self.stream_dtype)], output)

    def _enter_attention(self, engine: Part, _module: Any, _args: Any) -> None:
        self._attention = engine

    def _enter_stack(self, _layer: Any, args: Any, kwargs: Any) -> Any:
        """Replace the first layer's input: embeddings with their scale, norm or positions,
        wherever computed.
        """
        (key, own), *_ = hidden_arguments(args, kwargs).items()
        pieces = self._engine.streams[0]["before"]
        theirs = pieces[0] if len(pieces) == 1 else sum_stream(pieces)
        if theirs.numel() != own.numel():
            self.refused["embedding"] = f"{tuple(theirs.shape)} versus {tuple(own.shape)}"
            return None
        if self._report is not None:
            self._report("embedding", "embedding", theirs, own)
            return None
        new = theirs.to(own).reshape(own.shape)
        if isinstance(key, int):
            return (*args[:key], new, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: new}

    @contextmanager
    def _rotating(self) -> Iterator[None]:
        """Replace transformers' rotation function with the engine's module, if the engine has
        one.
        """
        before = {file: getattr(file, _ROTATION) for file in self._rotating_files()}
        try:
            for file, function in before.items():
                setattr(file, _ROTATION, partial(self._rotated, function))
            yield
        finally:
            for file, function in before.items():
                setattr(file, _ROTATION, function)

    def _rotating_files(self) -> list[ModuleType]:
        """The model files that rotate for the trainer's attention; none if modules that have a
        pair give the angles.
        """
        called = self._trainer.called
        has_pair = any(part.kind == "rotary" and part.name in self._pairs for part in called)
        if "rotary" not in self._kinds or has_pair:
            return []
        names = {type(part.module).__module__ for part in called if part.kind == "attention"}
        files = filter(None, map(sys.modules.get, names))
        return [file for file in files if hasattr(file, _ROTATION)]

    def _rotated(
        self, function: Callable[..., Any], q: Tensor, k: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Rotate queries and keys `[1, heads, tokens, size]`, or tokens before heads if
        `unsqueeze_dim` says so.
        """
        call = inspect.signature(function).bind(q, k, *args, **kwargs)
        call.apply_defaults()
        heads_first = call.arguments.get("unsqueeze_dim", 1) == 1
        theirs = None
        if self._attention is not None and "rotary" not in self.refused:
            try:
                queries, keys = _by_token(q, heads_first), _by_token(k, heads_first)
                theirs = self._engine.rotate(self._attention, queries, keys)
            except Exception as error:
                self.refused["rotary"] = _why(error)
        if theirs is None:
            return function(q, k, *args, **kwargs)
        engine_q, engine_k = (_by_head(x, heads_first) for x in theirs)
        if self._report is None:
            return convert_as(q, engine_q), convert_as(k, engine_k)
        own_q, own_k = function(q, k, *args, **kwargs)
        self._report("rotary", "rotary", engine_q, own_q)
        self._report("rotary", "rotary", engine_k, own_k)
        return own_q, own_k


def _in_place_of(theirs: Sequence[Tensor], own: Any) -> Any:
    """An output with its first tensors, or its only one, replaced.

    A router's tensors other than its logits may change width, since it may choose more experts.
    """
    if isinstance(own, Tensor):
        return convert_as(own, theirs[0])
    new = [convert_as(own[0], theirs[0])]
    new += [part.to(old) for part, old in zip(theirs[1:], own[1:], strict=False)]
    return (*new, *own[len(new) :])


def _why(error: Exception) -> str:
    if isinstance(error, ShapesDiffer):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _by_token(x: Tensor, heads_first: bool) -> Tensor:
    """Queries or keys of one response as `[tokens, heads, size]`."""
    return x[0].transpose(0, 1) if heads_first else x[0]


def _by_head(x: Tensor, heads_first: bool) -> Tensor:
    """The inverse of `_by_token`."""
    if heads_first:
        x = x.transpose(0, 1)
    return x[None]
