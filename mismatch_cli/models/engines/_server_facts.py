"""Facts about a server: its model, which log-probs it reports, and the settings that it
discloses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Request
from mismatch_cli.models.engines._server_http import RequestRefused, Server
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
# Ids that every model has
_PROBES = [Request([1 + i, 2 + 3 * i, 3 + 5 * i, 4 + 7 * i], seed=i) for i in range(8)]
_NORMALISED = 1e-3


@dataclass(frozen=True)
class ServedModel:
    """One model of a server, with the facts that must not change between two checks of the same
    engine.
    """

    name: str
    model: str  # the folder or hub name that it was loaded from, if the server reports it
    context: int  # prompt plus response, in tokens
    version: str | None
    # Names it may use in an answer
    also_named: frozenset[str] = field(default=frozenset(), compare=False)


async def find_served(
    server: Server, url: str, model: str, served_model: str | None, max_model_len: int | None
) -> ServedModel:
    """The model to ask for: by its served name, or because it was loaded from the trainer's folder
    or hub name.

    `max_model_len` is the longest wanted; the server's own length is a bound if it reports one.
    """
    listed = await server.get("/v1/models")
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list) or not all(
        isinstance(c, dict) and isinstance(c.get("id"), str) for c in cards
    ):
        raise MismatchError(
            f"{url} lists no models under /v1/models. Check --engine-url: it must be a vLLM server."
        )
    roots = {card["id"]: str(card.get("root") or card["id"]) for card in cards}
    name = served_model or next(
        (n for n, root in roots.items() if n == model or _same(root, model)), None
    )
    if name is None or name not in roots:
        names = ", ".join(roots)[:200]
        if served_model:
            raise UsageError(f"{url} does not serve {served_model}. served_model can be: {names}.")
        raise MismatchError(
            f"{url} does not serve {model}, but: {names}. If one has the same weights, name it "
            "with served_model = NAME; otherwise use the served model."
        )
    card = next(card for card in cards if card["id"] == name)
    # Of an adapter
    parent: dict[str, Any] = next(
        (other for other in cards if other["id"] == card.get("parent")), {}
    )
    lengths = [
        n for n in (card.get("max_model_len") or parent.get("max_model_len"), max_model_len) if n
    ]
    if not lengths or not all(type(n) is int and n > 0 for n in lengths):
        raise MismatchError(
            f"{url} does not report its context length. Give it with max_model_len."
        )
    told = await server.get("/version")
    version = told.get("version") if isinstance(told, dict) else None
    same = frozenset(
        other for other, root in roots.items() if root == roots[name]
    )  # it answers under the first of its names
    return ServedModel(
        name, roots[name], min(lengths), version if isinstance(version, str) else None, same
    )


def _same(root: str, model: str) -> bool:
    return root == model or (
        Path(model).exists() and Path(root).expanduser().resolve() == Path(model).resolve()
    )


async def measure_mode(completions: Completions) -> str:
    """Which log-probs the server reports, measured by their behaviour: the API does not say.

    The sampler may choose between two tokens, at temperatures ½ and 2. Processed log-probs are a
    distribution over these two, and their difference shrinks by a factor of 4; raw ones depend
    neither on the two nor on the temperature.
    """
    # By default a server reports log-probs from before temperature and truncation.
    # Taken for log μ, they would show a mismatch of the sampler's settings.
    cold, hot = [await _top_two(completions, temperature) for temperature in (0.5, 2.0)]
    normalised = np.mean([np.abs(np.exp(logp).sum(1) - 1) < _NORMALISED for logp in (cold, hot)])
    shrinks = (cold[:, 0] - cold[:, 1]).sum() > 2 * (hot[:, 0] - hot[:, 1]).sum()
    if normalised > 0.5 and shrinks:
        return PROCESSED
    # The most probable of V tokens has a probability of at least 1/V; logits instead of log-probs
    # have no such bound.
    if normalised < 0.5 and not shrinks and (hot[:, 0] >= -log(completions.vocabulary)).all():
        return RAW
    raise MismatchError(
        "The server's log-probs are neither those of the distribution that it samples from nor "
        "those before temperature and truncation. Start it with --logprobs-mode "
        "processed_logprobs."
    )


async def _top_two(completions: Completions, temperature: float) -> np.ndarray:
    sampling = SamplingSettings(temperature=temperature, top_k=2, max_tokens=1)
    rollouts = await completions.sample(_PROBES, sampling, top_logprobs=2)
    return np.concatenate(
        [r.topk_logp_rollout_TK for r in rollouts if r.topk_logp_rollout_TK is not None]
    )


async def check_top_logprobs(completions: Completions, top_logprobs: int) -> None:
    """Sample one token with as many log-probs as the run needs: a server has a limit, 20 by
    default.
    """
    try:
        await completions.sample(_PROBES[:1], SamplingSettings(max_tokens=1), top_logprobs)
    except RequestRefused as refused:
        if "logprobs" not in refused.told:
            raise
        raise MismatchError(
            f"The server does not return {top_logprobs} log-probs per token "
            f"({refused.told.rstrip('.')}). Start it with --max-logprobs {top_logprobs}, or use "
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
    return {
        name: value if may_hold(f"rollout.{name}", value) else None
        for name, value in settings.items()
    }


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
