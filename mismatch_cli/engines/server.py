"""An OpenAI-compatible vLLM server by its URL: requests in parallel, and a server that goes away and comes back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli import custom_code
from mismatch_cli.batch import Rollout
from mismatch_cli.engines import Engine, EngineSettings, Request
from mismatch_cli.engines._server_http import Address, Refused, Server, base_url
from mismatch_cli.engines._server_rollout import Completions
from mismatch_cli.engines._server_transfer import TransferredWeights, check_possible
from mismatch_cli.engines._server_weights import (
    SharedWeights,
    Weights,
    check_same_weights,
    told_checksums,
    told_version,
)
from mismatch_cli.errors import MismatchError, UsageError, first_line
from mismatch_cli.models import check_model_folder, load_config
from mismatch_cli.ranks import World
from mismatch_cli.sampling import SamplingSettings

REMOTE, TAKES_WEIGHTS, MEMORY_SHARE = True, True, None
_ATTEMPTS = 3  # at sampling a batch with servers that are restarted meanwhile
_ADDRESS = ("concurrency", "timeout", "patience")
_ARGUMENTS = ("url", "served_model", "max_model_len", *_ADDRESS)
_PATIENCE_AT_START, _FOR_THE_LIST = 3.0, 5.0  # a URL that is wrong should say so at once
_FIRST_ANSWER = 60.0  # seconds for what a server that may be busy says next, unless `timeout` says otherwise


def check(settings: EngineSettings) -> None:
    """What a server decides where it is started, and what has to be said of it."""
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


def create(settings: EngineSettings) -> Engine:
    """Look at the servers, and measure whether their log-probs are those of the distribution that they sample from.

    Several URLs, with commas between, are dealt to the ranks; a rank that has several shares its requests among them.
    """
    check(settings)
    check_model_folder(settings.model)
    given = {name: settings.extra[name] for name in _ADDRESS if name in settings.extra}
    urls = list(dict.fromkeys(base_url(url.strip()) for url in str(settings.extra["url"]).split(",")))
    world, folder = settings.world, settings.weights_folder
    weights: Weights | None = None
    if settings.weight_transfer == "nccl":
        check_possible()
        weights = TransferredWeights([Address(url, **given) for url in urls], world, settings.say)
    elif folder is not None:
        weights = SharedWeights(folder, world)
    own = urls[world.rank :: world.size] or [urls[world.rank % len(urls)]]
    engines = [ServerEngine(settings, Address(url, **given), weights, speaks=world.rank < len(urls)) for url in own]
    return Servers(engines, weights, world)


class ServerEngine:
    """A server that is there, serves the model, and reports log μ; it is looked at again after every shard."""

    def __init__(
        self, settings: EngineSettings, address: Address, weights: Weights | None = None, speaks: bool = True
    ) -> None:
        """`speaks`: whether it is this rank that gives the server its weights, of those that share it."""
        self._settings = settings
        self._address = address
        self._weights, self._speaks = weights, speaks
        self.url, self.checksums = address.url, dict[str, str]()
        self._vocabulary = _vocabulary(settings.model)
        self._served, self._mode, self._told = asyncio.run(self._look())

    @property
    def max_model_len(self) -> int:
        return self._served.context

    def sample(self, requests: Sequence[Request], on_finished: Callable[[int], None]) -> list[Rollout]:
        return asyncio.run(self._sample(requests, on_finished))

    def take_over(self) -> None:
        """Give the server the published weights, and ask for their checksums."""
        if self._speaks:
            asyncio.run(self._take_over())

    async def _take_over(self) -> None:
        assert self._weights is not None
        async with Server(self._address, self._settings.say) as server:
            await self._weights.give(server, self.url)
        async with Server(replace(self._address, patience=0), self._settings.say) as server:
            self.checksums = await told_checksums(server)

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
            for _ in range(_ATTEMPTS):
                await self._keep_weights(server)
                rollouts = await completions.sample(requests, settings.sampling, settings.top_logprobs, on_finished)
                if await self._has_weights(server):  # else it died, and came back with those of its start
                    break
            else:
                raise MismatchError(
                    f"{self._address.url} lost its weights {_ATTEMPTS} times while it sampled. Look into its log: "
                    "something restarts it. --resume goes on with the run."
                )
            await self._check_unchanged(server)
        return rollouts

    async def _has_weights(self, server: Server) -> bool:
        return not (self._weights and self._weights.version) or await told_version(server) == self._weights.version

    async def _keep_weights(self, server: Server) -> None:
        """A server that was restarted since it was told has the weights that it began with."""
        if self._weights is not None and not await self._has_weights(server):
            self._settings.say(f"{self._address.url} has other weights: it is given those of this step again")
            await self._weights.give(server, self.url)
            check_same_weights("before", self.url, self.checksums, await told_checksums(server))

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


class Servers:
    """The servers of a rank, as one engine: each samples its share, and all get the same weights."""

    def __init__(self, engines: Sequence[ServerEngine], weights: Weights | None, world: World) -> None:
        self._engines, self._weights, self._world = engines, weights, world
        first, *others = (engine.describe() for engine in engines)
        for other in others:
            if differing := [name for name in first if first[name] != other[name]]:
                raise MismatchError(
                    f"The servers are not alike: {differing[0]} is {first[differing[0]]} on the first and "
                    f"{other[differing[0]]} on another. Start all of them with the same arguments."
                )

    @property
    def max_model_len(self) -> int:
        return min(engine.max_model_len for engine in self._engines)

    def sample(self, requests: Sequence[Request], on_finished: Callable[[int], None]) -> list[Rollout]:
        count = len(self._engines)
        if count == 1:
            return self._engines[0].sample(requests, on_finished)
        shares = [requests[i::count] for i in range(count)]
        with ThreadPoolExecutor(count) as threads:
            found = list(threads.map(lambda engine, share: engine.sample(share, on_finished), self._engines, shares))
        return [found[i % count][i // count] for i in range(len(requests))]

    def load_weights(self, model: Any) -> None:
        assert self._weights is not None
        self._weights.publish(model)
        for engine in self._engines:
            engine.take_over()
        first, *others = [told for part in self._world.gather(self._checksums()) for told in part]
        for url, checksums in others:
            check_same_weights(first[0], url, first[1], checksums)
        self._weights.forget_older()

    def _checksums(self) -> list[tuple[str, dict[str, str]]]:
        return [(engine.url, engine.checksums) for engine in self._engines]

    def describe(self) -> dict[str, Any]:
        return self._engines[0].describe()

    def close(self) -> None:
        """Nothing is held between two calls but the newest weights: the servers are not ours to stop."""
        if self._weights is not None:
            self._weights.remove()


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


PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
_COMPILATION = {0: "NONE", 1: "STOCK_TORCH_COMPILE", 2: "DYNAMO_TRACE_ONCE", 3: "VLLM_COMPILE"}
_CUDAGRAPHS = {"0": "NONE", "1": "PIECEWISE", "2": "FULL", "[2, 0]": "FULL_DECODE_ONLY", "[2, 1]": "FULL_AND_PIECEWISE"}
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_PROBES = [Request([1 + i, 2 + 3 * i, 3 + 5 * i, 4 + 7 * i], seed=i) for i in range(8)]  # ids that every model has
_NORMALISED = 1e-3


@dataclass(frozen=True)
class Served:
    """One model of a server, and what two looks at the server must agree in to be looks at the same engine."""

    name: str
    model: str  # the folder or hub name that it was loaded from, as far as told
    context: int  # prompt and response together, in tokens
    version: str | None
    also_named: frozenset[str] = field(default=frozenset(), compare=False)  # what it may call itself in an answer


async def find_served(
    server: Server, url: str, model: str, served_model: str | None, max_model_len: int | None
) -> Served:
    """The model to ask for: by its served name, or because it was loaded from what the trainer loads.

    `max_model_len` is the longest that is wanted; the server's own length is a bound where it is told.
    """
    listed = await server.get("/v1/models")
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list) or not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in cards):
        raise MismatchError(f"{url} lists no models under /v1/models. Check --engine-url: it must be a vLLM server.")
    roots = {card["id"]: str(card.get("root") or card["id"]) for card in cards}
    name = served_model or next((n for n, root in roots.items() if n == model or _same(root, model)), None)
    if name is None or name not in roots:
        names = ", ".join(roots)[:200]
        if served_model:
            raise UsageError(f"{url} does not serve {served_model}. --served-model can be: {names}.")
        raise MismatchError(
            f"{url} does not serve {model} under that name, but: {names}. If these are the same weights, say so with "
            "--served-model NAME; else name the model that is served."
        )
    card = next(card for card in cards if card["id"] == name)
    parent: dict[str, Any] = next((other for other in cards if other["id"] == card.get("parent")), {})  # of an adapter
    lengths = [n for n in (card.get("max_model_len") or parent.get("max_model_len"), max_model_len) if n]
    if not lengths or not all(type(n) is int and n > 0 for n in lengths):
        raise MismatchError(f"{url} does not tell the length of its context. Give it with --max-model-len.")
    told = await server.get("/version")
    version = told.get("version") if isinstance(told, dict) else None
    same = frozenset(other for other, root in roots.items() if root == roots[name])  # it answers under its first name
    return Served(name, roots[name], min(lengths), version if isinstance(version, str) else None, same)


def _same(root: str, model: str) -> bool:
    return root == model or (Path(model).exists() and Path(root).expanduser().resolve() == Path(model).resolve())


async def measure_mode(completions: Completions) -> str:
    """Which log-probs the server reports, by what they do: the API does not tell.

    Two tokens are left to the sampler, at temperatures ½ and 2. Processed log-probs are those of a distribution over
    these two, and their difference shrinks by 4; raw ones neither know of the two nor of the temperature.
    """
    cold, hot = [await _top_two(completions, temperature) for temperature in (0.5, 2.0)]
    normalised = np.mean([np.abs(np.exp(logp).sum(1) - 1) < _NORMALISED for logp in (cold, hot)])
    shrinks = (cold[:, 0] - cold[:, 1]).sum() > 2 * (hot[:, 0] - hot[:, 1]).sum()
    if normalised > 0.5 and shrinks:
        return PROCESSED
    # The most probable of V tokens has at least probability 1/V; logits in place of log-probs know no such bound.
    if normalised < 0.5 and not shrinks and (hot[:, 0] >= -log(completions.vocabulary)).all():
        return RAW
    raise MismatchError(
        "The server's log-probs are neither those of the distribution that it samples from nor those before "
        "temperature and truncation. Start it with --logprobs-mode processed_logprobs."
    )


async def _top_two(completions: Completions, temperature: float) -> np.ndarray:
    sampling = SamplingSettings(temperature=temperature, top_k=2, max_tokens=1)
    rollouts = await completions.sample(_PROBES, sampling, top_logprobs=2)
    return np.concatenate([r.topk_logp_rollout_TK for r in rollouts if r.topk_logp_rollout_TK is not None])


async def check_top_logprobs(completions: Completions, top_logprobs: int) -> None:
    """One token with as many log-probs as will be asked for: a server has a limit, 20 unless told otherwise."""
    try:
        await completions.sample(_PROBES[:1], SamplingSettings(max_tokens=1), top_logprobs)
    except Refused as refused:
        if "logprobs" not in refused.told:
            raise
        raise MismatchError(
            f"The server does not give {top_logprobs} log-probs per token ({refused.told.rstrip('.')}). "
            f"Start it with --max-logprobs {top_logprobs}, or use a lower --top-logprobs."
        ) from refused


def check_mode(mode: str, sampling: SamplingSettings) -> None:
    """Raw log-probs are μ's only where the sampler changes nothing."""
    if mode == PROCESSED or (sampling.temperature == 1 and not sampling.truncates):
        return
    raise MismatchError(
        "The server reports raw log-probs, taken before temperature and truncation: they are not those of the "
        "distribution that it samples from. Start it with --logprobs-mode processed_logprobs, or sample with "
        "--temperature 1 and no --top-p, --top-k, --min-p."
    )


