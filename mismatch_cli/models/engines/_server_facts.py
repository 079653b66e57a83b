"""Facts about a server: its model, which log-probs it reports, and the settings that it
discloses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Request
from mismatch_cli.models.engines._server_http import RequestRefused, Server, lookup
from mismatch_cli.models.engines._server_rollout import Completions
from mismatch_cli.trace.manifest_types import may_hold

PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
_COMPILATION = {0: "NONE", 1: "STOCK_TORCH_COMPILE", 2: "DYNAMO_TRACE_ONCE", 3: "VLLM_COMPILE"}
_CUDAGRAPHS = {
    "0": "NONE",
    "1": "PIECEWISE",
    "2": "FULL",
    "[2, 0]": "FULL_DECODE_ONLY",
    "[2, 1]": "FULL_AND_PIECEWISE",
}
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
# Eight prompts of ids that every model has
_PROBES = [Request([1 + i, 2 + 3 * i, 3 + 5 * i, 4 + 7 * i], seed=i) for i in range(8)]
_NORMALISED = 1e-3  # the furthest from 1 that two processed probabilities add up to


@dataclass(frozen=True)
class ServedModel:
    """One model of a server, with the facts that must not change between two checks of the same
    engine.
    """

    name: str
    model: str  # the folder or hub name that it was loaded from, if the server reports it
    context: int  # prompt plus response, in tokens
    version: str | None
    # All names of these weights: the server may answer under any of them
    also_named: frozenset[str] = field(default=frozenset(), compare=False)


async def find_served(
    server: Server, url: str, model: str, served_model: str | None, max_model_len: int | None
) -> ServedModel:
    """The model to ask for: by its served name, or because it was loaded from the trainer's folder
    or hub name.

    `max_model_len` is the longest wanted; the server's own length is a bound if it reports one.
    """
    cards = await _read_cards(server, url)
    roots = {card["id"]: str(card.get("root") or card["id"]) for card in cards}
    name = served_model or _name_of(model, roots)
    if name is None or name not in roots:
        names = ", ".join(roots)[:200]
        if served_model:
            raise UsageError(f"{url} does not serve {served_model}. served_model can be: {names}.")
        raise MismatchError(
            f"{url} does not serve {model}, but: {names}. If one has the same weights, name it "
            "with served_model = NAME; otherwise use the served model."
        )
    context = _context(cards, name, max_model_len)
    if context is None:
        raise MismatchError(
            f"{url} does not report its context length. Give it with max_model_len."
        )
    version = lookup(await server.get("/version"), "version")
    if not isinstance(version, str):
        version = None
    # Under whichever name it is asked, vLLM answers under the first that these weights have.
    same = frozenset(other for other, root in roots.items() if root == roots[name])
    return ServedModel(name, roots[name], context, version, same)


async def _read_cards(server: Server, url: str) -> list[dict[str, Any]]:
    """What the server says of each of its models, with at least an `id`, its served name."""
    cards = lookup(await server.get("/v1/models"), "data")
    if not isinstance(cards, list) or not all(
        isinstance(lookup(card, "id"), str) for card in cards
    ):
        raise MismatchError(
            f"{url} lists no models under /v1/models. Check --engine-url: it must be a vLLM server."
        )
    return cards


def _name_of(model: str, roots: Mapping[str, str]) -> str | None:
    """The first served name of a folder or hub name."""
    for name, root in roots.items():
        if name == model or _same_folder(root, model):
            return name
    return None


def _same_folder(root: str, model: str) -> bool:
    folder = Path(model).expanduser()
    return root == model or (
        folder.exists() and Path(root).expanduser().resolve() == folder.resolve()
    )


def _context(cards: Sequence[dict[str, Any]], name: str, max_model_len: int | None) -> int | None:
    """The shorter of a model's context and `max_model_len`; None if neither is a length."""
    card = _card_of(name, cards)
    # The card of an adapter may leave out the context, which is that of its base model.
    base = _card_of(card.get("parent"), cards)
    reported = card.get("max_model_len") or base.get("max_model_len")
    lengths = [length for length in (reported, max_model_len) if length]
    if not lengths or not all(type(length) is int and length > 0 for length in lengths):
        return None
    return min(lengths)


