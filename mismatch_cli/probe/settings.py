"""The flags of `probe`, `curate` and `rescore`: one dataclass per subject, composed into
configurations.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import ADAPTER, DATA, MODEL, build, check, setting
from mismatch_cli.base.places import bundled
from mismatch_cli.models import attention
from mismatch_cli.models.engines import engine_names
from mismatch_cli.models.torch_settings import DTYPES, KV_CACHE_DTYPES
from mismatch_cli.probe.engine_arguments import unlisted_arguments
from mismatch_cli.probe.tasks import named_rewards
from mismatch_cli.probe.tasks.answers import (
    FORMAT_HELP,
    FORMATS,
    GRADER_HELP,
    GRADERS,
    SECONDS_HELP,
    VERL_RULE,
)
from mismatch_cli.probe.tasks.prompts import A_FIELD, TEMPLATE_HELP, TEMPLATES
from mismatch_cli.probe.tasks.rewards import is_own
from mismatch_cli.trace.manifest import FILE_NAME, read_manifest

EQUAL, NEWER = "equal", "newer"
_DTYPE: dict[str, Any] = {"choices": ("dtype", DTYPES)}
of_prompts, of_sampling, of_choice = (
    partial(setting, panel=title) for title in ("Prompts", "Sampling", "Choice")
)
of_engine, of_trainer, of_weights = (
    partial(setting, panel=title) for title in ("Rollout engine", "Trainer", "Weights")
)


@dataclass(frozen=True, kw_only=True)
class Recorded(ABC):
    """What the configurations of all commands that record have in common."""

    NOTE: ClassVar[str] = f"trace/{FILE_NAME}"  # the file that makes a folder one to resume

    @staticmethod
    def read_note(folder: Path) -> dict[str, Any]:
        """What that file says of the run, its flags among it; a `MismatchError` if it is
        damaged.
        """
        return read_manifest(folder / "trace")

    @property
    @abstractmethod
    def name(self) -> str:
        """What the run folder is named after."""

    def __post_init__(self) -> None:
        check(self, typed=True)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """The configuration for these flags, as typed or as recorded; a `UsageError` for invalid
        ones.
        """
        return build(cls, flags)

    def named(self, *names: str) -> dict[str, Any]:
        """These settings by name."""
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class PromptSettings(Recorded):
    """The model and the problems it gets."""

    model: str = setting(
        lambda: str(bundled("model")),
        "Model folder or hub name.",
        argument=True,
        path=MODEL,
        show_default="the bundled model",
    )
    prompts: str = of_prompts(
        lambda: str(bundled("problems.jsonl")),
        "A .jsonl, .json, .parquet or .csv file, or a data set on the hub.",
        path=DATA,
        metavar="FILE|NAME",
        show_default="the bundled problems",
    )
    prompt_field: str | None = of_prompts(None, "Field with the prompt.", **A_FIELD)
    answer_field: str | None = of_prompts(None, "Field with the answer.", **A_FIELD)
    split: str = of_prompts("train", "Split of a data set on the hub.", metavar="NAME")
    subset: str | None = of_prompts(None, "Configuration of a data set on the hub.", metavar="NAME")
    num_prompts: int | None = of_prompts(64, "Number of prompts to use.", min=1)
    shuffle: bool = of_prompts(False, "Shuffle the prompts with --seed before choosing.")
    prompt_template: str = of_prompts("chat", TEMPLATE_HELP, choices=("template", TEMPLATES))
    reward: str = of_prompts(
        str,
        "A reward of the package (rare-opener, right-and-rare) or your own function instead of "
        "math-verify.",
        metavar="NAME|FILE.py:FUNCTION",
        completes=named_rewards.names,
        typed=is_own,
    )
    reward_seconds: int = of_prompts(0, SECONDS_HELP, min=0, changeable=True)
    answer_format: str = of_prompts("auto", FORMAT_HELP, choices=("answer format", FORMATS))
    grader: str = of_prompts(VERL_RULE, GRADER_HELP, flag=False, choices=("grader", GRADERS))


@dataclass(frozen=True, kw_only=True)
class SampleCount(Recorded):
    """How often each problem is sampled."""

    samples_per_prompt: int = of_sampling(8, "Responses per prompt.", least=1)


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings(Recorded):
    """Which problems `curate` keeps."""

    keep: tuple[float, float] = of_choice(
        (0.2, 0.8),
        "Keep problems with an accuracy in this range.",
        changeable=True,
        metavar="LOW HIGH",
    )
    samples_per_prompt: int = of_choice(
        40, "Responses per problem that decide whether it is kept.", least=1
    )
    held_out_samples: int = of_choice(
        40, "More responses per kept problem, to measure its accuracy again.", least=1
    )


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(Recorded):
    """What the sampler does."""

    max_tokens: int = of_sampling(256, "Maximum response length, in tokens.")
    temperature: float = of_sampling(1.0, "Sampling temperature, above 0.")
    top_p: float = of_sampling(1.0, "Nucleus sampling (top-p); 1 turns it off.")
    top_k: int = of_sampling(0, "Top-k sampling; 0 turns it off.")
    min_p: float = of_sampling(0.0, "Min-p sampling; 0 turns it off.")
    seed: int = of_sampling(0, "Seed for sampling and shuffling.", min=0, max=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Recorded):
    """The rollout engine."""

    engine: str = of_engine(
        "vllm",
        "Rollout engine: Hugging Face, a running vLLM server, or vLLM.",
        choices=("engine", engine_names),
    )
    engine_url: str | None = of_engine(
        None,
        "The server, such as http://localhost:8000; its API key is read from VLLM_API_KEY.",
        changeable=True,
        metavar="URL",
        typed=True,
    )
    served_model: str | None = of_engine(
        None, "The model's name on the server, if it differs.", metavar="NAME"
    )
    rollout_dtype: str = of_engine(
        "auto", "Dtype of the engine; auto: the checkpoint's own.", **_DTYPE
    )
    kv_cache_dtype: str | None = of_engine(
        None,
        "Dtype of the KV cache; fp8 causes a large mismatch.",
        metavar="DTYPE",
        completes=KV_CACHE_DTYPES,
    )
    tensor_parallel: int | None = of_engine(None, "GPUs to shard the engine over.", min=1)
    eager: bool | None = of_engine(
        None, "Run without, or with, compilation and CUDA graphs.", "--eager/--compiled"
    )
    prefix_caching: bool | None = of_engine(
        None, "Whether prompts share their KV cache.", "--prefix-caching/--no-prefix-caching"
    )
    max_model_len: int | None = of_engine(None, "Context length of the engine.", min=2)
    engine_arg: list[str] | None = of_engine(  # noqa: RUF009
        None, "Any other engine setting. Repeatable.", metavar="KEY=VALUE", typed=unlisted_arguments
    )


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(Recorded):
    """What `probe` records beyond the samples, and with which weights."""

    top_logprobs: int = of_engine(
        20, "Ranks of μ to record per token, for the top-K divergences.", least=0
    )
    full_divergence: int = of_engine(
        0,
        "Record exact full-vocabulary TV and KL for the first N responses. Memory per response: "
        "vllm 132 bytes × vocabulary × --max-tokens; hf that of one token.",
        min=0,
    )
    full_divergence_memory: float | None = of_engine(
        None,
        "Memory limit for that, in GiB.",
        min=0,
        changeable=True,
        show_default="half of what is free",
    )
    trainer_model: str | None = of_trainer(
        None,
        "Also score with these weights, to separate mismatch from staleness.",
        path=MODEL,
        metavar="MODEL",
    )
    adapter: str | None = setting(
        None, "LoRA adapter for both sides: folder or hub name.", path=ADAPTER, metavar="ADAPTER"
    )
    rollout_adapter: str | None = of_engine(
        None, "LoRA adapter for the engine only.", path=ADAPTER, metavar="ADAPTER"
    )
    routes: bool | None = of_engine(
        None,
        "Mixture of experts: record which experts the engine chose. vLLM needs a GPU and a "
        "prefix cache for that.",
        "--routes/--no-routes",
        show_default="where it is free: --engine hf",
    )
    keep_routes: int = of_engine(
        128,
        "Responses whose full routes stay in the trace; `rescore --replay-routes` needs all.",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class ScoredSettings(Recorded):
    """What `rescore` scores, and with which weights."""

    trace: str = setting(
        lambda: str(bundled("traces") / "float32"),
        "Run or trace folder; it is only read.",
        argument=True,
        path=DATA,
        show_default="the bundled float32 trace",
    )
    trainer_model: str = of_trainer(
        lambda: str(bundled("model")),
        "Model to score with: folder or hub name.",
        path=MODEL,
        metavar="MODEL",
        show_default="the trace's own",
    )
    weights: str = of_weights(
        EQUAL,
        "Weights of --trainer-model: equal, those that sampled; newer, a later checkpoint; or "
        "their version in the trace, such as 40.",
        metavar="equal|newer|VERSION",
        completes=(EQUAL, NEWER),
    )
    keep_trainer: bool = of_weights(
        False,
        "Keep the trace's trainer, which has later weights, and add log π at the weights that "
        "sampled.",
    )


@dataclass(frozen=True, kw_only=True)
class ScorerSettings(Recorded):
    """How the trainer scores."""

    trainer_adapter: str | None = of_trainer(
        None,
        "LoRA adapter for the trainer only: folder or hub name.",
        path=ADAPTER,
        metavar="ADAPTER",
    )
    merge_adapter: bool = of_trainer(
        False,
        "Merge the trainer's adapter into its weights, which rounds to their dtype, or apply it "
        "separately.",
        "--merge-adapter/--no-merge-adapter",
    )
    trainer_dtype: str = of_trainer(
        "auto", "Dtype of the trainer; auto: the checkpoint's own.", **_DTYPE
    )
    attn: str | None = of_trainer(
        None,
        "Attention implementation of the trainer, such as sdpa, eager or flash_attention_2.",
        metavar="NAME",
        completes=attention.USUAL,
    )
    float32_head: bool = of_trainer(False, "Compute the LM head in float32.")
    replay_routes: bool = of_trainer(
        False,
        "Route each token to the experts that the engine chose (R3), where the trace has them.",
    )
    device_map: str | None = of_trainer(
        None,
        "Device of the trainer, such as auto, cuda:1 or cpu.",
        changeable=True,
        metavar="DEVICE",
        completes=("auto", "cpu", "cuda"),
    )
    token_budget: int = of_trainer(8192, "Tokens to score at once.", least=1, changeable=True)
    noise_responses: int | None = of_trainer(
        None,
        "Responses to score twice, to measure the noise floor; 0 for none.",
        least=0,
        changeable=True,
        show_default="a fifth, 16 to 128",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_adapter and not self.scorer_adapter:
            raise UsageError(
                "--merge-adapter needs an adapter to merge. Name one with --trainer-adapter."
            )

    @property
    def scorer(self) -> str:
        """The model that scores; if it differs from the one that sampled, both score."""
        raise NotImplementedError

    @property
    def scorer_adapter(self) -> str | None:
        """Its LoRA adapter."""
        raise NotImplementedError

    def trainer_json(self) -> dict[str, Any]:
        """How the trainer scores, as the manifest records it."""
        return {
            "model": self.scorer,
            "dtype": self.trainer_dtype,
            "adapter": self.scorer_adapter,
            "merge_adapter": self.merge_adapter,
            "attn_implementation": self.attn,
            **self.named("float32_head", "device_map", "token_budget", "noise_responses"),
        }


@dataclass(frozen=True, kw_only=True)
class ThreadSettings(Recorded):
    """How much of the machine to use."""

    threads: int | None = setting(
        None, "CPU threads.", min=1, changeable=True, show_default="1 for a small model, else all"
    )
