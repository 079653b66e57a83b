"""The settings of what samples and what scores, each declared once, as the parts of which the
configurations of `probe`, `curate`, `rescore`, `bisect` and `train` are composed.

In a command that reads a trace, what is unset here is as the trace says: its configuration then has
None, whatever the type says that a recording needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Self

from mismatch_cli.base.options import (
    ADAPTER,
    BELOW_1,
    DATA,
    MODEL,
    UP_TO_1,
    of_running,
    setting,
)
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.base.values import Values
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

_DTYPE: dict[str, Any] = {"choices": ("dtype", DTYPES)}
_TEMPERATURE: dict[str, Any] = {
    "valid": lambda value: 0 < value < inf,
    "wanted": "a number above 0: greedy decoding has no sampling distribution to compare",
}
_ADAPTER: dict[str, Any] = {"path": ADAPTER, "metavar": "ADAPTER"}
of_prompts = partial(setting, panel="Prompts")
of_sampling = partial(setting, panel="Sampling")
of_engine = partial(setting, panel="Rollout engine")
of_trainer = partial(setting, panel="Trainer")


@dataclass(frozen=True, kw_only=True)
class ProblemSettings:
    """How problems are read from a file or data set."""

    prompt_field: str | None = of_prompts(None, "Field with the prompt.", flag=False, **A_FIELD)
    answer_field: str | None = of_prompts(None, "Field with the answer.", flag=False, **A_FIELD)
    split: str = of_prompts("train", "Hub data set's split.", flag=False, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class PromptSettings(ProblemSettings):
    """The prompts that are sampled once."""

    source: str = of_prompts(
        lambda: str(bundled("problems.jsonl")),
        "A .jsonl, .json, .parquet or .csv file, or a hub data set.",
        key="prompts",
        path=DATA,
        metavar="FILE|NAME",
        show_default="the bundled problems",
    )
    number: int | None = of_prompts(64, "Prompts to use.", key="num_prompts", least=1)
    subset: str | None = of_prompts(
        None, "Hub data set's configuration.", flag=False, metavar="NAME"
    )
    shuffle: bool = of_prompts(False, "Shuffle prompts (--seed) before choosing.", flag=False)


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How a problem is posed, and what gives a response its reward."""

    template: str = of_prompts(
        "chat", TEMPLATE_HELP, key="prompt_template", choices=("template", TEMPLATES)
    )
    reward: str | None = of_prompts(
        None,
        "rare-opener, right-and-rare or your FILE.py:FUNCTION.",
        metavar="REWARD",
        completes=named_rewards.names,
        typed=is_own,
        show_default="math-verify",
    )
    seconds: int | None = of_prompts(
        None,
        SECONDS_HELP,
        key="reward_seconds",
        flag=False,
        least=0,
        nothing=0,
        changeable=True,
    )
    answer_format: str = of_prompts(
        "auto", FORMAT_HELP, flag=False, choices=("answer format", FORMATS)
    )
    grader: str = of_prompts(VERL_RULE, GRADER_HELP, flag=False, choices=("grader", GRADERS))


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """What the sampler does, and how often."""

    samples_per_prompt: int = of_sampling(8, "Responses per prompt.", least=1)
    max_tokens: int = of_sampling(256, "Maximum tokens per response.", least=1)
    temperature: float = of_sampling(1.0, "Sampling temperature.", **_TEMPERATURE)
    seed: int = of_sampling(0, "Seed for sampling and shuffling.", least=0, most=2**32 - 1)
    top_p: float = of_sampling(1.0, "Top-p of the sampler; 1: off.", flag=False, **UP_TO_1)
    top_k: int = of_sampling(0, "Top-k of the sampler; 0: off.", flag=False, least=0)
    min_p: float = of_sampling(0.0, "Min-p of the sampler; 0: off.", flag=False, **BELOW_1)

    @property
    def stated(self) -> dict[str, Any]:
        """What the sampler does to the logits, as far as it is set; a trace may say the rest."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def sampling(self) -> SamplingSettings:
        """What the sampler does to the logits; a `UsageError` for what cannot be measured."""
        return SamplingSettings(
            self.temperature, self.top_p, self.top_k, self.min_p, self.max_tokens
        )


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The rollout engine, with the model that it samples from."""

    model: str = setting(
        lambda: str(bundled("model")),
        "Model folder or hub name.",
        path=MODEL,
        metavar="MODEL",
        show_default="the bundled one",
    )
    name: str = of_engine(
        "vllm",
        "vLLM, a running vLLM server, or Hugging Face.",
        key="engine",
        choices=("engine", engine_names),
    )
    url: str | None = of_engine(
        None,
        "vLLM servers, separated by commas; VLLM_API_KEY is their key.",
        key="engine_url",
        changeable=True,
        metavar="URL",
        typed=True,
    )
    served_model: str | None = of_engine(
        None, "Model's name on the server, if different.", flag=False, metavar="NAME"
    )
    dtype: str = of_engine(
        "auto", "Its dtype; auto: the checkpoint's.", key="rollout_dtype", **_DTYPE
    )
    adapter: str | None = of_engine(
        None,
        "The engine's LoRA adapter: folder or hub name.",
        key="rollout_adapter",
        flag=False,
        **_ADAPTER,
    )
    kv_cache_dtype: str | None = of_engine(
        None,
        "Dtype of the KV cache; fp8 makes large gaps.",
        metavar="DTYPE",
        completes=KV_CACHE_DTYPES,
        nothing="auto",
        show_default="auto",
    )
    tensor_parallel: int = of_engine(1, "Ranks that share one engine.", least=1)
    eager: bool | None = of_engine(
        None, "Without compilation and CUDA graphs.", flag=False, off="--compiled"
    )
    prefix_caching: bool | None = of_engine(
        None, "Prompts share their KV cache.", flag=False, off="--no-prefix-caching"
    )
    max_model_len: int | None = of_engine(
        None, "Context length of the engine.", flag=False, least=2
    )
    arguments: list[str] | None = of_engine(
        None,
        "Any other engine setting. Repeatable.",
        key="engine_arg",
        metavar="KEY=VALUE",
        typed=unlisted_arguments,
    )


