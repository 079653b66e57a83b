"""An OpenAI-compatible vLLM server by its URL: requests in parallel, and a server that goes away and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mismatch_cli import custom_code
from mismatch_cli.batch import Rollout
from mismatch_cli.engines import EngineSettings, Request
from mismatch_cli.engines._server_facts import (
    Served,
    check_mode,
    check_top_logprobs,
    find_served,
    measure_mode,
    read_settings,
)
from mismatch_cli.engines._server_http import Address, Server, base_url
from mismatch_cli.engines._server_rollout import Completions
from mismatch_cli.errors import MismatchError, UsageError, first_line
from mismatch_cli.models import check_model_folder, load_config

_ADDRESS = ("concurrency", "timeout", "patience")
_ARGUMENTS = ("url", "served_model", "max_model_len", *_ADDRESS)
_PATIENCE_AT_START, _FOR_THE_LIST = 3.0, 5.0  # a URL that is wrong should say so at once
_FIRST_ANSWER = 60.0  # seconds for what a server that may be busy says next, unless `timeout` says otherwise


def create(settings: EngineSettings) -> ServerEngine:
    """Look at the server, and measure whether its log-probs are those of the distribution that it samples from."""
    unknown = sorted(set(settings.extra) - set(_ARGUMENTS))
    if unknown:
        raise UsageError(
            f"--engine server cannot set {', '.join(unknown)}: that is decided where the server is started. "
            f"It takes: {', '.join(_ARGUMENTS)}."
        )
    if settings.dtype != "auto":
        raise UsageError(f"--rollout-dtype {settings.dtype} is decided where the server is started. Leave it out.")
    if not settings.extra.get("url"):
        raise UsageError("--engine server needs --engine-url, such as --engine-url http://localhost:8000")
    if settings.adapter is not None and not settings.extra.get("served_model"):
        raise UsageError(
            "A server loads its adapters itself (vllm serve --enable-lora --lora-modules NAME=PATH). "
            "Say which of its names has this one: --served-model NAME."
        )
    check_model_folder(settings.model)
    given = {name: settings.extra[name] for name in _ADDRESS if name in settings.extra}
    return ServerEngine(settings, Address(base_url(str(settings.extra["url"])), **given))


class ServerEngine:
    """A server that is there, serves the model, and reports log μ; it is looked at again after every shard."""

    def __init__(self, settings: EngineSettings, address: Address) -> None:
        self._settings = settings
        self._address = address
        self._vocabulary = _vocabulary(settings.model)
        self._served, self._mode, self._told = asyncio.run(self._look())

    @property
    def max_model_len(self) -> int:
        return self._served.context

    def sample(self, requests: Sequence[Request], on_finished: Callable[[int], None]) -> list[Rollout]:
        return asyncio.run(self._sample(requests, on_finished))

    def load_weights(self, model: Any) -> None:  # noqa: ARG002
        raise MismatchError("A server behind a URL takes no weights from here. Use --engine vllm or --engine hf.")

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "server",
            "version": self._served.version,
            "model": self._served.model,
            "served_model": self._served.name,
            **self._told,
            "max_model_len": self._served.context,
            "logprobs_mode": self._mode,
            "concurrency": self._address.concurrency,
            "seed": self._settings.seed,
        }

    def close(self) -> None:
        """Nothing is held between two calls: the server is not ours to stop."""

    async def _look(self) -> tuple[Served, str, dict[str, Any]]:
        at_start = replace(self._address, patience=min(self._address.patience, _PATIENCE_AT_START))
        async with Server(at_start, self._settings.say, within=_FOR_THE_LIST) as server:
            served = await self._find(server, self._settings.extra.get("served_model"))
        first = replace(at_start, timeout=self._settings.extra.get("timeout", _FIRST_ANSWER))
        async with Server(first, self._settings.say) as server:
            completions = self._completions(server, served)
            mode = await measure_mode(completions)
            check_mode(mode, self._settings.sampling)
            await check_top_logprobs(completions, self._settings.top_logprobs)
            return served, mode, await read_settings(server)

    async def _sample(self, requests: Sequence[Request], on_finished: Callable[[int], None]) -> list[Rollout]:
        async with Server(self._address, self._settings.say) as server:
            completions = self._completions(server, self._served)
            settings = self._settings
            rollouts = await completions.sample(requests, settings.sampling, settings.top_logprobs, on_finished)
            await self._check_unchanged(server)
        return rollouts

    async def _check_unchanged(self, server: Server) -> None:
        """It may have been restarted with other settings: then nobody knows which of them sampled what."""
        served = await self._find(server, self._served.name)
        now, before = (served, await measure_mode(self._completions(server, served))), (self._served, self._mode)
        if now != before:
            raise MismatchError(
                f"{self._address.url} has become another server while it sampled: {_in_words(*before)} before, "
                f"{_in_words(*now)} now. Start it as it was and go on with --resume, or begin anew with --force."
            )

    async def _find(self, server: Server, name: str | None) -> Served:
        longest = self._settings.extra.get("max_model_len")
        return await find_served(server, self._address.url, self._settings.model, name, longest)

    def _completions(self, server: Server, served: Served) -> Completions:
        return Completions(server, served.name, served.also_named, self._vocabulary, served.context)


def _in_words(served: Served, mode: str) -> str:
    return f"{served.name} from {served.model}, version {served.version}, context {served.context}, {mode}"


def _vocabulary(model: str) -> int:
    """How many token ids the model has, so that an id of another model's is noticed."""
    try:
        return int(load_config(model).get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise MismatchError(
            custom_code.refusal(model, error)
            or f"{model}: the model's configuration cannot be loaded ({first_line(error)}). "
            "Give the folder or hub name of the model that is served."
        ) from error
