"""The residual stream of a pass: before each layer, after its attention, after its MLP, wherever it
is added.

A stream is a tuple of tensors that sum to it: vLLM passes on a branch's output and the residual,
and adds them inside the next norm. For comparison they are summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mismatch_cli.models.dissection.calls import first_tensor, hidden_arguments, is_hidden
from mismatch_cli.models.dissection.model_parts import Part

Stream = tuple[Tensor, ...]
POINTS = ("before", "attention", "mlp")


@dataclass
class WatchedStream:
    """What a layer's pass shows of its stream; `ended` returns its three points."""

    before: Stream
    attended: Tensor | None = None  # its attention's output
    entered: Tensor | None = None  # its MLP's input
    norms: list[tuple[Stream, Tensor]] = field(default_factory=list)  # their inputs and outputs
    # What may be added to the stream after attention
    branches: dict[str, Tensor] = field(default_factory=dict)
    branch: str | None = None  # the one that is added
    parallel: bool = False  # attention and MLP start from the same stream

    @classmethod
    def begun(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> WatchedStream:
        """From a layer's input: a branch's output and the residual, or the stream itself."""
        return cls(_copies(hidden_arguments(args, kwargs).values()))

    def into(self, part: Part, args: Sequence[Any], kwargs: dict[str, Any]) -> Stream:
        """Called before a direct child of the layer: copies its input, which it may overwrite."""
        given = _copies(hidden_arguments(args, kwargs).values()) if part.kind != "attention" else ()
        if part.kind in ("mlp", "experts") and self.entered is None and given:
            self.entered = given[0]
        return given

    def out_of(self, part: Part, given: Stream, output: Any) -> None:
        """Called after it, with its output."""
        if self.entered is None:
            self.branches[part.name] = _copy(first_tensor(output))
        if part.kind == "norm":
            self.norms.append((given, _copy(first_tensor(output))))
        elif part.kind == "attention" and self.attended is None:
            self.attended = _copy(first_tensor(output))

    def ended(self, output: Any) -> dict[str, Stream]:
        """The known points of the layer, whose output is the stream or its parts."""
        parts = output if isinstance(output, tuple | list) else (output,)
        like = self.before[0].shape
        after = _copies(part for part in parts if is_hidden(part) and part.shape == like)
        middle = self._after_attention()
        return {"before": self.before, **({"attention": middle} if middle else {}), "mlp": after}

    def _after_attention(self) -> Stream | None:
        """The stream that the MLP reads: its input, or that of the norm before it.

        If that is the layer's own input, attention and MLP are parallel (Phi, GPT-NeoX, Cohere).
        """
        if self.attended is None or self.entered is None:
            return None
        entered = self.entered
        source = next(
            (given for given, answer in self.norms if _equal(answer, entered)), (entered,)
        )
        if _equal(sum_stream(source), sum_stream(self.before)):
            self.parallel = True
            return (*self.before, self.attended)
        if len(self.before) == len(source) == 1:
            (stream,), (middle,) = self.before, source
            fitting = {
                name: x
                for name, x in self.branches.items()
                if x.shape == stream.shape == middle.shape
            }
            self.branch = next(
                (name for name, x in fitting.items() if torch.equal(stream + x, middle)), None
            )
        return source


def sum_stream(stream: Stream) -> Tensor:
    """The stream as rows in float64 on the CPU."""
    rows = [part.detach().to("cpu", torch.float64).flatten(0, -2) for part in stream]
    return torch.stack(rows).sum(0)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copies(tensors: Any) -> Stream:
    return tuple(map(_copy, tensors))