@dataclass(frozen=True, kw_only=True)
class ScorerSettings:
    """How the trainer scores, and with which weights."""

    model: str | None = of_trainer(
        None,
        "The trainer's model: folder or hub name.",
        key="trainer_model",
        path=MODEL,
        metavar="MODEL",
    )
    dtype: str = of_trainer(
        "auto",
        "Its dtype; auto: the checkpoint's.",
        key="trainer_dtype",
        **_DTYPE,
    )
    adapter: str | None = of_trainer(
        None,
        "The trainer's LoRA adapter: folder or hub name.",
        key="trainer_adapter",
        flag=False,
        **_ADAPTER,
    )
    merge_adapter: bool = of_trainer(
        False,
        "Merge the trainer's adapter into its weights, which rounds to their dtype, or apply it "
        "separately.",
        flag=False,
        off="--no-merge-adapter",
    )
    attn: str | None = of_trainer(
        None,
        "Trainer's attention, such as sdpa, eager or flash_attention_2.",
        flag=False,
        metavar="NAME",
        completes=attention.USUAL,
        show_default="one that the model supports",
    )
    float32_head: bool = of_trainer(False, "Compute the LM head in float32.")
    replay_routes: bool = of_trainer(False, "MoE: use the engine's experts (R3).")
    device_map: str | None = of_trainer(
        None,
        "Trainer's device, such as auto, cuda:1 or cpu.",
        flag=False,
        changeable=True,
        metavar="DEVICE",
        completes=("auto", "cpu", "cuda"),
    )
    token_budget: int = of_trainer(
        8192, "Tokens per micro-batch, padded.", least=1, changeable=True
    )
    noise_responses: int | None = of_trainer(
        None,
        "Responses to score twice, for the noise floor; 0: none.",
        flag=False,
        least=0,
        changeable=True,
        show_default="a fifth, 16 to 128",
    )


@dataclass(frozen=True, kw_only=True)
class CpuSettings:
    """How much of the machine to use."""

    threads: int | None = of_running(
        None,
        "CPU threads.",
        least=0,
        nothing=0,
        changeable=True,
        show_default="all; a small model: 1",
    )


@dataclass(frozen=True, kw_only=True)
class RecordingSettings(ABC):
    """What the configurations of all commands that record have in common."""

    NOTE: ClassVar[str] = f"trace/{FILE_NAME}"  # the file that makes a folder one to resume

    @staticmethod
    def read_note(folder: Path) -> dict[str, Any]:
        """What that file says of the run, its settings among it; a `MismatchError` if it is
        damaged.
        """
        return read_manifest(folder / "trace")

    @property
    @abstractmethod
    def name(self) -> str:
        """What the run folder is named after."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The configuration for these values, as typed or as recorded; a `UsageError` for invalid
        ones.
        """
        return Values.of(values).build(cls)
