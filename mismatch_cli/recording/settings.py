"""The flags of `probe`, `curate` and `rescore`: one dataclass for each subject, composed into configurations."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from mismatch_cli import registry
from mismatch_cli.errors import UsageError
from mismatch_cli.options import build, check, setting
from mismatch_cli.places import bundled
from mismatch_cli.torch_settings import DTYPES

EQUAL, NEWER = "equal", "newer"
_DTYPE: dict[str, Any] = {"choices": ("dtype", DTYPES)}
of_prompts, of_sampling, of_choice = (partial(setting, panel=title) for title in ("Prompts", "Sampling", "Choice"))
of_engine, of_trainer, of_weights = (
    partial(setting, panel=title) for title in ("Rollout engine", "Trainer", "Weights")
)


def _engine_names() -> list[str]:
    return registry.names("mismatch_cli.engines")


def _templates() -> tuple[str, ...]:
    from mismatch_cli.tasks.prompts import TEMPLATES

    return TEMPLATES


class Recorded:
    """What the configurations of all commands that record have in common."""

    def __post_init__(self) -> None:
        check(self, typed=True)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """The configuration that flags, as typed or as recorded, amount to; a `UsageError` for what makes no sense."""
        return build(cls, flags)

    def named(self, *names: str) -> dict[str, Any]:
        """These settings by name."""
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class PromptSettings(Recorded):
    """The model, and the problems that it gets."""

    model: str = setting(
        lambda: str(bundled("model")),
        "Model folder or hub name; without one, the bundled model.",
        argument=True,
        path=True,
    )
    prompts: str = of_prompts(
        lambda: str(bundled("problems.jsonl")),
        "A .jsonl, .json, .parquet or .csv file, or a data set on the hub.",
        path=True,
    )
    prompt_field: str | None = of_prompts(None, "Field that holds the prompt.")
    answer_field: str | None = of_prompts(None, "Field that holds the answer.")
    split: str = of_prompts("train", "Split of a hub data set.")
    subset: str | None = of_prompts(None, "Configuration of a hub data set.")
    num_prompts: int | None = of_prompts(64, "How many prompts to take.", min=1)
    shuffle: bool = of_prompts(False, "Take them in an order shuffled by --seed.")
    prompt_template: str = of_prompts(
        "chat", "How a problem is put: chat, raw, or r1-distill.", choices=("template", _templates)
    )
    reward: str = of_prompts(str, "A reward of your own, path/to/file.py:function, in place of math-verify.")


@dataclass(frozen=True, kw_only=True)
class SampleCount(Recorded):
    """How often each problem is sampled."""

    samples_per_prompt: int = of_sampling(8, "Responses per prompt.", least=1)


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings(Recorded):
    """Which problems `curate` keeps."""

    keep: tuple[float, float] = of_choice((0.2, 0.8), "Keep problems from this accuracy to that.", changeable=True)
    samples_per_prompt: int = of_choice(40, "Responses that decide about a problem.", least=1)
    held_out_samples: int = of_choice(40, "Other responses that measure the kept ones again.", least=1)


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(Recorded):
    """What the sampler does."""

    max_tokens: int = of_sampling(256, "Longest response.")
    temperature: float = of_sampling(1.0, "Above 0.")
    top_p: float = of_sampling(1.0, "Nucleus; 1 = off.")
    top_k: int = of_sampling(0, "The sampler's top-k; 0 = off.")
    min_p: float = of_sampling(0.0, "0 = off.")
    seed: int = of_sampling(0, "Seed of sampling and shuffling.", min=0, max=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Recorded):
    """What samples."""

    engine: str = of_engine("vllm", "vllm, hf, or server: a vLLM server by its URL.", choices=("engine", _engine_names))
    engine_url: str | None = of_engine(
        None, "The server, such as http://localhost:8000; key: VLLM_API_KEY.", changeable=True
    )
    served_model: str | None = of_engine(None, "MODEL's name on the server, if it differs.")
    rollout_dtype: str = of_engine("auto", "auto, float32, bfloat16 or float16.", **_DTYPE)
    kv_cache_dtype: str | None = of_engine(None, "Such as fp8; a strong source of mismatch.")
    tensor_parallel: int | None = of_engine(None, "GPUs to shard over.", min=1)
    eager: bool | None = of_engine(None, "Without or with compilation and CUDA graphs.", "--eager/--compiled")
    prefix_caching: bool | None = of_engine(
        None, "Share the prompts' KV cache.", "--prefix-caching/--no-prefix-caching"
    )
    max_model_len: int | None = of_engine(None, "Context of the engine.", min=2)
    engine_arg: list[str] | None = of_engine(None, "Any other engine setting, as key=value.")  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(Recorded):
    """What `probe` records beyond the samples, and with which weights."""

    top_logprobs: int = of_engine(20, "Ranks of μ recorded per token, for the top-K divergences.", least=0)
    full_divergence: int = of_engine(
        0,
        "Also the exact TV and KL over the whole vocabulary, on the first N responses. For one at a time vllm takes "
        "132 bytes × vocabulary × --max-tokens of memory, hf only one token's.",
        min=0,
    )
    full_divergence_memory: float | None = of_engine(
        None, "GiB for it; by default half of what is free.", min=0, changeable=True
    )
    trainer_model: str | None = of_trainer(
        None, "Score with other weights too: mismatch and staleness apart.", path=True
    )
    adapter: str | None = setting(None, "A LoRA adapter on both sides: folder or hub name.", path=True)
    rollout_adapter: str | None = of_engine(None, "A LoRA adapter on the engine alone.", path=True)


@dataclass(frozen=True, kw_only=True)
class ScoredSettings(Recorded):
    """What `rescore` scores, and with which weights."""

    trace: str = setting(
        lambda: str(bundled("traces") / "float32"),
        "Run folder or trace folder, only read; without one, the bundled float32 trace.",
        argument=True,
        path=True,
    )
    trainer_model: str = of_trainer(
        lambda: str(bundled("model")),
        "The model that scores: a folder or a hub name; by default the trace's own.",
        path=True,
    )
    weights: str = of_weights(
        EQUAL,
        "What it holds: equal, the weights that sampled; newer, a checkpoint from after them; or the version of its "
        "weights as the trace counts, such as 40.",
    )
    keep_trainer: bool = of_weights(
        False, "Keep the trace's trainer, which has later weights, and fill in log π at the weights that sampled."
    )


@dataclass(frozen=True, kw_only=True)
class ScorerSettings(Recorded):
    """How the trainer scores."""

    trainer_adapter: str | None = of_trainer(
        None, "A LoRA adapter on the trainer alone: folder or hub name.", path=True
    )
    merge_adapter: bool = of_trainer(
        False,
        "Add the trainer's adapter to its weights, which rounds in their dtype, or run it beside them.",
        "--merge-adapter/--no-merge-adapter",
    )
    trainer_dtype: str = of_trainer("auto", "auto, float32, bfloat16 or float16.", **_DTYPE)
    attn: str | None = of_trainer(None, "sdpa, eager, flash_attention_2, …")
    float32_head: bool = of_trainer(False, "The LM head in float32.")
    device_map: str | None = of_trainer(None, "Such as auto, cuda:1, cpu.", changeable=True)
    token_budget: int = of_trainer(8192, "Tokens per scoring micro-batch.", least=1, changeable=True)
    noise_responses: int = of_trainer(
        128, "Responses scored twice to measure the noise; 0 = none.", least=0, changeable=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_adapter and not self.scorer_adapter:
            raise UsageError("--merge-adapter needs an adapter to merge. Name one with --trainer-adapter.")

    @property
    def scorer(self) -> str:
        """The model that scores; where it is another than the one that sampled, it does so at both weights."""
        raise NotImplementedError

    @property
    def scorer_adapter(self) -> str | None:
        """The LoRA adapter on it."""
        raise NotImplementedError

    def trainer_json(self) -> dict[str, Any]:
        """How the trainer scores, as the manifest has it."""
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
    """How much of the machine is used."""

    threads: int | None = setting(
        None, "CPU threads; by default 1 for a small model, else all.", min=1, changeable=True
    )