def _card_of(name: Any, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The card of a served name; empty if there is none."""
    for card in cards:
        if card["id"] == name:
            return card
    return {}


async def measure_mode(completions: Completions) -> str:
    """Which log-probs the server reports, measured by their behaviour: the API does not say.

    The sampler may choose between two tokens, at temperatures ½ and 2. Processed log-probs are a
    distribution over these two, and their difference shrinks by a factor of 4; raw ones depend
    neither on the two nor on the temperature.
    """
    # By default a server reports log-probs from before temperature and truncation.
    # Taken for log μ, they would show a mismatch of the sampler's settings.
    cold_N2 = await _top_two(completions, temperature=0.5)
    hot_N2 = await _top_two(completions, temperature=2.0)
    total_N = np.exp(np.concatenate([cold_N2, hot_N2])).sum(1)
    normalised = np.mean(np.abs(total_N - 1) < _NORMALISED)  # the share of such answers
    cold_gap = (cold_N2[:, 0] - cold_N2[:, 1]).sum()
    shrinks = cold_gap > 2 * (hot_N2[:, 0] - hot_N2[:, 1]).sum()
    if normalised > 0.5 and shrinks:
        return PROCESSED
    # The most probable of V tokens has a probability of at least 1/V; logits instead of log-probs
    # have no such bound.
    if normalised < 0.5 and not shrinks and (hot_N2[:, 0] >= -log(completions.vocabulary)).all():
        return RAW
    raise MismatchError(
        "The server's log-probs are neither those of the distribution that it samples from nor "
        "those before temperature and truncation. Start it with --logprobs-mode "
        "processed_logprobs."
    )


async def _top_two(completions: Completions, temperature: float) -> np.ndarray:
    """The two highest log-probs after each probe, as the server reports them, [8, 2]."""
    sampling = SamplingSettings(temperature=temperature, top_k=2, max_tokens=1)
    rollouts = await completions.sample(_PROBES, sampling, top_logprobs=2)
    logps_TK: list[Any] = [rollout.topk_logp_rollout_TK for rollout in rollouts]
    return np.concatenate(logps_TK)


async def check_top_logprobs(completions: Completions, top_logprobs: int) -> None:
    """Sample one token with as many log-probs as the run needs: a server has a limit, 20 by
    default.
    """
    try:
        await completions.sample(_PROBES[:1], SamplingSettings(max_tokens=1), top_logprobs)
    except RequestRefused as refused:
        if "logprobs" not in refused.reason:
            raise
        raise MismatchError(
            f"The server does not return {top_logprobs} log-probs per token "
            f"({refused.reason.rstrip('.')}). Start it with --max-logprobs {top_logprobs}, or use "
            "a lower top_logprobs."
        ) from refused


def check_mode(mode: str, sampling: SamplingSettings) -> None:
    """Raw log-probs are those of μ only if the sampler changes nothing."""
    if mode == PROCESSED or (sampling.temperature == 1 and not sampling.truncates):
        return
    raise MismatchError(
        "The server reports raw log-probs, from before temperature and truncation, not those of "
        "the distribution that it samples from. Start it with --logprobs-mode "
        "processed_logprobs, or sample with --temperature 1 and no top_p, top_k, min_p."
    )


async def read_settings(server: Server) -> dict[str, Any]:
    """The settings that can move log μ, under the names of the in-process engine; null where the
    server is silent.

    A server in development mode (VLLM_SERVER_DEV_MODE=1) reports all, any vLLM reports its KV cache
    in its metrics.
    """
    config = lookup(await server.get("/server_info?config_format=json"), "vllm_config")
    settings = _settings_of_config(config)
    labels = await _read_cache_labels(server)
    if settings["prefix_caching"] is None:
        flag = labels.get("enable_prefix_caching", "")
        settings["prefix_caching"] = {"True": True, "False": False}.get(flag)
    cache_dtype = lookup(config, "cache_config", "cache_dtype") or labels.get("cache_dtype")
    if cache_dtype == "auto":  # as that of the model, if this is reported
        cache_dtype = settings["dtype"] or cache_dtype
    settings["kv_cache_dtype"] = cache_dtype
    for name, value in settings.items():
        if not may_hold(f"rollout.{name}", value):
            settings[name] = None
    return settings


async def _read_cache_labels(server: Server) -> dict[str, str]:
    """The settings of the KV cache, as Prometheus labels; empty if the server has no metrics."""
    line = _CACHE_INFO.search(await server.get_text("/metrics"))
    if line is None:
        return {}
    return dict(re.findall(r'(\w+)="([^"]*)"', line.group(1)))


def _settings_of_config(config: Any) -> dict[str, Any]:
    dtype = lookup(config, "model_config", "dtype")
    mode = lookup(config, "compilation_config", "mode")
    cudagraphs = lookup(config, "compilation_config", "cudagraph_mode")
    no_cascade = lookup(config, "model_config", "disable_cascade_attn")
    return {
        "dtype": dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        "quantization": lookup(config, "model_config", "quantization"),
        "kv_cache_dtype": None,  # depends on the metrics too
        "prefix_caching": lookup(config, "cache_config", "enable_prefix_caching"),
        "chunked_prefill": lookup(config, "scheduler_config", "enable_chunked_prefill"),
        "max_num_seqs": lookup(config, "scheduler_config", "max_num_seqs"),
        "max_num_batched_tokens": lookup(config, "scheduler_config", "max_num_batched_tokens"),
        "tensor_parallel_size": lookup(config, "parallel_config", "tensor_parallel_size"),
        "enforce_eager": lookup(config, "model_config", "enforce_eager"),
        "compilation_mode": _COMPILATION.get(mode) if isinstance(mode, int) else mode,
        "cudagraph_mode": _CUDAGRAPHS.get(str(cudagraphs), cudagraphs),
        "attention_backend": lookup(config, "attention_config", "backend"),
        "cascade_attention": None if no_cascade is None else not no_cascade,
        "device": lookup(config, "device_config", "device"),
    }
