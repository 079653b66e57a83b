"""Engines turn prompts into responses with log μ; one file each, loaded when chosen.

Sampling has the same rules for each: seeds depend on what is sampled, and log-probs must be
possible for a sampler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError, first_line
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines._checks import (
    check_fits,
    check_read,
    check_replayed,
    check_rollout,
)
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.processes.ranks.joined import is_lost_rank

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mismatch_cli.models.dissection.engine_pass import EnginePass
    from mismatch_cli.rules.batch import Rollout

# Called with the number of newly finished responses; see also `token_counter`
OnFinished = Callable[[int], None]
Shapes = Mapping[str, tuple[int, ...]]  # tensor shapes by their names in a model folder
Sink = Callable[["np.ndarray"], None]  # takes log μ of a response's next token, float32 [V]


@dataclass(frozen=True)
class Request:
    """One response to sample: the prompt as token ids, and the seed that makes it reproducible."""

    prompt_ids: list[int]
    seed: int
    sampling: SamplingSettings | None = None  # None for the engine's own
    max_tokens: int | None = None  # a lower limit than that of these settings

    def longest(self, sampling: SamplingSettings) -> int:
        """The most tokens that the response may have; `sampling` is the engine's."""
        most = (self.sampling or sampling).max_tokens
        if self.max_tokens is None:
            return most
        return min(self.max_tokens, most)


@dataclass(frozen=True)
class ForcedResponse:
    """A recorded response of at least one token, for an engine to read again under its own
    settings.
    """

    prompt_ids: list[int]
    response_ids: list[int]


def _silent(message: str) -> None:
    """The default for `say`."""


@dataclass(frozen=True)
class EngineSettings:
    """The engine settings that the user asked for; `Engine.describe()` returns them as resolved."""

    model: str
    sampling: SamplingSettings
    top_logprobs: int
    dtype: str = "auto"
    seed: int = 0
    log_file: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # --engine-arg key=value
    full: bool = False  # whether `sample_full` will be called
    say: Callable[[str], None] = field(default=_silent, compare=False)  # reports one line
    adapter: str | None = None  # a LoRA adapter to sample with, beside the weights
    world: World = ALONE  # the ranks of a training run, each with an engine or a part of one
    tensor_parallel: int = 1  # ranks that share an engine
    sleeps: bool = False  # whether it frees its GPU memory between calls
    # Whether rollouts report the experts of each token; None: where that is free
    routes: bool | None = None
    weights_folder: Path | None = None  # visible to servers, for new weights
    # Whether `replay` will be called: vLLM on a GPU must know before it starts
    replays: bool = False


