"""Both sides of a trace as they can be started again: settings from the manifest and the flags, and
changes to them.

A change is a JSON-serialisable dictionary: it names a leg, is saved in its manifest, and combines
with other changes. To the rollout: `dtype`, `engine_args` (None removes one; `hf_overrides` key by
key), `environment`, and how it reads: `prefill`, `alone`, `cached`. To the trainer: fields of
`RescoreConfig`, fields of the sampler, `tensors` and `model_config` taken from the engine's model,
`rounded_to` (a dtype for its weights), and `other_shape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import replace_settings
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.bisect.experiments import Change
from mismatch_cli.bisect.search_config import BisectConfig
from mismatch_cli.models.engines import EngineSettings, engine_module
from mismatch_cli.probe.config import RescoreConfig
from mismatch_cli.probe.engine_arguments import parsed_arguments
from mismatch_cli.probe.from_manifest import (
    adapter_of,
    attention_of,
    dtype_of,
    engine_arguments,
    engine_of,
    model_of,
    must_be_typed,
    sampler_of,
)
from mismatch_cli.probe.settings import ScorerSettings

SAMPLER = ("temperature", "top_p", "top_k", "min_p")
# Of the trainer, by the rules of `toggles`
_TURNED = ("trainer_dtype", "float32_head", "attn", "merge_adapter")
_HOW_IT_READS = ("prefill", "alone", "cached")  # changes that need no restart of the engine
# What an engine says of itself even where a manifest has no engine arguments
_DESCRIBED_ARGUMENTS = ("kv_cache_dtype", "quantization")


def combined(*changes: Change) -> dict[str, Any]:
    """All changes merged, nested dictionaries too; a later value wins."""
    merged: dict[str, Any] = {}
    for change in changes:
        for name, value in change.items():
            earlier = merged.get(name)
            if isinstance(value, Mapping) and isinstance(earlier, Mapping):
                value = combined(earlier, value)
            merged[name] = value
    return merged


def restarts(change: Change) -> bool:
    """Whether a change to the rollout needs a restart of the engine."""
    return bool(engine_part(change))


def engine_part(change: Change) -> dict[str, Any]:
    """The part of a rollout change that needs an engine of its own."""
    return {name: value for name, value in change.items() if name not in _HOW_IT_READS}


@dataclass(frozen=True)
class RolloutSide:
    """The engine of a trace."""

    engine: str
    model: str
    dtype: str
    arguments: Mapping[str, Any]
    adapter: str | None
    sampling: SamplingSettings
    seed: int
    described: Mapping[str, Any] = field(default_factory=dict)  # by itself, in the manifest

    @classmethod
    def of(cls, manifest: Mapping[str, Any], config: BisectConfig) -> RolloutSide:
        """From the manifest, overridden by flags; a `UsageError` if neither names a model and an
        engine.

        The manifest may be somebody else's: `from_manifest` says what is taken from it.
        """
        source = Path(config.trace)
        described, recorded = manifest.get("rollout", {}), manifest.get("config", {})
        engine, model = _engine_and_model(described, recorded, config)
        own, own_arguments = described, recorded.get("engine_args") or {}
        # Sampler, seed and dtype hold for another engine too; the rest is the sampling engine's.
        if engine != (recorded.get("engine") or described.get("engine")):
            own, own_arguments = {}, {}
        arguments = _arguments(own, own_arguments, config)
        adapter = adapter_of(
            config.engine.adapter, recorded.get("adapter"), source, "rollout_adapter"
        )
        if engine_module(engine).REMOTE and not config.engine.url:
            url = str(own_arguments.get("url", "URL"))
            raise must_be_typed(source, ["--engine-url", url])
        sampling = SamplingSettings(**sampler_of(recorded.get("sampling")))
        dtype = config.engine.dtype or dtype_of(described, source)
        seed = int(recorded.get("seed") or 0)
        return cls(engine, model, dtype, arguments, adapter, sampling, seed, own)

    def settings(self, change: Change, **more: Any) -> EngineSettings:
        """The settings to start the engine with."""
        changed = change.get("engine_args", {})
        # A resumed search reads its changes from its folder, which may be somebody else's.
        engine_arguments(changed, (), Path("the search"))
        return EngineSettings(
            self.model,
            self.sampling,
            0,
            change.get("dtype", self.dtype),
            self.seed,
            extra=_without_none(combined(self.arguments, changed)),
            adapter=self.adapter,
            routes=False,
            replays=True,
            **more,
        )

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The overrides of the model's configuration that the engine was started with."""
        overrides = self.arguments.get("hf_overrides")
        return overrides if isinstance(overrides, Mapping) else {}


