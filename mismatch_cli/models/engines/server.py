"""A running OpenAI-compatible vLLM server: requests in parallel, to a server that may go away
and come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import MismatchError, UsageError, first_line
from mismatch_cli.models.engines import Engine, EngineSettings, ForcedResponse, OnFinished, Request
from mismatch_cli.models.engines._checks import check_token_ids
from mismatch_cli.models.engines._server_facts import (
    ServedModel,
    check_mode,
    check_top_logprobs,
    find_served,
    measure_mode,
    read_settings,
)
from mismatch_cli.models.engines._server_http import Address, Server, base_url
from mismatch_cli.models.engines._server_prefill import check_as_it_comes, prefill
from mismatch_cli.models.engines._server_rollout import Completions
from mismatch_cli.models.engines._server_weights import (
    SharedWeights,
    check_same_weights,
    read_checksums,
    read_version,
)
from mismatch_cli.models.loading import check_model_folder, load_config
from mismatch_cli.processes.ranks import World
from mismatch_cli.rules.batch import Rollout

if TYPE_CHECKING:
    import numpy as np

Wanted = TypeVar("Wanted", Request, ForcedResponse)
Answer = TypeVar("Answer")

REMOTE, TAKES_WEIGHTS, MEMORY_SHARE = True, True, None
PREFILLS = True  # but not REPLAYS: a server draws its tokens itself
_ATTEMPTS = 3  # at sampling a batch while the server restarts
_ADDRESS = ("concurrency", "timeout", "patience")
_ARGUMENTS = ("url", "served_model", "max_model_len", *_ADDRESS)
_PATIENCE_AT_START, FOR_THE_LIST = 3.0, 5.0  # a wrong URL should fail at once
# Seconds for the next answers of a server that may be busy, unless `timeout` is set
FIRST_ANSWER = 60.0


def check(settings: EngineSettings) -> None:
    """A `UsageError` for settings that are fixed when the server starts, or that a server needs
    and lacks.
    """
    unknown = sorted(set(settings.extra) - set(_ARGUMENTS))
    if unknown:
        raise UsageError(
            f"--engine server cannot set {', '.join(unknown)}: set that when you start the server. "
            f"It takes: {', '.join(_ARGUMENTS)}."
        )
    if settings.dtype != "auto":
        raise UsageError(
            f"--rollout-dtype {settings.dtype} is set when you start the server. Leave out the flag."
        )
    if not settings.extra.get("url"):
        raise UsageError(
            "--engine server needs --engine-url, such as --engine-url http://localhost:8000"
        )
    if settings.adapter is not None and not settings.extra.get("served_model"):
        raise UsageError(
            "A server loads its adapters itself (vllm serve --enable-lora --lora-modules "
            "NAME=PATH). Give the adapter's name on the server: served_model = NAME."
        )


def create(settings: EngineSettings) -> Engine:
    """Check the servers, and measure whether their log-probs are those of the distribution that
    they sample from.

    Several URLs, separated by commas, are dealt to the ranks; a rank with several spreads its
    requests over them.
    """
    check(settings)
    check_model_folder(settings.model)
    limits = {name: settings.extra[name] for name in _ADDRESS if name in settings.extra}
    urls: list[str] = []
    for text in str(settings.extra["url"]).split(","):
        url = base_url(text.strip())
        if url not in urls:
            urls.append(url)
    world = settings.world
    weights = None
    if settings.weights_folder is not None:
        weights = SharedWeights(settings.weights_folder, world)
    # Ranks without a server of their own share one; the first of them sends it its weights.
    urls_of_rank = urls[world.rank :: world.size] or [urls[world.rank % len(urls)]]
    speaks = world.rank < len(urls)
    engines = [
        ServerEngine(settings, Address(url, **limits), weights, speaks) for url in urls_of_rank
    ]
    return Servers(engines, weights, world)


class ServerEngine:
    """A server that runs, serves the model, and reports log μ; it is checked again after every
    shard.
    """

    def __init__(
        self,
        settings: EngineSettings,
        address: Address,
        weights: SharedWeights | None = None,
        speaks: bool = True,
    ) -> None:
        """`speaks`: whether this rank, among those that share the server, gives it its weights."""
        self.settings = settings
        self.url = address.url
        self.checksums: dict[str, str] = {}  # of the newest weights, by name
        self._address = address
        self._weights = weights
        self._speaks = speaks
        self._vocabulary = _vocabulary(settings.model)
        self._served, self._mode, self._disclosed = asyncio.run(self._examine())

    @property
    def max_model_len(self) -> int:
        return self._served.context

    def sample(self, requests: Sequence[Request], on_finished: OnFinished) -> list[Rollout]:
        sampling, top_logprobs = self.settings.sampling, self.settings.top_logprobs
        return asyncio.run(
            self._ask(lambda served: served.sample(requests, sampling, top_logprobs, on_finished))
        )

    def prefill(
        self, responses: Sequence[ForcedResponse], on_finished: OnFinished
    ) -> list[np.ndarray]:
        check_as_it_comes(self.settings.sampling)
        check_token_ids([response.response_ids for response in responses], self._vocabulary)
        return asyncio.run(self._ask(lambda served: prefill(served, responses, on_finished)))

    def load_published(self) -> None:
        """Have the server load the published weights, and ask for their checksums.

        A server that several ranks share gets them from the first of these.
        """
        if self._speaks:
            asyncio.run(self._load_published())

    async def _load_published(self) -> None:
        assert self._weights is not None
        async with Server(self._address, self.settings.say) as server:
            await self._weights.send_to(server, self.url)
        # Many servers cannot report checksums: they are asked once, without patience.
        async with Server(replace(self._address, patience=0), self.settings.say) as server:
            self.checksums = await read_checksums(server)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "server",
            "version": self._served.version,
            "model": self._served.model,
            "served_model": self._served.name,
            **self._disclosed,
            "max_model_len": self._served.context,
            "logprobs_mode": self._mode,
            "concurrency": self._address.concurrency,
            "seed": self.settings.seed,
        }

    async def _examine(self) -> tuple[ServedModel, str, dict[str, Any]]:
        """The model, the server's kind of log-probs, and the settings that it discloses."""
        patience = min(self._address.patience, _PATIENCE_AT_START)
        at_start = replace(self._address, patience=patience)
        async with Server(at_start, self.settings.say, within=FOR_THE_LIST) as server:
            served = await self._find(server, self.settings.extra.get("served_model"))
        timeout = self.settings.extra.get("timeout", FIRST_ANSWER)
        async with Server(replace(at_start, timeout=timeout), self.settings.say) as server:
            completions = self._completions(server, served)
            mode = await measure_mode(completions)
            check_mode(mode, self.settings.sampling)
            await check_top_logprobs(completions, self.settings.top_logprobs)
            return served, mode, await read_settings(server)

    async def _ask(self, ask: Callable[[Completions], Awaitable[list[Answer]]]) -> list[Answer]:
        """The server's answers, given with the weights it was sent and the settings it had at
        the start.
        """
        async with Server(self._address, self.settings.say) as server:
            completions = self._completions(server, self._served)
            for _ in range(_ATTEMPTS):
                await self._restore_weights(server)
                answers = await ask(completions)
                # Without them it has restarted in the meantime, and answered with its original ones
                if await self._has_weights(server):
                    break
            else:
                raise MismatchError(
                    f"{self._address.url} lost its weights {_ATTEMPTS} times while it answered: "
                    "something restarts it. Read its log, then continue with --resume."
                )
            await self._check_unchanged(server)
        return answers

    async def _has_weights(self, server: Server) -> bool:
        """Whether the server has the published weights, if any have been published."""
        if self._weights is None or not self._weights.version:
            return True
        return await read_version(server) == self._weights.version

    async def _restore_weights(self, server: Server) -> None:
        """Send the weights again to a server that has restarted, and so has its original ones."""
        if self._weights is not None and not await self._has_weights(server):
            self.settings.say(
                f"{self._address.url} has lost this step's weights: sending them again"
            )
            await self._weights.send_to(server, self.url)
            check_same_weights("before", self.url, self.checksums, await read_checksums(server))

    async def _check_unchanged(self, server: Server) -> None:
        """Refuse a server that has restarted with other settings: then nobody knows which of them
        sampled what.
        """
        served = await self._find(server, self._served.name)
        mode = await measure_mode(self._completions(server, served))
        if (served, mode) != (self._served, self._mode):
            raise MismatchError(
                f"{self._address.url} changed its settings while it sampled: "
                f"{_in_words(self._served, self._mode)} before, {_in_words(served, mode)} now. "
                "Start it as before and continue with --resume, or start over with --force."
            )

    async def _find(self, server: Server, name: str | None) -> ServedModel:
        longest = self.settings.extra.get("max_model_len")
        return await find_served(server, self._address.url, self.settings.model, name, longest)

    def _completions(self, server: Server, served: ServedModel) -> Completions:
        return Completions(server, served.name, served.also_named, self._vocabulary, served.context)