class Engine(Protocol):
    """What an engine's file returns from `create(settings)`."""

    @property
    def max_model_len(self) -> int:
        """The context length: prompt plus response, in tokens."""
        ...

    def sample(self, requests: Sequence[Request], on_finished: OnFinished) -> list[Rollout]:
        """Sample one response per request, in the order of the requests, and report how many have
        finished.

        A request may have its own sampling settings: log μ is always that of the distribution it
        was drawn from.
        """
        ...

    def load_weights(self, model: Any) -> None:
        """Load every weight of a Hugging Face model of the same architecture, and drop what the old
        ones left cached.

        Always all weights: an engine that packs or ties them keeps old copies of any that it does
        not get.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """The settings as resolved, for the manifest."""
        ...

    def close(self) -> None:
        """Free the weights and caches, so that the trainer can use the memory."""
        ...


class EngineModule(Protocol):
    """What a file in this folder must have: a function, and facts that callers need before they
    call it.

    Its abilities are facts that it may leave out: RETURNS_ROUTES = True if its rollouts can report
    the experts of each token, PREFILLS and REPLAYS = True if it can read recorded responses again,
    OPEN = True if its tensors and modules can be inspected.
    """

    # It talks to a server by its URL, which may restart with other settings between two shards
    REMOTE: bool
    TAKES_WEIGHTS: bool  # whether `load_weights` works; training needs it
    MEMORY_SHARE: str | None  # its argument for the share of GPU memory, if it reserves one

    def create(self, settings: EngineSettings) -> Engine:
        """Start the engine; a `MismatchError` says what is missing and how to get it."""
        ...


class CheckingModule(EngineModule, Protocol):
    """An engine module that can check settings before it loads anything."""

    def check(self, settings: EngineSettings) -> None:
        """A `UsageError` for settings that the engine does not accept."""
        ...


class FullEngine(Engine, Protocol):
    """An engine whose module has `full_bytes(vocabulary, tokens)`: the memory for one response
    of that length.
    """

    def sample_full(
        self, requests: Sequence[Request], sinks: Sequence[Sink], on_finished: OnFinished
    ) -> list[Rollout]:
        """Like `sample`; the first responses, one per sink, also send it log μ of all their
        tokens in order.
        """
        ...


class PrefillingEngine(Engine, Protocol):
    """An engine whose module has `PREFILLS`."""

    def prefill(
        self, responses: Sequence[ForcedResponse], on_finished: OnFinished
    ) -> list[np.ndarray]:
        """Log μ of the tokens of each response, float32 [T], from one pass over the whole sequence.

        After temperature and truncation, without any prefix cache. A `MismatchError` if the engine
        cannot apply them.
        """
        ...


class ReplayingEngine(PrefillingEngine, Protocol):
    """An engine whose module has `REPLAYS` too."""

    def replay(
        self,
        responses: Sequence[ForcedResponse],
        on_finished: OnFinished,
        *,
        alone: bool = False,
        cached: bool = True,
    ) -> list[Rollout]:
        """Decode the same tokens again, in the batches that `sample` makes: the result is what it
        would have reported.

        `alone`: each in a batch of its own. Not `cached`: without reading the prefix cache, if the
        engine has one.
        """
        ...


@dataclass(frozen=True)
class UnreadTensor:
    """Stands for a tensor that an engine does not expose."""

    reason: str


class OpenEngine(Engine, Protocol):
    """An engine whose tensors and modules can be inspected one by one: its module has OPEN =
    True.
    """

    def weights(
        self, plain: Shapes | None = None
    ) -> Iterator[tuple[str, torch.Tensor | UnreadTensor]]:
        """Each tensor that it computes with, under the names of its model folder, one at a time.

        Fused tensors are split; one that cannot be read comes with the reason. With an adapter, the
        base weights. `plain`: the tensors of an unquantised folder, whose names a quantised engine
        uses.
        """
        ...

    def pass_over(self, token_ids: list[int]) -> AbstractContextManager[EnginePass]:
        """Read these tokens in one pass, and keep what its modules need to run again inside the
        `with` block.

        A `MismatchError` says why they cannot: a separate process, captured graphs, sharded
        modules.
        """
        ...


def full_bytes(engine: str, vocabulary: int, tokens: int) -> int:
    """Memory, in bytes, that the engine needs for the full distributions of a response of `tokens`
    tokens.

    Raises a `UsageError` for an engine that does not return them.
    """
    module = registry.load(__name__, engine, "engine")
    if not hasattr(module, "full_bytes"):
        raise UsageError(
            f"--engine {engine} does not return full distributions. Use --engine vllm or "
            "--engine hf with --full-divergence."
        )
    return int(module.full_bytes(vocabulary, tokens))


def engine_names() -> list[str]:
    """The names of the engines."""
    return registry.names(__name__)


def engine_module(name: str) -> EngineModule:
    """The module of a public name; it imports its library only when it creates an engine."""
    module: Any = registry.load(__name__, name, "engine")
    return module


def check_settings(name: str, settings: EngineSettings) -> None:
    """A `UsageError` for mistakes that show without the engine's library."""
    module = engine_module(name)
    if settings.routes:
        check_returns_routes(name)
    if hasattr(module, "check"):
        cast(CheckingModule, module).check(settings)


def check_returns_routes(name: str) -> None:
    """A `UsageError` for an engine whose rollouts never report the experts of their tokens."""
    if not getattr(engine_module(name), "RETURNS_ROUTES", False):
        raise UsageError(
            f"--engine {name} does not report which experts it chose. Use --engine hf, or vllm "
            "on a GPU, or leave out routes and --replay-routes."
        )


def engine_has(name: str, ability: str) -> bool:
    """Whether the module of an engine declares an ability: `REPLAYS`, `PREFILLS` or `OPEN`."""
    return bool(getattr(engine_module(name), ability, False))


def create_engine(name: str, settings: EngineSettings) -> Engine:
    """Start the engine with this public name; a `MismatchError` says what is missing and how to
    get it.
    """
    return engine_module(name).create(settings)


def sample_seed(seed: int, prompt_id: int, sample_index: int, step: int = 0, turn: int = 0) -> int:
    """A 31-bit seed from hash(seed, prompt, sample, step): a resumed run samples what the
    unbroken one would have.
    """
    key = f"{seed}/{prompt_id}/{sample_index}/{step}"
    # The first turn is left out: it has the seed of a response of a single turn.
    if turn:
        key += f"/{turn}"
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def engine_failures(action: str, saved: str) -> Iterator[None]:
    """Turn any failure inside an engine into a `MismatchError` that says what is saved and how to
    resume.

    Errors from other ranks are not the engine's, and pass unchanged.
    """
    try:
        yield
    except MismatchError:
        raise
    except Exception as error:  # a library can fail in any way: out of memory, a lost worker
        # A collective call inside the engine fails where another rank is lost.
        if is_lost_rank(error):
            raise
        raise MismatchError(
            f"The rollout engine failed while {action} ({type(error).__name__}: "
            f"{first_line(error)}). {saved}: continue with --resume. MISMATCH_DEBUG=1 shows "
            "where it failed."
        ) from error


