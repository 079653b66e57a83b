"""Both sides of a trace as they can be started again: settings from the manifest and the flags, and changes to them.

A change is a JSON-serialisable dictionary: it names a leg, is saved in its manifest, and combines with other changes.
To the rollout: `dtype`, `engine_args` (None removes one; `hf_overrides` key by key), `environment`, and how it reads:
`prefill`, `alone`, `cached`. To the trainer: fields of `RescoreConfig`, fields of the sampler, `tensors` and
`model_config` taken from the engine's model, and `other_shape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mismatch_cli.bisect.experiments import Change
from mismatch_cli.bisect.search_config import BisectConfig
from mismatch_cli.engines import EngineSettings
from mismatch_cli.errors import UsageError, suggest
from mismatch_cli.places import BUNDLED_MODEL, bundled
from mismatch_cli.recording.config import RescoreConfig, parsed_arguments
from mismatch_cli.sampling import SamplingSettings

_SAMPLER = ("temperature", "top_p", "top_k", "min_p")
_ASKED = ("prefill", "alone", "cached")  # how to ask an engine that needs no restart
_TOLD_ARGUMENTS = ("kv_cache_dtype", "quantization")  # that a manifest without engine arguments still has


def combined(*changes: Change) -> dict[str, Any]:
    """All changes merged, nested dictionaries too; a later value wins."""
    found: dict[str, Any] = {}
    for change in changes:
        for name, value in change.items():
            both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
            found[name] = combined(found[name], value) if both else value
    return found


def restarts(change: Change) -> bool:
    """Whether it needs a restart of the engine."""
    return any(name not in _ASKED for name in change)


def engine_part(change: Change) -> dict[str, Any]:
    """The part of a rollout change that needs an engine of its own."""
    return {name: value for name, value in change.items() if name not in _ASKED}


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
    told: Mapping[str, Any] = field(default_factory=dict)  # the manifest's section

    @classmethod
    def of(cls, manifest: Mapping[str, Any], config: BisectConfig) -> RolloutSide:
        """From the manifest, overridden by flags; a `UsageError` if neither names a model and an engine."""
        told, recorded = manifest.get("rollout", {}), manifest.get("config", {})
        model = config.model or _local(recorded.get("model") or told.get("model"))
        sampled = recorded.get("engine") or told.get("engine")
        engine = config.engine or sampled
        if not model or not engine:
            missing = "--model and --engine" if not (model or engine) else "--model" if not model else "--engine"
            raise UsageError(
                f"{config.trace} does not say what sampled it. Name it with {missing}, or check only its columns: "
                f"{suggest('diagnose', config.trace)}"
            )
        if engine != sampled:  # settings of another engine do not apply
            told, recorded = {}, {**recorded, "engine_args": {}}
        arguments = dict(recorded.get("engine_args") or {})
        for name in _TOLD_ARGUMENTS:
            if told.get(name) not in (None, "auto", told.get("dtype")):
                arguments.setdefault(name, told[name])
        if config.engine_url:
            arguments["url"] = config.engine_url
        arguments |= parsed_arguments(config.engine_arg or ())
        sampling = SamplingSettings(**(recorded.get("sampling") or {}))
        dtype = config.rollout_dtype or manifest.get("rollout", {}).get("dtype") or "auto"
        adapter = config.rollout_adapter or recorded.get("adapter")
        return cls(engine, model, dtype, arguments, adapter, sampling, int(recorded.get("seed") or 0), told)

    def settings(self, change: Change, **more: Any) -> EngineSettings:
        """The settings to start the engine with."""
        arguments = _without_none(combined(self.arguments, change.get("engine_args", {})))
        dtype, routes = change.get("dtype", self.dtype), False
        return EngineSettings(self.model, self.sampling, 0, dtype, self.seed, extra=arguments, adapter=self.adapter,
                              routes=routes, replays=True, **more)  # fmt: skip

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The overrides of the model's configuration that the engine was given."""
        found = self.arguments.get("hf_overrides")
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class TrainerSide:
    """The trainer of a trace."""

    config: RescoreConfig
    sampling: SamplingSettings
    told: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Mapping[str, Any], config: BisectConfig, rollout: RolloutSide) -> TrainerSide:
        """From the manifest, overridden by flags."""
        told = manifest.get("trainer") or manifest.get("recomputed") or {}
        model = config.trainer_model or _local(told.get("model")) or rollout.model
        named = config.trainer_model or told.get("model")  # a known trainer has the adapter recorded for it
        adapter = config.trainer_adapter or told.get("adapter") or (None if named else rollout.adapter)
        dtype = config.trainer_dtype or told.get("dtype") or "auto"
        sampler = {name: told[name] for name in _SAMPLER if told.get(name) is not None}
        scoring = RescoreConfig(
            trace=config.trace,
            trainer_model=model,
            trainer_adapter=adapter,
            merge_adapter=bool(adapter and told.get("adapter_merged")),
            trainer_dtype=dtype,
            attn=config.attn or told.get("attn_implementation"),
            float32_head=told.get("head_dtype") == "float32" and dtype != "float32",
            replay_routes=told.get("routes") == "replayed",
            device_map=config.device_map,
            token_budget=config.token_budget,
            threads=config.threads,
            noise_responses=0,
        )
        return cls(scoring, replace(rollout.sampling, **sampler), told)

    def changed(self, change: Change) -> TrainerSide:
        """A copy with fields of its configuration or sampler replaced."""
        sampler = {name: value for name, value in change.items() if name in _SAMPLER}
        known = {name: value for name, value in change.items() if name in RescoreConfig.__dataclass_fields__}
        known = {name: value for name, value in known.items() if name not in sampler}
        return replace(self, config=replace(self.config, **known), sampling=replace(self.sampling, **sampler))


def _local(model: str | None) -> str | None:
    """The model that a manifest names; for the bundled traces, the bundled model."""
    return str(bundled("model")) if model == BUNDLED_MODEL else model


def _without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in arguments.items():
        kept = _without_none(value) if isinstance(value, Mapping) else value
        if kept is not None and kept != {}:
            found[name] = kept
    return found
