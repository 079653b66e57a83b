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

_SAMPLER = ("temperature", "top_p", "top_k", "min_p")
# Of the trainer, by the rules of `toggles`
_TURNED = ("trainer_dtype", "float32_head", "attn", "merge_adapter")
_ASKED = ("prefill", "alone", "cached")  # how to ask an engine that needs no restart
# That a manifest without engine arguments still has
_TOLD_ARGUMENTS = ("kv_cache_dtype", "quantization")


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
        """From the manifest, overridden by flags; a `UsageError` if neither names a model and an
        engine.

        The manifest may be somebody else's: `from_manifest` says what is taken from it.
        """
        told, recorded, source = (
            manifest.get("rollout", {}),
            manifest.get("config", {}),
            Path(config.trace),
        )
        model = config.engine.model or recorded.get("model") or told.get("model")
        sampled = recorded.get("engine") or told.get("engine")
        engine = config.engine.name or sampled
        if not model or not engine:
            missing = (
                "--model and --engine"
                if not (model or engine)
                else "--model"
                if not model
                else "--engine"
            )
            raise UsageError(
                f"{config.trace} does not say what sampled it. Name it with {missing}, or check "
                f"only its columns: {suggest('diagnose', config.trace)}"
            )
        if not config.engine.name:
            engine = engine_of(sampled, source)
        if engine != sampled:  # settings of another engine do not apply
            told, recorded = {}, {**recorded, "engine_args": {}}
        if not config.engine.model:
            model = model_of(model, source, "--model")
        typed = parsed_arguments(config.engine.arguments or ())
        resolved = {
            name: told[name]
            for name in _TOLD_ARGUMENTS
            if told.get(name) not in (None, "auto", told.get("dtype"))
        }
        arguments = (
            engine_arguments(resolved | dict(recorded.get("engine_args") or {}), typed, source)
            | typed
        )
        if config.engine.url:
            arguments["url"] = config.engine.url
        adapter = adapter_of(
            config.engine.adapter, recorded.get("adapter"), source, "rollout_adapter"
        )
        if engine_module(engine).REMOTE and not config.engine.url:
            url = (recorded.get("engine_args") or {}).get("url", "URL")
            raise must_be_typed(source, ["--engine-url", str(url)])
        sampling = SamplingSettings(**sampler_of(recorded.get("sampling")))
        dtype = config.engine.dtype or dtype_of(manifest.get("rollout", {}), source)
        seed = int(recorded.get("seed") or 0)
        return cls(engine, model, dtype, arguments, adapter, sampling, seed, told)

    def settings(self, change: Change, **more: Any) -> EngineSettings:
        """The settings to start the engine with."""
        changed = change.get("engine_args", {})  # of a resumed search: read from its folder
        engine_arguments(changed, (), Path("the search"))
        arguments = _without_none(combined(self.arguments, changed))
        dtype, routes = change.get("dtype", self.dtype), False
        return EngineSettings(
            self.model,
            self.sampling,
            0,
            dtype,
            self.seed,
            extra=arguments,
            adapter=self.adapter,
            routes=routes,
            replays=True,
            **more,
        )

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
    def of(
        cls, manifest: Mapping[str, Any], config: BisectConfig, rollout: RolloutSide
    ) -> TrainerSide:
        """From the manifest, overridden by flags."""
        told, source = (
            manifest.get("trainer") or manifest.get("recomputed") or {},
            Path(config.trace),
        )
        model = config.scorer.model or rollout.model
        if not config.scorer.model and told.get("model"):
            model = model_of(told["model"], source, "--trainer-model")
        typed = adapter_of(config.scorer.adapter, told.get("adapter"), source, "trainer_adapter")
        # A known trainer has the adapter recorded for it
        named = config.scorer.model or told.get("model")
        adapter = typed or (None if named else rollout.adapter)
        dtype = config.scorer.dtype or dtype_of(told, source)
        sampler = sampler_of(told)
        scorer = ScorerSettings(
            model=model,
            adapter=adapter,
            merge_adapter=bool(adapter and told.get("adapter_merged")),
            dtype=dtype,
            attn=config.scorer.attn or attention_of(told, source),
            float32_head=told.get("head_dtype") == "float32" and dtype != "float32",
            replay_routes=told.get("routes") == "replayed",
            device_map=config.scorer.device_map,
            token_budget=config.scorer.token_budget,
            noise_responses=0,
        )
        scoring = RescoreConfig(trace=config.trace, scorer=scorer, cpu=config.cpu)
        return cls(scoring, replace(rollout.sampling, **sampler), told)

    def changed(self, change: Change) -> TrainerSide:
        """A copy with fields of its configuration or sampler replaced.

        A resumed search reads changes from its folder: no other field is taken from there.
        """
        sampler = {name: value for name, value in change.items() if name in _SAMPLER}
        known = {name: value for name, value in change.items() if name in _TURNED}
        return replace(
            self,
            config=replace_settings(self.config, **known),
            sampling=replace(self.sampling, **sampler),
        )


def _without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in arguments.items():
        kept = _without_none(value) if isinstance(value, Mapping) else value
        if kept is not None and kept != {}:
            found[name] = kept
    return found
