"""Engines that hand out what a token was drawn from: log μ over the whole vocabulary, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mismatch_cli import registry
from mismatch_cli.batch import Rollout
from mismatch_cli.engines import Engine, Request
from mismatch_cli.errors import UsageError

Sink = Callable[[np.ndarray], None]  # takes log μ of a response's next token, float32 [V]

_ENGINES = "mismatch_cli.engines"


class WholeEngine(Engine, Protocol):
    """An engine whose module has `whole_bytes(vocabulary, tokens)`, the memory that one response of so many takes."""

    def sample_whole(
        self, requests: Sequence[Request], sinks: Sequence[Sink], on_finished: Callable[[int], None]
    ) -> list[Rollout]:
        """Like `sample`; the first responses, one for each sink, also give it log μ of all their tokens in order."""
        ...


def whole_bytes(engine: str, vocabulary: int, tokens: int) -> int:
    """Memory, in bytes, that the engine needs for the whole distributions of a response of `tokens` tokens.

    Raises a `UsageError` for an engine that does not hand them out.
    """
    module = registry.load(_ENGINES, engine, "engine")
    if not hasattr(module, "whole_bytes"):
        raise UsageError(
            f"--engine {engine} does not hand out whole distributions. Use --engine vllm or --engine hf with "
            "--full-divergence."
        )
    return int(module.whole_bytes(vocabulary, tokens))
