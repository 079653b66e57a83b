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
    """What a layer's pass shows of its stream; `points` returns its three points."""

    before: Stream
    attention_output: Tensor | None = None
    mlp_input: Tensor | None = None
    norms: list[tuple[Stream, Tensor]] = field(default_factory=list)  # their inputs and outputs
    # What may be added to the stream after attention
    branches: dict[str, Tensor] = field(default_factory=dict)
    branch: str | None = None  # the one that is added
    parallel: bool = False  # attention and MLP start from the same stream

    @classmethod
    def start(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> WatchedStream:
        """Start from a layer's input: a branch's output and the residual, or the stream itself."""
        return cls(_copies(hidden_arguments(args, kwargs).values()))

    def enter(self, part: Part, args: Sequence[Any], kwargs: dict[str, Any]) -> Stream:
        """Called before a direct child of the layer: copies its input, which it may overwrite, for
        `leave`.
        """
        if part.kind == "attention":  # its input is of no use here
            return ()
        inputs = _copies(hidden_arguments(args, kwargs).values())
        if part.kind in ("mlp", "experts") and self.mlp_input is None and inputs:
            self.mlp_input = inputs[0]
        return inputs

    def leave(self, part: Part, inputs: Stream, output: Any) -> None:
        """Called after a direct child of the layer, with what `enter` returned, and its output."""
        if self.mlp_input is None:
            self.branches[part.name] = _copy(first_tensor(output))
        if part.kind == "norm":
            self.norms.append((inputs, _copy(first_tensor(output))))
        elif part.kind == "attention" and self.attention_output is None:
            self.attention_output = _copy(first_tensor(output))

    def points(self, output: Any) -> dict[str, Stream]:
        """The known points of the layer, whose output is the stream or its parts."""
        outputs = output if isinstance(output, tuple | list) else (output,)
        shape = self.before[0].shape
        # A layer may also return attention weights or a cache.
        after = _copies(each for each in outputs if is_hidden(each) and each.shape == shape)
        points = {"before": self.before}
        middle = self._after_attention()
        if middle is not None:
            points["attention"] = middle
        points["mlp"] = after
        return points

    def _after_attention(self) -> Stream | None:
        """The stream that the MLP reads: its input, or that of the norm before it.

        If that is the layer's own input, attention and MLP are parallel (Phi, GPT-NeoX, Cohere).
        """
        if self.attention_output is None or self.mlp_input is None:
            return None
        middle: Stream = (self.mlp_input,)
        for norm_inputs, norm_output in self.norms:
            if _equal(norm_output, self.mlp_input):
                middle = norm_inputs
                break
        if _equal(sum_stream(middle), sum_stream(self.before)):
            self.parallel = True
            return (*self.before, self.attention_output)
        if len(self.before) == len(middle) == 1:
            self.branch = self._added_between(self.before[0], middle[0])
        return middle

    def _added_between(self, before: Tensor, after: Tensor) -> str | None:
        """The branch whose addition makes one stream the other, to the bit."""
        for name, branch in self.branches.items():
            fits = branch.shape == before.shape == after.shape
            if fits and torch.equal(before + branch, after):
                return name
        return None


def sum_stream(stream: Stream) -> Tensor:
    """The stream as rows in float64 on the CPU."""
    terms_NH = [term.detach().to("cpu", torch.float64).flatten(0, -2) for term in stream]
    return torch.stack(terms_NH).sum(0)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copies(tensors: Any) -> Stream:
    return tuple(map(_copy, tensors))
