"""Settings of one trace that are known to cause gaps, likeliest first, each with the commands that
test it.

A suspect is not a finding: only a measurement of the same prompts without it shows how much of the
gap it causes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import suggest
from mismatch_cli.base.places import BUNDLED_MODEL, bundled, shorten_paths
from mismatch_cli.limits.causes import CAUSES, cause_rank, settings_below
from mismatch_cli.limits.manifest_sides import family
from mismatch_cli.models.torch_settings import SIXTEEN_BITS, sends_rounded

MODEL = "MODEL"  # placeholder in a command for a model that the manifest does not name
# Commands whose traces are of a run that somebody trained elsewhere
_OF_RUNS = ("record", "import")
# Commands whose traces name the model that scored them, so that `rescore` needs no flag for it
_OF_SCORERS = ("probe", "curate", "rescore")
# What only a trace shows, not its manifest
_OF_WEIGHTS = ("equal_weights", "rollout.model", "trainer.rounded_weights")
_FULL_SUPPORT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
# Formats that only a cache has
_LOW = re.compile(r"(fp|int|float|nvfp|mxfp|turboquant)_?\d", re.IGNORECASE)


@dataclass(frozen=True)
class Suspect:
    """A setting known to cause gaps: why, where that was reported and how large, what to set
    instead, the test.
    """

    setting: str  # as `compare` names it
    value: Any
    why: str
    source: str
    seen: str  # how large the gap was elsewhere; empty if nobody says
    change: str  # what to set instead, as a clause
    test: tuple[str, ...]  # command lines, in order

    def to_json(self) -> dict[str, Any]:
        """An entry of `suspects` in a JSON document."""
        return asdict(self) | {"test": list(self.test)}


def suspects(
    manifest: Mapping[str, Any],
    trace: str = "",
    pair: str = "mismatch",
    cleared: Collection[str] = (),
) -> tuple[Suspect, ...]:
    """The settings of a trace that are known to cause gaps, in the order of `causes.CAUSES`.

    `manifest` is a trace's, or part of one; `trace` is its path as typed, empty if there is none.
    `pair` is the gap in question: in `total` the weights differ. `cleared` names settings that a
    test has cleared.
    """
    settings = _Settings(manifest, trace, pair)
    rule_of: dict[str, _Rule] = {}
    for rule in _RULES:
        # One rule per setting: the first that applies.
        is_decided = rule.setting in cleared or rule.setting in rule_of
        if not is_decided and rule.shows(settings):
            rule_of[rule.setting] = rule
    return tuple(rule_of[setting].suspect(settings) for setting in sorted(rule_of, key=_rank))


def unrecorded_suspects(manifest: Mapping[str, Any], pair: str = "mismatch") -> tuple[Suspect, ...]:
    """Settings that a manifest does not name and that have caused gaps elsewhere, in the same
    order, without tests.
    """
    settings = _Settings(manifest, "", pair)
    # A cause that is a suspect already, by another of its settings, is not named again.
    shown_ranks = {_rank(suspect.setting) for suspect in suspects(manifest, pair=pair)}
    rule_of: dict[int, _Rule] = {}
    for rule in _RULES:
        rank = _rank(rule.setting)
        if rank not in shown_ranks and settings.lacks(rule.setting):
            rule_of.setdefault(rank, rule)
    unrecorded = []
    for rank in sorted(rule_of):
        suspect = rule_of[rank].suspect(settings)
        unrecorded.append(replace(suspect, value=None, test=()))
    return tuple(unrecorded)


def _rank(setting: str) -> int:
    return cause_rank(setting) or len(CAUSES)


class _Settings:
    """A manifest's settings by canonical name, None for one that it lacks.

    `trainer` is the one at the weights that sampled, if the manifest has it.
    """

    def __init__(self, manifest: Mapping[str, Any], trace: str, pair: str) -> None:
        self.manifest = manifest
        self.trace = trace
        self.pair = pair
        sections = {
            "rollout": manifest.get("rollout"),
            "trainer": manifest.get("recomputed") or manifest.get("trainer"),
            "config": manifest.get("config"),
        }
        self._values: dict[str, Any] = {}
        for name, content in sections.items():
            for setting, value in settings_below(name, content or {}):
                # What was resolved comes before what was requested, in `config`.
                self._values.setdefault(setting, value)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def lacks(self, name: str) -> bool:
        """Whether the manifest omits a setting that matters; never for which weights there are,
        which only a trace shows.
        """
        # At full support and temperature 1, raw and processed log-probabilities are the same.
        is_processed_raw = self["config.sampling.temperature"] == 1 and not self.truncates
        if name == "rollout.logprobs_mode" and is_processed_raw:
            return False
        return name not in _OF_WEIGHTS and self[name] is None

    @property
    def engine_args(self) -> Mapping[str, Any]:
        """The arguments of the engine as they were requested."""
        return self.manifest.get("config", {}).get("engine_args") or {}

    @property
    def truncates(self) -> bool:
        """Whether the engine samples from fewer tokens than the vocabulary has."""
        return any(
            self[f"config.sampling.{name}"] not in (None, off, -1)
            for name, off in _FULL_SUPPORT.items()
        )

    @property
    def temperature(self) -> float:
        temperature = self["config.sampling.temperature"]
        return 1.0 if temperature is None else float(temperature)

    @property
    def model(self) -> tuple[str, ...]:
        """The model that sampled, as you type it: nothing for the bundled one."""
        name = str(self["rollout.model"] or self["trainer.model"] or MODEL)
        if name in (BUNDLED_MODEL, str(bundled("model"))):
            return ()
        return (str(shorten_paths(name)),)

    @property
    def scorer(self) -> tuple[str, ...]:
        """The model with the weights that sampled, as you type it: a run that trains has moved on
        from the one that it names.
        """
        if self.was_trained or self.manifest.get("command") in _OF_RUNS:
            return (MODEL,)
        return self.model

    @property
    def can_be_repeated(self) -> bool:
        """Whether `probe --like` can repeat the sampling of this trace."""
        return (
            bool(self.trace)
            and self.manifest.get("command", "probe") == "probe"
            and "flags" in self.manifest
        )

    @property
    def was_trained(self) -> bool:
        """Whether the trace is from a training run, in which weights are sent to the engine."""
        return "training" in self.manifest or self.manifest.get("command") == "train"

    @property
    def is_served(self) -> bool:
        return bool(self["rollout.engine"] == "server")


@dataclass(frozen=True)
class _Rule:
    """When a setting is a suspect, what to set instead, and the flags that do so.

    `probe` holds flags to sample again with, `as_it_is` flags that repeat the present settings,
    `rescore` flags to score the same tokens again with; without any of them the test is `diagnose`
    on the trace as it is.
    """

    setting: str
    shows: Callable[[_Settings], bool]
    change: str
    probe: tuple[str, ...] = ()
    as_it_is: Callable[[Any], tuple[str, ...]] = lambda _: ()
    rescore: Callable[[_Settings], tuple[str, ...]] | None = None
    value: Callable[[_Settings], Any] | None = None

    def suspect(self, settings: _Settings) -> Suspect:
        """The suspect that the setting is, with the commands that test it."""
        cause = CAUSES[_rank(self.setting) - 1]
        value = settings[self.setting]
        if self.value is not None:
            value = self.value(settings)
        return Suspect(
            self.setting,
            shorten_paths(value),
            cause.why,
            cause.source,
            cause.seen,
            self.change,
            self._test(settings, value),
        )

    def _test(self, settings: _Settings, value: Any) -> tuple[str, ...]:
        if self.rescore is not None:
            flags = self.rescore(settings)
            if settings.trace:
                return _test_by_scoring(settings, flags)
            # Without a trace, new runs take the flags. Their `--trainer-model` scores in addition
            # to the weights that sampled, which tests nothing here.
            return () if "--trainer-model" in flags else _test_by_sampling(settings, flags)
        if self.probe:
            return _test_by_sampling(settings, self.probe, self.as_it_is(value))
        return (suggest("diagnose", settings.trace),) if settings.trace else ()


def _test_by_scoring(settings: _Settings, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Commands that score the trace again with these flags, and compare."""
    model: tuple[str, ...] = ()
    names_scorer = settings.manifest.get("command") in _OF_SCORERS
    if settings.scorer and not names_scorer and "--trainer-model" not in flags:
        model = ("--trainer-model", *settings.scorer)
    folder = _folder(flags)
    return (
        suggest("rescore", Path(settings.trace), *model, *flags, "--output", folder),
        suggest("compare", Path(settings.trace), folder),
    )