async def read_settings(server: Server) -> dict[str, Any]:
    """The settings that can move log μ, under the names of the in-process engine; null is what the server keeps back.

    A server in development mode (VLLM_SERVER_DEV_MODE=1) tells all, any vLLM tells of its KV cache in its metrics.
    """
    told = await server.get("/server_info?config_format=json")
    config = told.get("vllm_config") if isinstance(told, dict) else None
    config = config if isinstance(config, dict) else {}
    settings = _of_config(config)
    found = _CACHE_INFO.search(await server.get_text("/metrics"))
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1))) if found else {}
    cache = _get(config, "cache_config", "cache_dtype") or labels.get("cache_dtype")
    cached = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    if settings["prefix_caching"] is None:
        settings["prefix_caching"] = cached
    settings["kv_cache_dtype"] = settings["dtype"] or cache if cache == "auto" else cache
    return {name: value if isinstance(value, str | int | float) else None for name, value in settings.items()}


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    dtype = _get(config, "model_config", "dtype")
    mode, graphs = (_get(config, "compilation_config", name) for name in ("mode", "cudagraph_mode"))
    no_cascade = _get(config, "model_config", "disable_cascade_attn")
    return {
        "dtype": dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        "quantization": _get(config, "model_config", "quantization"),
        "kv_cache_dtype": None,
        "prefix_caching": _get(config, "cache_config", "enable_prefix_caching"),
        "chunked_prefill": _get(config, "scheduler_config", "enable_chunked_prefill"),
        "max_num_seqs": _get(config, "scheduler_config", "max_num_seqs"),
        "max_num_batched_tokens": _get(config, "scheduler_config", "max_num_batched_tokens"),
        "tensor_parallel_size": _get(config, "parallel_config", "tensor_parallel_size"),
        "enforce_eager": _get(config, "model_config", "enforce_eager"),
        "compilation_mode": _COMPILATION.get(mode) if isinstance(mode, int) else mode,
        "cudagraph_mode": _CUDAGRAPHS.get(str(graphs), graphs),
        "attention_backend": _get(config, "attention_config", "backend"),
        "cascade_attention": None if no_cascade is None else not no_cascade,
        "device": _get(config, "device_config", "device"),
    }


def _get(config: Mapping[str, Any], section: str, name: str) -> Any:
    inner = config.get(section)
    return inner.get(name) if isinstance(inner, dict) else None
