"""Hooks that record one pass of a model: its module calls, in order, and the stream between its
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mismatch_cli.models.dissection.calls import Call
from mismatch_cli.models.dissection.model_parts import ModelParts, Part
from mismatch_cli.models.dissection.streams import Stream, WatchedStream

# Whether a call of the root is the pass to record
Wanted = Callable[[tuple[Any, ...], dict[str, Any]], bool]


class Listener:
    """Records what one pass of a model does; ignores unwanted passes, such as an engine's
    warm-up.
    """

    def __init__(self, model: Any, *, copied: bool = False) -> None:
        """`copied`: copy the inputs of calls, which may be overwritten."""
        self._copied = copied
        self.parts = ModelParts.of(model)
        self.calls: dict[str, list[Call]] = {}  # by name, in order of first call
        self.streams: list[dict[str, Stream]] = []
        # Which module of each layer adds to the stream after attention
        self.branches: list[str | None] = []
        self.parallel = False  # whether attention and MLP of a layer read the same stream
        self.output: Any = None  # of the root
        self._listening = False
        self._watched: WatchedStream | None = None  # of the layer that is running
        self._inputs: dict[str, Stream] = {}  # of parts that are running, by name
        self._hooks: list[Any] = []

    @property
    def called(self) -> list[Part]:
        """The parts that the pass called, in order."""
        part_of = {part.name: part for part in self.parts.parts}
        return [part_of[name] for name in self.calls]

    @contextmanager
    def on(
        self, root: Any, wanted: Wanted, at_start: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Listen to passes through `root`; afterwards the hooks are removed."""
        try:
            self._hook(root, partial(self._begin, wanted, at_start), self._end)
            for layer in self.parts.layers.values():
                self._hook(layer, self._enter_layer, self._leave_layer)
            for part in self.parts.parts:
                self._hook(part.module, partial(self._enter, part), partial(self._leave, part))
            yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._listening = False

    def _hook(self, module: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(after, with_kwargs=True))

    def _begin(
        self, wanted: Wanted, at_start: Callable[[], None], _root: Any, args: Any, kwargs: Any
    ) -> None:
        # Only the first wanted pass is recorded.
        self._listening = self.output is None and wanted(args, kwargs)
        if self._listening:
            at_start()

    def _end(self, _root: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        if self._listening:
            self.output = output
            self._listening = False

    def _enter_layer(self, _layer: Any, args: Any, kwargs: Any) -> None:
        if self._listening:
            self._watched = WatchedStream.start(args, kwargs)

    def _leave_layer(self, _layer: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        if self._listening and self._watched is not None:
            self.streams.append(self._watched.points(output))
            self.branches.append(self._watched.branch)
            self.parallel |= self._watched.parallel
            self._watched = None

    def _enter(self, part: Part, _module: Any, args: Any, kwargs: Any) -> None:
        if not self._listening:
            return
        call = Call.of(part.module, args, kwargs, most=part.inputs, copied=self._copied)
        self.calls.setdefault(part.name, []).append(call)
        if self._watched is not None and not part.inside:
            self._inputs[part.name] = self._watched.enter(part, args, kwargs)

    def _leave(self, part: Part, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not self._listening:
            return
        # What a rotary embedding computes does not depend on hidden states, so it is kept.
        if part.kind == "rotary":
            self.calls[part.name][-1] = Call.of(module, args, kwargs, output, copied=self._copied)
        if self._watched is not None and not part.inside:
            self._watched.leave(part, self._inputs.pop(part.name, ()), output)
