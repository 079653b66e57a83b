"""The configuration of a recording: every field is a flag, and the manifest keeps it for
`--resume`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import flag_of
from mismatch_cli.base.places import BUNDLED_MODEL, is_bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.probe.engine_arguments import parsed_arguments
from mismatch_cli.probe.settings import (
    EQUAL,
    NEWER,
    ChoiceSettings,
    ProbeSettings,
    PromptSettings,
    RolloutSettings,
    SampleCount,
    SamplerSettings,
    ScoredSettings,
    ScorerSettings,
    ThreadSettings,
    of_prompts,
    of_sampling,
)

if TYPE_CHECKING:
    from mismatch_cli.models.engines import EngineSettings
    from mismatch_cli.probe.tasks.prompts import PromptSource

_RESPONSES_PER_SHARD = 256
_TOKENS_PER_SHARD = 2**20
_OF_TRACE: dict[str, Any] = {"show_default": "as the trace says"}


class RolloutConfig(RolloutSettings, SamplerSettings, PromptSettings):
    """Everything that decides what the engine samples."""

    samples_per_prompt: int
    top_logprobs: int = 0
    threads: int | None

    def __post_init__(self) -> None:
        from mismatch_cli.models.engines import engine_module

        super().__post_init__()
        for url in (
            known for known in fields(self) if known.name in ("engine_url", "served_model")
        ):
            if getattr(self, url.name) and not engine_module(self.engine).REMOTE:
                raise UsageError(
                    f"{flag_of(url)} needs --engine server. Add that, or leave {flag_of(url)} out."
                )
        self.to_json()  # raises for settings that contradict each other

    @property
    def prompt_source(self) -> PromptSource:
        """Where the problems come from."""
        from mismatch_cli.probe.tasks.prompts import PromptSource

        return PromptSource(
            location=self.prompts,
            prompt_field=self.prompt_field,
            answer_field=self.answer_field,
            split=self.split,
            config=self.subset,
            limit=self.num_prompts,
            columns=bool(self.reward),
            shuffle_seed=self.seed if self.shuffle else None,
        )

    @property
    def sampling(self) -> SamplingSettings:
        """What the sampler does."""
        return SamplingSettings(
            self.temperature, self.top_p, self.top_k, self.min_p, self.max_tokens
        )

    @property
    def engine_args(self) -> dict[str, Any]:
        """The engine's keyword arguments."""
        given = {argument: getattr(self, name) for name, argument in _ENGINE_ARGUMENTS.items()}
        from_flags = {name: value for name, value in given.items() if value is not None}
        return from_flags | parsed_arguments(self.engine_arg or ())

    def check_vocabulary(self, tokens: int) -> None:
        """A `UsageError` for more ranks than the vocabulary has tokens."""
        if self.top_logprobs > tokens:
            raise UsageError(
                f"--top-logprobs {self.top_logprobs} exceeds the vocabulary of {tokens} tokens. "
                "Use --top-logprobs 20."
            )

    def engine_settings(self, **unflagged: Any) -> EngineSettings:
        """The settings of the engine; `unflagged` are the fields that no flag sets."""
        from mismatch_cli.models.engines import EngineSettings

        return EngineSettings(
            model=self.model,
            sampling=self.sampling,
            top_logprobs=self.top_logprobs,
            dtype=self.rollout_dtype,
            seed=self.seed,
            extra=self.engine_args,
            adapter=self.engine_adapter,
            routes=self.wanted_routes,
            **unflagged,
        )

    @property
    def engine_adapter(self) -> str | None:
        """The LoRA adapter that the engine samples with."""
        return None

    @property
    def wanted_routes(self) -> bool | None:
        """Whether the engine reports the experts of each token; None: where that is free."""
        return False

    @property
    def name(self) -> str:
        """The name for its run folder: the model's."""
        return Path(self.model).name

    @property
    def prompts_per_shard(self) -> int:
        """Enough responses to fill an engine's batch, few enough to fit in memory and to afford
        losing.
        """
        responses = min(_RESPONSES_PER_SHARD, _TOKENS_PER_SHARD // self.max_tokens)
        return max(1, responses // self.samples_per_prompt)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        return {
            "model": self.model,
            "engine": self.engine,
            "prompts": asdict(self.prompt_source),
            "sampling": asdict(self.sampling),
            **self.named(
                "samples_per_prompt", "top_logprobs", "seed", "prompt_template", "rollout_dtype"
            ),
            "adapter": self.engine_adapter,
            "threads": self.threads,
            "engine_args": self.engine_args,
            **self.named("reward", "answer_format", "grader"),
        }


_ENGINE_ARGUMENTS = {
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel": "tensor_parallel_size",
    "eager": "enforce_eager",
    "prefix_caching": "enable_prefix_caching",
    "max_model_len": "max_model_len",
    "engine_url": "url",
    "served_model": "served_model",
}


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(
    RolloutConfig,
    ThreadSettings,
    ScorerSettings,
    ProbeSettings,
    RolloutSettings,
    SamplerSettings,
    SampleCount,
    PromptSettings,
):
    """Everything that decides what is in the trace of a probe."""

    def __post_init__(self) -> None:
        if self.adapter and (self.rollout_adapter or self.trainer_adapter):
            raise UsageError(
                "--adapter applies to both sides. Leave it out, or leave out --rollout-adapter "
                "and --trainer-adapter."
            )
        if self.replay_routes and self.routes is False:
            raise UsageError("--replay-routes needs the engine's routes. Leave out --no-routes.")
        super().__post_init__()

    @property
    def scorer(self) -> str:
        return self.trainer_model or self.model

    @property
    def scorer_adapter(self) -> str | None:
        return self.adapter or self.trainer_adapter

    @property
    def engine_adapter(self) -> str | None:
        return self.adapter or self.rollout_adapter

    @property
    def wanted_routes(self) -> bool | None:
        return True if self.replay_routes else self.routes

    def to_json(self) -> dict[str, Any]:
        added = self.named("full_divergence", "full_divergence_memory", "routes", "keep_routes")
        return super().to_json() | {"trainer": self.trainer_json()} | added


@dataclass(frozen=True, kw_only=True)
class CurateConfig(
    RolloutConfig, ThreadSettings, RolloutSettings, SamplerSettings, ChoiceSettings, PromptSettings
):
    """Everything that decides which problems `curate` keeps."""

    num_prompts: int | None = of_prompts(
        None, "Number of problems to sample.", min=1, show_default="all"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.keep
        if not 0 <= low <= high <= 1:
            raise UsageError(
                f"--keep {low:g} {high:g} is not a range of accuracies. Example: --keep 0.2 0.8"
            )

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | self.named("held_out_samples", "keep")


@dataclass(frozen=True, kw_only=True)
class RescoreConfig(ThreadSettings, ScorerSettings, ScoredSettings):
    """Everything that decides what is in a rescored trace."""

    temperature: float | None = of_sampling(
        None, "Sampling temperature of the responses.", **_OF_TRACE
    )
    top_p: float | None = of_sampling(None, "Top-p of the sampler; 1 if none.", **_OF_TRACE)
    top_k: int | None = of_sampling(None, "Top-k of the sampler; 0 if none.", **_OF_TRACE)
    min_p: float | None = of_sampling(None, "Min-p of the sampler; 0 if none.", **_OF_TRACE)

    def __post_init__(self) -> None:
        super().__post_init__()
        SamplingSettings(
            **{name: value for name, value in self.sampling.items() if value is not None}
        )

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Also finds the model that scores, from the trace; the bundled model scores the bundled
        traces only.
        """
        weights = flags["weights"]
        if weights not in (EQUAL, NEWER) and not weights.isdecimal():
            raise UsageError(
                f"--weights {weights} is invalid. Use {EQUAL}, {NEWER}, or a version such as 40."
            )
        return super().from_flags(
            flags if flags["trace"] is None else {**flags, **_scorer_of(flags)}
        )

    @property
    def scorer(self) -> str:
        return self.trainer_model

    @property
    def scorer_adapter(self) -> str | None:
        return self.trainer_adapter

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampler settings that were typed; None: as the trace says."""
        return self.named("temperature", "top_p", "top_k", "min_p")

    @property
    def name(self) -> str:
        """The name for its run folder: the trace's."""
        path = Path(self.trace).resolve()
        return path.parent.name if path.name == "trace" else path.name


def _scorer_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flag for the model that the trace names for these weights; none if --trainer-model is
    given.

    Raises a `UsageError` if the trace names none either, or an adapter, which has to be typed.
    """
    from mismatch_cli.probe.from_manifest import model_of, must_be_typed
    from mismatch_cli.trace.manifest import read_manifest, trace_folder

    if flags["trainer_model"] is not None:
        return {}
    folder = trace_folder(Path(flags["trace"]))
    manifest = read_manifest(folder)
    if is_bundled(folder) and manifest.get("config", {}).get("model") == BUNDLED_MODEL:
        return {}
    scorer = _named_scorer(manifest, flags["weights"])
    if scorer is None or scorer["model"] is None:
        raise UsageError(
            "The trace does not name the model to score with. Add --trainer-model, a folder or a "
            "hub name."
        )
    if scorer.get("adapter") and not flags.get("trainer_adapter"):
        merged = ["--merge-adapter"] * bool(scorer.get("adapter_merged"))
        raise must_be_typed(folder, ["--trainer-adapter", str(scorer["adapter"]), *merged])
    return {"trainer_model": model_of(scorer["model"], folder, "--trainer-model")}


def _named_scorer(manifest: Mapping[str, Any], weights: str) -> Mapping[str, Any] | None:
    """The section of the manifest whose `model` has these weights, with its adapter; None where
    that is uncertain.

    A training run names the model it started from, whose weights have moved on; a dump names none.
    """
    command = manifest.get("command")
    if command not in ("probe", "curate", "rescore"):
        return None
    equal = manifest.get("equal_weights")
    if weights == NEWER:
        found = manifest.get("trainer") if equal is False else None
    elif weights == EQUAL:
        found = manifest.get("recomputed") or (manifest.get("trainer") if equal else None)
        found = found or (None if command == "rescore" else _sampler(manifest))
    else:
        found = None
    return found


def _sampler(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The model that sampled, by the name that was typed: a server may have a different name for
    it.
    """
    config = manifest.get("config", {})
    rollout = manifest.get("rollout", {})
    adapter = {"adapter": config.get("adapter"), "adapter_merged": False}
    return (
        adapter | {"model": config["model"]}
        if rollout and isinstance(config.get("model"), str)
        else None
    )
