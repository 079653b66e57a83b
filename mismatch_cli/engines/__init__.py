"""Engines turn prompts into responses with log μ; one file each, loaded when chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mismatch_cli import registry
from mismatch_cli.batch import Rollout
from mismatch_cli.errors import UsageError
from mismatch_cli.sampling import SamplingSettings

Sink = Callable[[np.ndarray], None]  # takes log μ of a response's next token, float32 [V]


@dataclass(frozen=True)
class Request:
    """One response to sample: the prompt as token ids, and the seed that makes it reproducible."""

    prompt_ids: list[int]
    seed: int


def _silent(message: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class EngineSettings:
    """What the user asked of an engine; what the engine made of it is in `Engine.describe()`."""

    model: str
    sampling: SamplingSettings
    top_logprobs: int
    dtype: str = "auto"
    seed: int = 0
    log_file: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # --engine-arg key=value
    full: bool = False  # whether `sample_full` will be asked
    say: Callable[[str], None] = field(default=_silent, compare=False)  # one line of talk
    adapter: str | None = None  # a LoRA adapter to sample with, beside the weights


class Engine(Protocol):
    """What the file of an engine offers through `create(settings)`."""

    @property
    def max_model_len(self) -> int:
        """Prompt and response together, in tokens."""
        ...

    def sample(self, requests: Sequence[Request], on_finished: Callable[[int], None]) -> list[Rollout]:
        """Sample one response per request, in the order of the requests; reports how many have finished."""
        ...

    def load_weights(self, model: Any) -> None:
        """Take over every weight of a Hugging Face model of the same architecture, and forget what the old ones cached.

        Always all weights: an engine that packs or ties them keeps old copies of what it is not given.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """The settings as resolved, for the manifest."""
        ...

    def close(self) -> None:
        """Free the weights and the caches, so that the trainer can have the memory."""
        ...


class EngineModule(Protocol):
    """What a file in this folder has: a function, and what others need to know before it is called."""

    REMOTE: bool  # it asks a server by its URL, which may be restarted as another between two shards
    TAKES_WEIGHTS: bool  # whether `load_weights` works, without which nothing can be trained with it
    MEMORY_SHARE: str | None  # its argument for the share of a GPU that it may take, where it reserves one

    def create(self, settings: EngineSettings) -> Engine:
        """Start the engine; a `MismatchError` says what is missing and how to get it."""
        ...


class FullEngine(Engine, Protocol):
    """An engine whose module has `full_bytes(vocabulary, tokens)`, the memory that one response of so many takes."""

    def sample_full(
        self, requests: Sequence[Request], sinks: Sequence[Sink], on_finished: Callable[[int], None]
    ) -> list[Rollout]:
        """Like `sample`; the first responses, one for each sink, also give it log μ of all their tokens in order."""
        ...


def full_bytes(engine: str, vocabulary: int, tokens: int) -> int:
    """Memory, in bytes, that the engine needs for the whole distributions of a response of `tokens` tokens.

    Raises a `UsageError` for an engine that does not hand them out.
    """
    module = registry.load(__name__, engine, "engine")
    if not hasattr(module, "full_bytes"):
        raise UsageError(
            f"--engine {engine} does not hand out whole distributions. Use --engine vllm or --engine hf with "
            "--full-divergence."
        )
    return int(module.full_bytes(vocabulary, tokens))


def engine_module(name: str) -> EngineModule:
    """The file behind a public name; the library that it needs is imported when it creates an engine."""
    module: Any = registry.load(__name__, name, "engine")
    return module


def create_engine(name: str, settings: EngineSettings) -> Engine:
    """Start the engine with this public name; a `MismatchError` says what is missing and how to get it."""
    return engine_module(name).create(settings)