def _engine_and_model(
    described: Mapping[str, Any], recorded: Mapping[str, Any], config: BisectConfig
) -> tuple[str, str]:
    """As typed, or as recorded and checked; a `UsageError` if neither names them."""
    source = Path(config.trace)
    model: Any = config.engine.model or recorded.get("model") or described.get("model")
    engine: Any = config.engine.name or recorded.get("engine") or described.get("engine")
    missing = [flag for flag, name in (("--model", model), ("--engine", engine)) if not name]
    if missing:
        raise UsageError(
            f"{config.trace} does not say what sampled it. Name it with {' and '.join(missing)}, "
            f"or check only its columns: {suggest('diagnose', config.trace)}"
        )
    if not config.engine.name:
        engine = engine_of(engine, source)
    if not config.engine.model:
        model = model_of(model, source, "--model")
    return engine, model


def _arguments(
    described: Mapping[str, Any], recorded: Mapping[str, Any], config: BisectConfig
) -> dict[str, Any]:
    """The arguments to start the engine with: those typed, then recorded, then described."""
    typed = parsed_arguments(config.engine.arguments or ())
    arguments = {}
    for name in _DESCRIBED_ARGUMENTS:
        # A cache of the engine's own dtype is what it has without the argument.
        if described.get(name) not in (None, "auto", described.get("dtype")):
            arguments[name] = described[name]
    arguments |= recorded
    arguments = engine_arguments(arguments, typed, Path(config.trace)) | typed
    if config.engine.url:
        arguments["url"] = config.engine.url
    return arguments


@dataclass(frozen=True)
class TrainerSide:
    """The trainer of a trace."""

    config: RescoreConfig
    sampling: SamplingSettings
    described: Mapping[str, Any] = field(default_factory=dict)  # by itself, in the manifest

    @classmethod
    def of(
        cls, manifest: Mapping[str, Any], config: BisectConfig, rollout: RolloutSide
    ) -> TrainerSide:
        """From the manifest, overridden by flags."""
        source = Path(config.trace)
        described = manifest.get("trainer") or manifest.get("recomputed") or {}
        model = config.scorer.model or rollout.model
        if not config.scorer.model and described.get("model"):
            model = model_of(described["model"], source, "--trainer-model")
        adapter = _trainer_adapter(described, config, rollout)
        dtype = config.scorer.dtype or dtype_of(described, source)
        sampler = sampler_of(described)
        scorer = ScorerSettings(
            model=model,
            adapter=adapter,
            merge_adapter=bool(adapter and described.get("adapter_merged")),
            dtype=dtype,
            attn=config.scorer.attn or attention_of(described, source),
            float32_head=described.get("head_dtype") == "float32" and dtype != "float32",
            replay_routes=described.get("routes") == "replayed",
            device_map=config.scorer.device_map,
            token_budget=config.scorer.token_budget,
            noise_responses=0,
        )
        scoring = RescoreConfig(trace=config.trace, scorer=scorer, cpu=config.cpu)
        return cls(scoring, replace(rollout.sampling, **sampler), described)

    def changed(self, change: Change) -> TrainerSide:
        """A copy with fields of its configuration or sampler replaced.

        A resumed search reads changes from its folder: no other field is taken from there.
        """
        settings = {name: value for name, value in change.items() if name in _TURNED}
        sampler = {name: value for name, value in change.items() if name in SAMPLER}
        config = replace_settings(self.config, **settings)
        return replace(self, config=config, sampling=replace(self.sampling, **sampler))


def _trainer_adapter(
    described: Mapping[str, Any], config: BisectConfig, rollout: RolloutSide
) -> str | None:
    source = Path(config.trace)
    typed = adapter_of(config.scorer.adapter, described.get("adapter"), source, "trainer_adapter")
    # A trainer without a model of its own has the rollout's, with its adapter.
    if not (typed or config.scorer.model or described.get("model")):
        return rollout.adapter
    return typed or None


def _without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without None and without dictionaries that this leaves empty."""
    result = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            value = _without_none(value)
        if value is not None and value != {}:
            result[name] = value
    return result