class Servers:
    """The servers of a rank, as one engine: each samples its share, and all get the same
    weights.
    """

    def __init__(
        self, engines: Sequence[ServerEngine], weights: SharedWeights | None, world: World
    ) -> None:
        self._engines = engines
        self._weights = weights
        self._world = world
        first, *others = (engine.describe() for engine in engines)
        for other in others:
            for name, value in first.items():
                if other[name] != value:
                    raise MismatchError(
                        f"The servers differ: {name} is {value} on the first and {other[name]} "
                        "on another. Start all of them with the same arguments."
                    )

    @property
    def max_model_len(self) -> int:
        return min(engine.max_model_len for engine in self._engines)

    def sample(self, requests: Sequence[Request], on_finished: OnFinished) -> list[Rollout]:
        return self._share(requests, lambda engine, share: engine.sample(share, on_finished))

    def prefill(
        self, responses: Sequence[ForcedResponse], on_finished: OnFinished
    ) -> list[np.ndarray]:
        return self._share(responses, lambda engine, share: engine.prefill(share, on_finished))

    def _share(
        self,
        wanted: Sequence[Wanted],
        ask: Callable[[ServerEngine, Sequence[Wanted]], list[Answer]],
    ) -> list[Answer]:
        """Deal requests to the servers; returns the answers in the order of the requests."""
        count = len(self._engines)
        if count == 1:
            return ask(self._engines[0], wanted)
        shares = [wanted[server::count] for server in range(count)]
        with ThreadPoolExecutor(count) as threads:
            answers = list(threads.map(ask, self._engines, shares))
        # The i-th request is number i // count of server i % count.
        return [answers[i % count][i // count] for i in range(len(wanted))]

    def load_weights(self, model: Any) -> None:
        assert self._weights is not None
        self._weights.publish(model)
        for engine in self._engines:
            engine.load_published()
        own = [(engine.url, engine.checksums) for engine in self._engines]
        (url, checksums), *others = chain.from_iterable(self._world.gather(own))
        for other_url, other_checksums in others:
            check_same_weights(url, other_url, checksums, other_checksums)
        self._weights.remove_older()

    def describe(self) -> dict[str, Any]:
        return self._engines[0].describe()

    def close(self) -> None:
        """Remove the newest weights; the servers are not ours to stop."""
        if self._weights is not None:
            self._weights.remove()


def _in_words(served: ServedModel, mode: str) -> str:
    return (
        f"{served.name} from {served.model}, version {served.version}, context {served.context}, "
        f"{mode}"
    )


def _vocabulary(model: str) -> int:
    """The number of the model's token ids, to notice ids of another model."""
    try:
        return int(load_config(model).get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise MismatchError(
            custom_code.refusal(model, error)
            or f"{model}: the model's configuration cannot be loaded ({first_line(error)}). "
            "Give the folder or hub name of the served model."
        ) from error
