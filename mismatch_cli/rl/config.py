"""What a training run does, as one flat object: a preset file, changed by flags, saved with the run."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mismatch_cli import registry
from mismatch_cli.bundled import bundled
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.torch_settings import DTYPES

_PRESETS = Path(__file__).parent.parent / "presets"
FILE_NAME = "config.toml"


def _set(default: Any, help_text: str) -> Any:
    """A setting with the words that `train --help` prints."""
    factory = default if callable(default) else lambda: default
    return field(default_factory=factory, metadata={"default": factory, "help": help_text})


@dataclass(frozen=True)
class TrainConfig:
    """Every field can stand in a preset file and on the command line; the defaults are the sanity test's."""

    model: str = _set(lambda: str(bundled("model")), "Folder or hub name of the model.")
    dataset: str = _set(
        lambda: str(bundled("perfectible.jsonl")), "Problems with answers: a file, or a data set on the hub."
    )
    prompt_field: str = _set("", "Field of the problem; empty: the first of the usual names.")
    answer_field: str = _set("", "Field of the answer; empty: the first of the usual names.")
    split: str = _set("train", "Split of a data set on the hub.")
    num_problems: int = _set(0, "Take only the first N problems; 0: all.")
    eval_dataset: str = _set("", "Problems of the evaluations, like --dataset; empty: the problems of the training.")
    eval_split: str = _set("test", "Split of the evaluations' data set on the hub.")
    prompt_template: str = _set("chat", "How a problem is put: chat, raw or r1-distill.")
    reward: str = _set("", "A reward of your own, path/to/file.py:function; empty: math-verify on the last box.")
    algorithm: str = _set(
        "dppo-binary-tv", "NAME, NAME:PARAMETER=VALUE,… or my_mask.py; see `mismatch-cli algorithms`."
    )
    aggregation: str = _set("sequence-sum", "sequence-sum (by the longest allowed), sequence-mean or token-mean.")
    recompute: bool = _set(
        False, "Score every batch at the weights that sampled, also where the algorithm does not ask."
    )
    seed: int = _set(0, "Seed of sampling and shuffling.")
    steps: int = _set(100, "Policy iterations.")
    prompts_per_step: int = _set(64, "Problems sampled in a step.")
    samples_per_prompt: int = _set(8, "Responses to each: the group of the advantage.")
    minibatches: int = _set(4, "Optimiser steps on the responses of a step, in each epoch.")
    epochs: int = _set(1, "Passes over the responses of a step.")
    max_tokens: int = _set(1024, "Longest response.")
    temperature: float = _set(1.0, "Sampling temperature.")
    learning_rate: float = _set(1e-6, "AdamW, constant.")
    beta1: float = _set(0.9, "AdamW.")
    beta2: float = _set(0.999, "AdamW.")
    adam_eps: float = _set(1e-8, "AdamW.")
    weight_decay: float = _set(0.0, "AdamW.")
    max_grad_norm: float = _set(1.0, "Gradients are clipped to this norm.")
    lora: bool = _set(False, "Train a LoRA adapter; the model's own weights are frozen, and the engine gets the sum.")
    lora_rank: int = _set(32, "With --lora: rank of the adapter.")
    lora_alpha: float = _set(64.0, "With --lora: the product B A is scaled by alpha / rank.")
    lora_targets: str = _set(
        "all-linear", "With --lora: modules or experts' parameters, such as q_proj,gate_up_proj; not the LM head."
    )
    engine: str = _set("vllm", "vllm or hf.")
    trainer_dtype: str = _set("bfloat16", "Of the weights that compute; the ones that AdamW changes are float32.")
    rollout_dtype: str = _set("bfloat16", "Of the engine.")
    kv_cache_dtype: str = _set("auto", "Of the engine's KV cache; fp8 makes a large mismatch.")
    engine_memory: float = _set(0.4, "Share of a GPU's memory for vLLM; the trainer needs the rest.")
    attn: str = _set("", "Attention implementation of the trainer; empty: one that the model allows.")
    token_budget: int = _set(8192, "Padded tokens in a micro-batch of the trainer.")
    threads: int = _set(0, "CPU threads of torch; 0: chosen for the model.")
    eval_every: int = _set(0, "Steps between evaluations, and one before the first step; 0: one at the end only.")
    eval_samples: int = _set(4, "Samples of each problem in an evaluation: the k of avg@k.")
    trace_every: int = _set(0, "Steps between traces for `clipstats`; 0: none.")
    checkpoint_every: int = _set(50, "Steps between checkpoints.")

    def __post_init__(self) -> None:
        least = {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "minibatches": 1, "epochs": 1}
        least |= {"max_tokens": 1, "token_budget": 1, "eval_samples": 1, "checkpoint_every": 1}
        least |= {"lora_rank": 1, "num_problems": 0, "eval_every": 0, "trace_every": 0, "threads": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                why = ": a group of one response has no advantage" if name == "samples_per_prompt" else ""
                raise UsageError(f"{name} = {getattr(self, name)} is too small. Use at least {smallest}{why}.")
        if self.engine == "server":
            raise UsageError(
                "Training sends new weights to the engine after every step, and a server behind a URL takes none from "
                "here. Use --engine vllm or --engine hf."
            )
        for name in ("trainer_dtype", "rollout_dtype"):
            if getattr(self, name) not in DTYPES:
                raise UsageError(f"{name}: {registry.unknown('dtype', getattr(self, name), DTYPES)}")
        for name in ("learning_rate", "max_grad_norm", "lora_alpha"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} = {getattr(self, name)} makes no sense. Use a number above 0.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)} makes no sense. Use a number from 0 to below 1.")
        if not 0 < self.engine_memory < 1:
            raise UsageError(f"engine_memory = {self.engine_memory} makes no sense. Use a share between 0 and 1.")
        for name in ("adam_eps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} = {getattr(self, name)} makes no sense. Use 0 or more.")
        if self.minibatches > (responses := self.prompts_per_step * self.samples_per_prompt):
            raise UsageError(
                f"{self.minibatches} minibatches are more than the responses of a step. Use at most {responses}."
            )

    def to_toml(self) -> str:
        """The file that is saved with a run, and that `--preset` reads."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in asdict(self).items())


def settings() -> dict[str, tuple[Any, str]]:
    """Every setting by name: its default, and what it is."""
    return {f.name: (f.metadata["default"](), f.metadata["help"]) for f in fields(TrainConfig)}


def presets() -> list[str]:
    """The names of the preset files."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def load_config(preset: str, changes: dict[str, Any]) -> TrainConfig:
    """A preset (by name or path) with changes on top; a `UsageError` for unknown names and types."""
    path = _PRESETS / f"{preset}.toml"
    if preset.endswith(".toml"):
        path = Path(preset)
    elif not path.is_file():
        raise UsageError(registry.unknown("preset", preset, presets()))
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MismatchError(
            f"{path} cannot be read ({error}). Name a TOML file as `train --show-config` prints it."
        ) from error
    return TrainConfig(**_checked(content | changes, path))


def _checked(content: dict[str, Any], path: Path) -> dict[str, Any]:
    types = {name: type(default) for name, (default, _) in settings().items()}
    for name, value in content.items():
        if name not in types:
            raise UsageError(f"{path}: {registry.unknown('setting', name, types)}")
        if types[name] is float and isinstance(value, int) and not isinstance(value, bool):
            content[name] = float(value)
        elif type(value) is not types[name]:
            kind = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(
                types[name].__name__, "text"
            )
            raise UsageError(f"{path}: {name} = {value!r} has to be {kind}. See: mismatch-cli train --show-config")
    return content


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
