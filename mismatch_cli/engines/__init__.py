"""Engines turn prompts into responses with log μ; one file each, loaded when chosen.

Sampling is the same with each of them: seeds that depend on what is sampled, and log-probs that a sampler can have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from mismatch_cli import registry
from mismatch_cli.engines._checks import check_fits, check_read, check_replayed, check_rollout
from mismatch_cli.errors import MismatchError, UsageError, first_line
from mismatch_cli.ranks import ALONE, World
from mismatch_cli.ranks.joined import is_lost_rank
from mismatch_cli.sampling import SamplingSettings

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mismatch_cli.batch import Rollout
    from mismatch_cli.dissection.engine_pass import EnginePass

TRANSFERS = ("folder", "nccl")  # how servers get the weights of a training
Told = Callable[[int], None]  # learns how many have finished
Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by their names in a model's folder
Sink = Callable[["np.ndarray"], None]  # takes log μ of a response's next token, float32 [V]


@dataclass(frozen=True)
class Request:
    """One response to sample: the prompt as token ids, and the seed that makes it reproducible."""

    prompt_ids: list[int]
    seed: int
    sampling: SamplingSettings | None = None  # None for those that the engine was made with
    max_tokens: int | None = None  # where it may be shorter than these settings allow

    def longest(self, sampling: SamplingSettings) -> int:
        """How many tokens it may have; `sampling` is that of the engine."""
        most = (self.sampling or sampling).max_tokens
        return most if self.max_tokens is None else min(self.max_tokens, most)


@dataclass(frozen=True)
class Forced:
    """A recorded response, of at least one token, that an engine is to read again under its own settings."""

    prompt_ids: list[int]
    response_ids: list[int]


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
    world: World = ALONE  # the ranks of a training, each of which has an engine or a part of one
    tensor_parallel: int = 1  # ranks that share an engine
    sleeps: bool = False  # whether it gives its GPU memory back between two calls
    routes: bool | None = None  # whether rollouts name the experts of each token; None: where it costs nothing
    weights_folder: Path | None = None  # that servers see, for the weights of a training
    weight_transfer: str = TRANSFERS[0]
    replays: bool = False  # whether `replay` will be asked: vLLM on a GPU has to know before it starts


class Engine(Protocol):
    """What the file of an engine offers through `create(settings)`."""

    @property
    def max_model_len(self) -> int:
        """Prompt and response together, in tokens."""
        ...

    def sample(self, requests: Sequence[Request], on_finished: Callable[[int], None]) -> list[Rollout]:
        """Sample one response per request, in the order of the requests; reports how many have finished.

        A request may have sampling settings of its own: log μ is that of what its tokens were drawn from.
        """
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
    # and, where its rollouts can name the experts that each token went to: RETURNS_ROUTES = True
    # where it can read recorded responses again: REPLAYS = True, PREFILLS = True

    def create(self, settings: EngineSettings) -> Engine:
        """Start the engine; a `MismatchError` says what is missing and how to get it."""
        ...


class CheckingModule(EngineModule, Protocol):
    """One that can say what is wrong with settings before it loads anything."""

    def check(self, settings: EngineSettings) -> None:
        """A `UsageError` for what the engine does not take."""
        ...


class FullEngine(Engine, Protocol):
    """An engine whose module has `full_bytes(vocabulary, tokens)`, the memory that one response of so many takes."""

    def sample_full(
        self, requests: Sequence[Request], sinks: Sequence[Sink], on_finished: Callable[[int], None]
    ) -> list[Rollout]:
        """Like `sample`; the first responses, one for each sink, also give it log μ of all their tokens in order."""
        ...


class PrefillingEngine(Engine, Protocol):
    """An engine whose module has `PREFILLS`."""

    def prefill(self, responses: Sequence[Forced], on_finished: Callable[[int], None]) -> list[np.ndarray]:
        """Log μ of the tokens of each response, float32 [T], with the whole sequence read at once.

        After temperature and truncation, past any prefix cache. A `MismatchError` where the engine cannot apply them.
        """
        ...


class ReplayingEngine(PrefillingEngine, Protocol):
    """An engine whose module has `REPLAYS` too."""

    def replay(
        self, responses: Sequence[Forced], on_finished: Told, *, alone: bool = False, cached: bool = True
    ) -> list[Rollout]:
        """Decode the same tokens again, in the batches that `sample` makes: what it would have reported for them.

        `alone`: in a batch of one each. Not `cached`: without reading the prefix cache, where the engine has one.
        """
        ...


@dataclass(frozen=True)
class Unread:
    """In place of a tensor that an engine does not give."""

    reason: str


class OpenEngine(Engine, Protocol):
    """An engine whose tensors and modules can be looked at one by one: its module has OPEN = True."""

    def weights(self, plain: Shapes | None = None) -> Iterator[tuple[str, torch.Tensor | Unread]]:
        """Each tensor that it computes with, in the names of its model's folder, one at a time.

        What is fused is taken apart; what cannot be read is named with the reason. With an adapter, the weights below.
        `plain`: the tensors of a folder that is not quantised, whose names a quantised engine is to use.
        """
        ...

    def pass_over(self, token_ids: list[int]) -> AbstractContextManager[EnginePass]:
        """Read these tokens in one pass, and keep what its modules need to answer again inside the `with` block.

        A `MismatchError` says why they cannot: another process, captured graphs, parts of modules.
        """
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


def engine_names() -> list[str]:
    """What can sample."""
    return registry.names(__name__)


def engine_module(name: str) -> EngineModule:
    """The file behind a public name; the library that it needs is imported when it creates an engine."""
    module: Any = registry.load(__name__, name, "engine")
    return module


def check_settings(name: str, settings: EngineSettings) -> None:
    """A `UsageError` for what can be told without the engine's library."""
    module = engine_module(name)
    if settings.routes:
        check_returns_routes(name)
    if hasattr(module, "check"):
        cast(CheckingModule, module).check(settings)


