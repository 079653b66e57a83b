"""The configurations of what records, composed of the settings in `settings.py`; the manifest keeps
their values for `--resume`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import ADAPTER, DATA, override, setting, settings_group
from mismatch_cli.base.places import BUNDLED_MODEL, bundled, is_bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.base.values import Values, as_typed
from mismatch_cli.probe.engine_arguments import parsed_arguments
from mismatch_cli.probe.settings import (
    CpuSettings,
    PromptSettings,
    RecordingSettings,
    RolloutSettings,
    SamplerSettings,
    ScorerSettings,
    TaskSettings,
    of_engine,
    of_trainer,
)

if TYPE_CHECKING:
    from mismatch_cli.models.engines import EngineSettings
    from mismatch_cli.probe.tasks.prompts import PromptSource

EQUAL, NEWER = "equal", "newer"
RESPONSES_PER_SHARD = 256
_TOKENS_PER_SHARD = 2**20
_LATEST = 2**31 - 2  # version that a trace can hold, with the next one
_OF_TRACE = override(None, show_default="as the trace says")
_MODEL_ARGUMENT = override(argument=True, metavar=None)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(RecordingSettings):
    """Everything that decides what the engine samples."""

    problems: PromptSettings = settings_group(PromptSettings)
    task: TaskSettings = settings_group(TaskSettings)
    sampler: SamplerSettings = settings_group(SamplerSettings)
    engine: RolloutSettings = settings_group(
        RolloutSettings, without=["adapter"], model=_MODEL_ARGUMENT
    )
    cpu: CpuSettings = settings_group(CpuSettings)

    def __post_init__(self) -> None:
        from mismatch_cli.models.engines import engine_module

        of_servers = {"--engine-url": self.engine.url, "served_model": self.engine.served_model}
        for flag, value in of_servers.items():
            if value and not engine_module(self.engine.name).REMOTE:
                raise UsageError(f"{flag} needs --engine server. Add that, or leave {flag} out.")
        # Settings that contradict each other raise when the sampler is made of them.
        self.to_json()

    @property
    def prompt_source(self) -> PromptSource:
        """Where the problems come from."""
        from mismatch_cli.probe.tasks.prompts import PromptSource

        problems = self.problems
        return PromptSource(
            location=problems.source,
            prompt_field=problems.prompt_field,
            answer_field=problems.answer_field,
            split=problems.split,
            config=problems.subset,
            limit=problems.number,
            columns=bool(self.task.reward),
            shuffle_seed=self.sampler.seed if problems.shuffle else None,
        )

    @property
    def sampling(self) -> SamplingSettings:
        """What the sampler does."""
        return self.sampler.sampling

    @property
    def top_logprobs(self) -> int:
        """The ranks of μ that the engine reports per token."""
        return 0

    @property
    def engine_args(self) -> dict[str, Any]:
        """The engine's keyword arguments."""
        engine = self.engine
        named = {
            "kv_cache_dtype": engine.kv_cache_dtype,
            "tensor_parallel_size": engine.tensor_parallel if engine.tensor_parallel > 1 else None,
            "enforce_eager": engine.eager,
            "enable_prefix_caching": engine.prefix_caching,
            "max_model_len": engine.max_model_len,
            "url": engine.url,
            "served_model": engine.served_model,
        }
        arguments = {name: value for name, value in named.items() if value is not None}
        return arguments | parsed_arguments(engine.arguments or ())

    def check_vocabulary(self, tokens: int) -> None:
        """A `UsageError` for more ranks than the vocabulary has tokens."""
        if self.top_logprobs > tokens:
            raise UsageError(
                f"top_logprobs = {self.top_logprobs} exceeds the vocabulary of {tokens} tokens. "
                "Use top_logprobs = 20."
            )

    def engine_settings(self, **more: Any) -> EngineSettings:
        """The settings of the engine; `more` are those that are no setting of a command."""
        from mismatch_cli.models.engines import EngineSettings

        return EngineSettings(
            model=self.engine.model,
            sampling=self.sampling,
            top_logprobs=self.top_logprobs,
            dtype=self.engine.dtype,
            seed=self.sampler.seed,
            extra=self.engine_args,
            adapter=self.engine_adapter,
            routes=self.wanted_routes,
            **more,
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
        return Path(self.engine.model).name

    @property
    def prompts_per_shard(self) -> int:
        """Enough responses to fill an engine's batch, few enough to fit in memory and to afford
        losing.
        """
        responses = min(RESPONSES_PER_SHARD, _TOKENS_PER_SHARD // self.sampler.max_tokens)
        return max(1, responses // self.sampler.samples_per_prompt)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        return {
            "model": self.engine.model,
            "engine": self.engine.name,
            "prompts": asdict(self.prompt_source),
            "sampling": asdict(self.sampling),
            "samples_per_prompt": self.sampler.samples_per_prompt,
            "top_logprobs": self.top_logprobs,
            "seed": self.sampler.seed,
            "prompt_template": self.task.template,
            "rollout_dtype": self.engine.dtype,
            "adapter": self.engine_adapter,
            "threads": self.cpu.threads,
            "engine_args": self.engine_args,
            "reward": self.task.reward or "",
            "answer_format": self.task.answer_format,
            "grader": self.task.grader,
        }


@dataclass(frozen=True, kw_only=True)
class ExtraSettings:
    """What `probe` records beside samples and log π."""

    full_divergence: int = of_engine(
        0,
        "Record exact TV and KL of the first N responses; memory: `guide full-divergence`.",
        least=0,
        show_default="",
    )
    full_divergence_memory: float | None = of_engine(
        None,
        "Memory limit for that, in GiB.",
        flag=False,
        least=0,
        changeable=True,
        show_default="half of what is free",
    )
    top_logprobs: int = of_engine(
        20,
        "Ranks of μ to record, for top-K divergences.",
        flag=False,
        least=0,
    )
    routes: bool | None = of_engine(
        None,
        "MoE: record the engine's experts; vLLM needs a GPU and a prefix cache.",
        flag=False,
        off="--no-routes",
        show_default="where it is free: --engine hf",
    )
    keep_routes: int = of_engine(
        128,
        "Responses with full routes in the trace; `rescore --replay-routes` needs all.",
        flag=False,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(RolloutConfig):
    """Everything that decides what is in the trace of a probe."""

    engine: RolloutSettings = settings_group(RolloutSettings, model=_MODEL_ARGUMENT)
    scorer: ScorerSettings = settings_group(
        ScorerSettings,
        model=override(help="Also score with these weights: separates mismatch from staleness."),
    )
    adapter: str | None = of_trainer(
        None, "LoRA adapter for both sides: folder or hub name.", path=ADAPTER, metavar="ADAPTER"
    )
    extras: ExtraSettings = settings_group(ExtraSettings)

    def __post_init__(self) -> None:
        if self.adapter and (self.engine.adapter or self.scorer.adapter):
            raise UsageError(
                "--adapter applies to both sides. Leave it out, or leave out rollout_adapter "
                "and trainer_adapter."
            )
        if self.scorer.replay_routes and self.extras.routes is False:
            raise UsageError("--replay-routes needs the engine's routes. Leave out routes = false.")
        check_merged(self.scorer, self.scorer_adapter)
        super().__post_init__()

    @property
    def scoring_model(self) -> str:
        """The model that scores; if it differs from the one that sampled, both score."""
        return self.scorer.model or self.engine.model

    @property
    def scorer_adapter(self) -> str | None:
        """The LoRA adapter of the model that scores."""
        return self.adapter or self.scorer.adapter

    @property
    def engine_adapter(self) -> str | None:
        return self.adapter or self.engine.adapter

    @property
    def top_logprobs(self) -> int:
        return self.extras.top_logprobs

    @property
    def wanted_routes(self) -> bool | None:
        return self.scorer.replay_routes or self.extras.routes

    def to_json(self) -> dict[str, Any]:
        extras = self.extras
        return super().to_json() | {
            "trainer": trainer_json(self),
            "full_divergence": extras.full_divergence,
            "full_divergence_memory": extras.full_divergence_memory,
            "routes": extras.routes,
            "keep_routes": extras.keep_routes,
        }


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings:
    """Which problems `curate` keeps."""

    keep: tuple[float, float] = setting(
        (0.2, 0.8),
        "Accuracy of problems to keep.",
        changeable=True,
        metavar="LOW HIGH",
    )
    held_out_samples: int = setting(
        40,
        "More responses per kept problem, to measure it again.",
        flag=False,
        least=1,
    )
    confirm: bool = setting(
        False,
        "Drop problems with a held-out accuracy outside the range.",
        flag=False,
        changeable=True,
    )


@dataclass(frozen=True, kw_only=True)
class CurateConfig(RolloutConfig):
    """Everything that decides which problems `curate` keeps."""

    problems: PromptSettings = settings_group(
        PromptSettings, number=override(None, show_default="all")
    )
    sampler: SamplerSettings = settings_group(SamplerSettings, samples_per_prompt=override(40))
    choice: ChoiceSettings = settings_group(ChoiceSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.choice.keep
        if not 0 <= low <= high <= 1:
            raise UsageError(
                f"--keep {low:g} {high:g} is not a range of accuracies. Example: --keep 0.2 0.8"
            )

    def to_json(self) -> dict[str, Any]:
        chosen = {"held_out_samples": self.choice.held_out_samples, "keep": self.choice.keep}
        return super().to_json() | chosen


@dataclass(frozen=True, kw_only=True)
class RescoreConfig(RecordingSettings):
    """Everything that decides what is in a rescored trace."""

    trace: str = setting(
        lambda: str(bundled("traces") / "float32"),
        "Run or trace folder; it is only read.",
        argument=True,
        path=DATA,
        show_default="the bundled float32 trace",
    )
    scorer: ScorerSettings = settings_group(
        ScorerSettings,
        model=override(lambda: str(bundled("model")), show_default="the trace's own"),
        adapter=override(flag=True),
        merge_adapter=override(flag=True),
        attn=override(flag=True),
    )
    weights: str = setting(
        EQUAL,
        "Weights of --trainer-model: equal, those that sampled; newer, a later checkpoint; or "
        "their version in the trace, such as 40.",
        metavar="equal|newer|VERSION",
        numeric=True,
        completes=(EQUAL, NEWER),
    )
    keep_trainer: bool = setting(
        False,
        "Keep the trace's trainer, and add log π at the weights that sampled.",
    )
    sampler: Any = settings_group(  # what the responses were sampled with
        SamplerSettings,
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        temperature=_OF_TRACE,
        top_p=_OF_TRACE,
        top_k=_OF_TRACE,
        min_p=_OF_TRACE,
    )
    cpu: CpuSettings = settings_group(CpuSettings)

    def __post_init__(self) -> None:
        is_version = self.weights.isdecimal() and int(self.weights) <= _LATEST
        if self.weights not in (EQUAL, NEWER) and not is_version:
            raise UsageError(
                f"--weights {self.weights} is invalid. Use {EQUAL}, {NEWER}, or a version such "
                "as 40."
            )
        check_merged(self.scorer, self.scorer_adapter)
        SamplingSettings(**self.sampler.stated)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Also finds the model that scores, from the trace; the bundled model scores the bundled
        traces only.
        """
        values = Values.of(values)
        return super().of(values.over(_scorer_of(values)) if "trace" in values else values)

    @property
    def scoring_model(self) -> str:
        """The model that scores."""
        return str(self.scorer.model)

    @property
    def scorer_adapter(self) -> str | None:
        """The LoRA adapter of the model that scores."""
        return self.scorer.adapter

    @property
    def name(self) -> str:
        """The name for its run folder: the trace's."""
        path = Path(self.trace).resolve()
        return path.parent.name if path.name == "trace" else path.name


def suggest_probe(*words: str | Path) -> str:
    """A `mismatch-cli probe` of these words; settings that have no flag are variables before it."""
    variables, typed = as_typed(ProbeConfig, words)
    return " ".join([*variables, suggest("probe", *typed)])


def check_merged(scorer: ScorerSettings, adapter: str | None) -> None:
    """A `UsageError` for merge_adapter without an adapter."""
    if scorer.merge_adapter and not adapter:
        raise UsageError(
            "merge_adapter needs an adapter of the trainer to merge. Name one, or leave it out."
        )


def trainer_json(config: ProbeConfig | RescoreConfig) -> dict[str, Any]:
    """How the trainer scores, as the manifest records it."""
    scorer = config.scorer
    return {
        "model": config.scoring_model,
        "dtype": scorer.dtype,
        "adapter": config.scorer_adapter,
        "merge_adapter": scorer.merge_adapter,
        "attn_implementation": scorer.attn,
        "float32_head": scorer.float32_head,
        "device_map": scorer.device_map,
        "token_budget": scorer.token_budget,
        "noise_responses": scorer.noise_responses,
    }


def _scorer_of(values: Values) -> dict[str, Any]:
    """The setting for the model that the trace names for these weights; none if --trainer-model is
    given.

    Raises a `UsageError` if the trace names none either, or an adapter, which has to be typed.
    """
    from mismatch_cli.probe.from_manifest import model_of, must_be_typed
    from mismatch_cli.trace.manifest import read_manifest, trace_folder

    if "trainer_model" in values:
        return {}
    folder = trace_folder(Path(values["trace"]))
    manifest = read_manifest(folder)
    if is_bundled(folder) and manifest.get("config", {}).get("model") == BUNDLED_MODEL:
        return {}
    scorer = _named_scorer(manifest, values.get("weights", EQUAL))
    if scorer is None or scorer["model"] is None:
        raise UsageError(
            "The trace does not name the model to score with. Add --trainer-model, a folder or a "
            "hub name."
        )
    if scorer.get("adapter") and not values.get("trainer_adapter"):
        to_type = ["--trainer-adapter", str(scorer["adapter"])]
        if scorer.get("adapter_merged"):
            to_type.append("--merge-adapter")
        raise must_be_typed(folder, to_type)
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
        return manifest.get("trainer") if equal is False else None
    if weights != EQUAL:
        return None
    scorer = manifest.get("recomputed")
    if not scorer and equal:
        scorer = manifest.get("trainer")
    # A rescored trace has the configuration of its source, whose model may not be what sampled.
    if not scorer and command != "rescore":
        scorer = _sampler(manifest)
    return scorer or None


def _sampler(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The model that sampled, by the name that was typed: a server may have a different name for
    it.
    """
    config = manifest.get("config", {})
    model = config.get("model")
    if not manifest.get("rollout") or not isinstance(model, str):
        return None
    return {"model": model, "adapter": config.get("adapter"), "adapter_merged": False}