def _test_by_sampling(
    settings: _Settings, flags: tuple[str, ...], as_it_is: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Commands that sample again with these flags, and compare.

    Where the first run cannot be repeated, they also sample with the flags `as_it_is`.
    """
    # Reading a trace must not pay for the settings of a probe
    from mismatch_cli.probe.config import suggest_probe

    folder = _folder(flags)
    # A server's settings are changed on the server, not by flags.
    if settings.is_served:
        flags = ()
    if settings.can_be_repeated:
        probe = suggest_probe("--like", Path(settings.trace), *flags, "--output", folder)
        return probe, suggest("compare", Path(settings.trace), folder)
    model = settings.model
    return (
        suggest_probe(*model, *_with_dtypes(settings, as_it_is), "--output", "as-it-is"),
        suggest_probe(*model, *_with_dtypes(settings, flags), "--output", folder),
        suggest("compare", "as-it-is", folder),
    )


def _with_dtypes(settings: _Settings, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags, after those for the recorded dtypes that they do not set: a run of its own would
    take the checkpoint's.
    """
    recorded: list[str] = []
    for policy in ("rollout", "trainer"):
        flag = f"--{policy}-dtype"
        dtype = settings[f"{policy}.dtype"]
        if dtype and flag not in flags:
            recorded += [flag, str(dtype)]
    return (*recorded, *flags)


def _folder(flags: tuple[str, ...]) -> str:
    """A name for a run folder, from flags: `kv-auto`, `float32`, `max-num-seqs-1`."""
    names = " ".join(Path(flag).name.lower() for flag in flags)
    words = [word for word in re.findall(r"[a-z0-9]+", names) if word not in _FILLERS]
    return "-".join(dict.fromkeys(words)) or "other"


def _flag(name: str) -> Callable[[Any], tuple[str, ...]]:
    return lambda value: (name, str(value))


def _argument(name: str, value: str) -> tuple[str, str]:
    return "--engine-arg", f"{name}={value}"


def _bundled_model() -> tuple[str, ...]:
    """The bundled model, as a path relative to the working folder where that is possible."""
    return (str(shorten_paths(str(bundled("model")))),)


def _low_cache(s: _Settings) -> bool:
    """Whether the cache has a coarser type than 16 bits, and not simply that of the weights."""
    cache = str(s["rollout.kv_cache_dtype"] or "")
    if cache in ("", "auto", s["rollout.dtype"], "float32", *SIXTEEN_BITS):
        return False
    return bool(_LOW.search(cache))


def _on_gpu(s: _Settings) -> bool:
    return s["rollout.engine"] == "vllm" and s["rollout.device"] not in (None, "cpu")


def _adapters_differ(s: _Settings) -> bool:
    """Whether each side has another adapter, by its numbers, although their weights should be
    equal.
    """
    digests = {s["rollout.adapter_digest"], s["trainer.adapter_digest"]}
    return len(digests) > 1 and None not in digests and s.pair != "total" and not s.was_trained


def _dtypes(s: _Settings) -> tuple[Any, Any]:
    return s["rollout.dtype"], s["trainer.dtype"]


# Left out of folder names
_FILLERS = ("engine", "arg", "cache", "dtype", "rollout", "trainer", "enable", "disable")
_FLOAT32 = ("--rollout-dtype", "float32", "--trainer-dtype", "float32")
_SIXTEEN = ("--rollout-dtype", "bfloat16", "--trainer-dtype", "bfloat16")
# fmt: off
_RULES = (
    _Rule("rollout.logprobs_mode",
          lambda s: str(s["rollout.logprobs_mode"]).startswith("raw")
          and (s.temperature != 1 or s.truncates),
          "processed_logprobs",
          ("--temperature", "1", "--top-p", "1", "--top-k", "0", "--min-p", "0")),
    _Rule("config.sampling.temperature",
          lambda s: s.temperature != 1 and s["rollout.logprobs_mode"] is None,
          "the sampling temperature on both sides"),
    _Rule("config.sampling.top_p", lambda s: s.truncates,
          "full support: top-p 1, top-k off, min-p 0",
          ("--top-p", "1", "--top-k", "0", "--min-p", "0"),
          value=lambda s: {name: s[f"config.sampling.{name}"] for name in ("top_p", "top_k",
                                                                           "min_p")}),
    _Rule("rollout.adapter", lambda s: bool(s["rollout.adapter"])
          and (not s["trainer.adapter"] or _adapters_differ(s)),
          "the adapter on both sides",
          rescore=lambda s: ("--trainer-adapter", str(shorten_paths(s["rollout.adapter"])))),
    _Rule("trainer.adapter", lambda s: bool(s["trainer.adapter"]) and bool(s["rollout.engine"])
          and not s["rollout.adapter"],
          "the adapter on both sides, or on neither",
          rescore=lambda s: ("--trainer-model", *(s.scorer or (MODEL,)))),
    _Rule("equal_weights", lambda s: s.pair == "total", "log π at the weights that sampled",
          rescore=lambda s: ("--trainer-model", *(s.scorer or _bundled_model()), "--keep-trainer"),
          value=lambda _: False),
    _Rule("rollout.quantization", lambda s: bool(s.engine_args.get("quantization")),
          "unquantised weights",
          _argument("quantization", "null"), lambda value: _argument("quantization", str(value))),
    _Rule("rollout.quantization", lambda s: bool(s["rollout.quantization"]),
          "an unquantised checkpoint",
          (), rescore=None),
    _Rule("rollout.kv_cache_dtype", _low_cache, "auto: a cache in the dtype of the weights",
          ("--kv-cache-dtype", "auto"), _flag("--kv-cache-dtype")),
    _Rule("rollout.num_experts",
          lambda s: s["trainer.routes"] == "own" and bool(s["rollout.router_layers"])
          and set(_dtypes(s)) & set(SIXTEEN_BITS) != set(),
          "the rollout's routes in the trainer (routing replay)", ("--replay-routes",)),
    _Rule("rollout.num_experts",
          lambda s: family(s.manifest) == "moe" and s["trainer.routes"] != "replayed"
          and set(_dtypes(s)) & set(SIXTEEN_BITS) != set(),
          "the rollout's routes in the trainer (routing replay); float32 shows what flips cause",
          _FLOAT32,
          lambda _: _SIXTEEN,
          value=lambda s: s["rollout.num_experts"] or s["trainer.num_experts"] or "moe"),
    _Rule("trainer.rounded_weights",
          lambda s: s.was_trained and sends_rounded(s["trainer.dtype"], s["rollout.dtype"]),
          "the trainer's dtype in the engine, or log π with rounded weights",
          rescore=lambda s: ("--trainer-dtype", str(s["rollout.dtype"])),
          value=lambda s: s["rollout.dtype"]),
    _Rule("trainer.dtype", lambda s: None not in _dtypes(s) and len(set(_dtypes(s))) > 1,
          "one dtype on both sides",
          rescore=lambda s: ("--trainer-dtype", str(s["rollout.dtype"]))),
    _Rule("rollout.dtype", lambda s: s["rollout.dtype"] in SIXTEEN_BITS,
          "float32 on both sides, or float16",
          _FLOAT32, lambda value: ("--rollout-dtype", str(value), "--trainer-dtype", str(value))),
    _Rule("trainer.head_dtype",
          lambda s: s["trainer.head_dtype"] in SIXTEEN_BITS and s["rollout.engine"] == "vllm",
          "a float32 LM head on both sides",
          ("--float32-head", *_argument("hf_overrides", '{"head_dtype": "float32"}'))),
    _Rule("trainer.head_dtype", lambda s: s["trainer.head_dtype"] in SIXTEEN_BITS,
          "a float32 LM head on both sides",
          rescore=lambda _: ("--float32-head",)),
    _Rule("trainer.attn_implementation", lambda s: bool(s["trainer.attention_leaves_out"]),
          "eager attention",
          rescore=lambda _: ("--attn", "eager")),
    _Rule("rollout.hf_overrides", lambda s: "rope" in str(s.engine_args.get("hf_overrides")),
          "the same RoPE on both sides", _argument("hf_overrides", "null"),
          value=lambda s: str(s.engine_args.get("hf_overrides"))),
    _Rule("rollout.cascade_attention",
          lambda s: bool(s["rollout.cascade_attention"]) and _on_gpu(s),
          "no cascade attention", _argument("disable_cascade_attn", "true")),
    _Rule("rollout.attention_backend", lambda s: bool(s["rollout.attention_backend"]) and _on_gpu(s)
          and s["rollout.attention_backend"] != "TRITON_ATTN",
          "a different attention backend", _argument("attention_backend", "TRITON_ATTN"),
          lambda value: _argument("attention_backend", str(value))),
    _Rule("rollout.prefix_caching", lambda s: bool(s["rollout.prefix_caching"])
          and s.was_trained,
          "a prefix cache reset after every update"),
    _Rule("rollout.speculative_config", lambda s: bool(s.engine_args.get("speculative_config")),
          "no speculative decoding", _argument("speculative_config", "null"),
          value=lambda s: str(s.engine_args.get("speculative_config"))),
    _Rule("rollout.chunked_prefill", lambda s: bool(s["rollout.chunked_prefill"]),
          "prefill in one pass",
          _argument("enable_chunked_prefill", "false"),
          lambda _: _argument("enable_chunked_prefill", "true")),
    _Rule("rollout.enforce_eager", lambda s: s["rollout.enforce_eager"] is False,
          "no graphs, no compilation",
          _argument("enforce_eager", "true"), lambda _: _argument("enforce_eager", "false")),
    _Rule("trainer.adapter_merged",
          lambda s: bool(s["trainer.adapter_merged"]) and s["trainer.dtype"] in SIXTEEN_BITS,
          "an unmerged adapter", rescore=lambda _: ("--no-merge-adapter",)),
    _Rule("rollout.tensor_parallel_size", lambda s: (s["rollout.tensor_parallel_size"] or 1) > 1,
          "one GPU",
          ("--tensor-parallel", "1"), _flag("--tensor-parallel")),
    _Rule("rollout.max_num_seqs", lambda s: (s["rollout.max_num_seqs"] or 1) > 1 and _on_gpu(s),
          "one response at a time, or batch-invariant kernels (VLLM_BATCH_INVARIANT=1)",
          _argument("max_num_seqs", "1"), lambda value: _argument("max_num_seqs", str(value))),
    _Rule("rollout.model",
          lambda s: s.pair != "total" and bool(s["rollout.model"] and s["trainer.model"])
          and Path(str(s["rollout.model"])).name != Path(str(s["trainer.model"])).name,
          "the weights that sampled, in the trainer as well",
          rescore=lambda s: ("--trainer-model", *(s.scorer or (MODEL,)))),
)
# fmt: on