def check_returns_routes(name: str) -> None:
    """A `UsageError` for an engine whose rollouts never name the experts of their tokens."""
    if not getattr(engine_module(name), "RETURNS_ROUTES", False):
        raise UsageError(
            f"--engine {name} does not say which experts it chose. Use --engine hf, or vllm on a GPU, or leave out "
            "--routes and --replay-routes."
        )


def can(name: str, what: str) -> bool:
    """Whether the module of an engine has `REPLAYS`, `PREFILLS` or `OPEN`."""
    return bool(getattr(engine_module(name), what, False))


def create_engine(name: str, settings: EngineSettings) -> Engine:
    """Start the engine with this public name; a `MismatchError` says what is missing and how to get it."""
    return engine_module(name).create(settings)


def sample_seed(seed: int, prompt_id: int, sample_index: int, step: int = 0, turn: int = 0) -> int:
    """A 31-bit seed from hash(seed, prompt, sample, step): a resumed run samples what the unbroken one would have."""
    key = f"{seed}/{prompt_id}/{sample_index}/{step}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def engine_failures(doing: str, kept: str) -> Iterator[None]:
    """Whatever breaks inside an engine is a `MismatchError` that says what is kept and how to go on."""
    try:
        yield
    except MismatchError:
        raise
    except Exception as error:  # a foreign library can fail in any way: out of memory, a lost worker
        if is_lost_rank(error):  # while weights were made whole, or asked together: the engine has not failed
            raise
        raise MismatchError(
            f"The rollout engine failed while {doing} ({type(error).__name__}: {first_line(error)}). "
            f"{kept}: go on with --resume. --debug shows where it failed."
        ) from error


def sample_checked(
    engine: Engine,
    requests: Sequence[Request],
    prompt_id_S: Sequence[int],
    on_finished: Callable[[int], None],
    sinks: Sequence[Sink] = (),
) -> list[Rollout]:
    """Sample, and refuse what no sampler can have drawn; a `MismatchError` says which response of which prompt.

    `sinks` take the whole distributions of the first responses.
    """
    with engine_failures("sampling", "What was sampled before is kept"):
        if sinks:
            rollouts = cast(FullEngine, engine).sample_full(requests, sinks, on_finished)
        else:
            rollouts = engine.sample(requests, on_finished)
    for prompt_id, rollout in zip(prompt_id_S, rollouts, strict=True):
        check_rollout(prompt_id, rollout)
    return rollouts


def replay_checked(
    engine: Engine,
    responses: Sequence[Forced],
    prompt_id_S: Sequence[int],
    on_finished: Callable[[int], None],
    *,
    alone: bool = False,
    cached: bool = True,
) -> list[Rollout]:
    """Decode recorded tokens again; a `MismatchError` names the prompt of a response that did not come back as it was.

    A response without tokens comes back as it is; a token that truncation leaves out under these settings has −∞.
    """
    read = _readable(engine, responses, prompt_id_S, on_finished)
    with engine_failures("replaying recorded tokens", "What was computed before is kept"):
        found = iter(cast(ReplayingEngine, engine).replay(read, on_finished, alone=alone, cached=cached))
    rollouts = [next(found) if response.response_ids else _without_tokens(response) for response in responses]
    for prompt_id, response, rollout in zip(prompt_id_S, responses, rollouts, strict=True):
        if (rollout.prompt_ids, rollout.response_ids) != (response.prompt_ids, response.response_ids):
            raise MismatchError(
                f"The engine decoded other tokens than those recorded of a response to prompt {prompt_id}. Switch off "
                "what chooses tokens beside its sampler (speculative decoding, structured outputs, a plug-in)."
            )
        check_replayed(prompt_id, rollout)
    return rollouts


def prefill_checked(
    engine: Engine, responses: Sequence[Forced], prompt_id_S: Sequence[int], on_finished: Callable[[int], None]
) -> list[np.ndarray]:
    """Log μ of recorded tokens, read at once; a `MismatchError` names the prompt where it cannot be one."""
    import numpy as np

    read = _readable(engine, responses, prompt_id_S, on_finished)
    with engine_failures("reading recorded tokens", "What was computed before is kept"):
        found = iter(cast(PrefillingEngine, engine).prefill(read, on_finished))
    logps = [next(found) if response.response_ids else np.zeros(0, dtype=np.float32) for response in responses]
    for prompt_id, response, logp_T in zip(prompt_id_S, responses, logps, strict=True):
        if len(logp_T) != len(response.response_ids):
            raise MismatchError(
                f"The engine returned {len(logp_T)} log-probs for the {len(response.response_ids)} tokens of a "
                f"response to prompt {prompt_id}. Report it to the engine's authors."
            )
        check_read(prompt_id, logp_T)
    return logps


def _readable(
    engine: Engine, responses: Sequence[Forced], prompt_id_S: Sequence[int], on_finished: Told
) -> list[Forced]:
    """Those with tokens; the others have finished."""
    for prompt_id, response in zip(prompt_id_S, responses, strict=True):
        check_fits(prompt_id, len(response.prompt_ids) + len(response.response_ids), engine.max_model_len)
    readable = [response for response in responses if response.response_ids]
    if len(readable) < len(responses):
        on_finished(len(responses) - len(readable))
    return readable


def _without_tokens(response: Forced) -> Rollout:
    import numpy as np

    from mismatch_cli.batch import Rollout

    nothing = np.zeros(0, dtype=np.float32)
    return Rollout(response.prompt_ids, [], nothing, nothing.astype(np.int32), None, None, "length")