def token_counter(on_finished: OnFinished) -> Callable[[int], None] | None:
    """The caller's `on_finished.tokens`, to call with the number of newly sampled tokens; None if
    it counts only responses.
    """
    return getattr(on_finished, "tokens", None)


def sample_checked(
    engine: Engine,
    requests: Sequence[Request],
    prompt_id_S: Sequence[int],
    on_finished: OnFinished,
    sinks: Sequence[Sink] = (),
) -> list[Rollout]:
    """Sample, and refuse what no sampler can have drawn; a `MismatchError` names the response and
    its prompt.

    `sinks` take the full distributions of the first responses.
    """
    with engine_failures("sampling", "Everything sampled before is kept"):
        if sinks:
            rollouts = cast(FullEngine, engine).sample_full(requests, sinks, on_finished)
        else:
            rollouts = engine.sample(requests, on_finished)
    for prompt_id, rollout in zip(prompt_id_S, rollouts, strict=True):
        check_rollout(prompt_id, rollout)
    return rollouts


def replay_checked(
    engine: Engine,
    responses: Sequence[ForcedResponse],
    prompt_id_S: Sequence[int],
    on_finished: OnFinished,
    *,
    alone: bool = False,
    cached: bool = True,
) -> list[Rollout]:
    """Decode recorded tokens again; a `MismatchError` names the prompt of a response that came back
    different.

    A response without tokens comes back unchanged; a token that truncation excludes under these
    settings has −∞.
    """
    readable = _readable(engine, responses, prompt_id_S, on_finished)
    replaying = cast(ReplayingEngine, engine)
    with engine_failures("replaying recorded tokens", "Everything computed before is kept"):
        replayed = iter(replaying.replay(readable, on_finished, alone=alone, cached=cached))
    rollouts = []
    for response in responses:
        if response.response_ids:
            rollouts.append(next(replayed))
        else:
            rollouts.append(_without_tokens(response))
    for prompt_id, response, rollout in zip(prompt_id_S, responses, rollouts, strict=True):
        same_prompt = rollout.prompt_ids == response.prompt_ids
        if not same_prompt or rollout.response_ids != response.response_ids:
            raise MismatchError(
                "The engine did not decode the recorded tokens of a response to prompt "
                f"{prompt_id}. Switch off whatever chooses tokens besides its sampler "
                "(speculative decoding, structured outputs, a plug-in)."
            )
        check_replayed(prompt_id, rollout)
    return rollouts


def prefill_checked(
    engine: Engine,
    responses: Sequence[ForcedResponse],
    prompt_id_S: Sequence[int],
    on_finished: OnFinished,
) -> list[np.ndarray]:
    """Log μ of recorded tokens, read in one pass; a `MismatchError` names the prompt of an
    impossible value.
    """
    import numpy as np

    readable = _readable(engine, responses, prompt_id_S, on_finished)
    with engine_failures("reading recorded tokens", "Everything computed before is kept"):
        prefilled = iter(cast(PrefillingEngine, engine).prefill(readable, on_finished))
    nothing = np.zeros(0, dtype=np.float32)
    logps = [next(prefilled) if response.response_ids else nothing for response in responses]
    for prompt_id, response, logp_T in zip(prompt_id_S, responses, logps, strict=True):
        if len(logp_T) != len(response.response_ids):
            raise MismatchError(
                f"The engine returned {len(logp_T)} log-probs for the "
                f"{len(response.response_ids)} tokens of a response to prompt {prompt_id}. "
                "Report this to the engine's authors."
            )
        check_read(prompt_id, logp_T)
    return logps


def _readable(
    engine: Engine,
    responses: Sequence[ForcedResponse],
    prompt_id_S: Sequence[int],
    on_finished: OnFinished,
) -> list[ForcedResponse]:
    """The responses that have tokens; the others count as finished, and are not sent.

    A `MismatchError` names the prompt of one that does not fit the engine's context.
    """
    for prompt_id, response in zip(prompt_id_S, responses, strict=True):
        length = len(response.prompt_ids) + len(response.response_ids)
        check_fits(prompt_id, length, engine.max_model_len)
    readable = [response for response in responses if response.response_ids]
    if len(readable) < len(responses):
        on_finished(len(responses) - len(readable))
    return readable


def _without_tokens(response: ForcedResponse) -> Rollout:
    import numpy as np

    from mismatch_cli.rules.batch import Rollout

    nothing = np.zeros(0, dtype=np.float32)
    return Rollout(response.prompt_ids, [], nothing, nothing.astype(np.int32), None, None, "length")
