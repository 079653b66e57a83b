"""What a training run does, as one flat object: a preset file, changed by flags, saved with the run."""

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mismatch_cli import registry
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.options import ABOVE_0, BELOW_1, FROM_0, SHARE, check, default_of, setting
from mismatch_cli.places import bundled
from mismatch_cli.torch_settings import DTYPES

_PRESETS = Path(__file__).parent.parent / "presets"
FILE_NAME = "config.toml"


AGGREGATIONS = ("sequence-sum", "sequence-mean", "token-mean")
_DTYPE: dict[str, Any] = {"choices": ("dtype", DTYPES)}


@dataclass(frozen=True)
class TrainConfig:
    """Every field can stand in a preset file and on the command line; the defaults are the sanity test's."""

    model: str = setting(lambda: str(bundled("model")), "Folder or hub name of the model.")
    dataset: str = setting(
        lambda: str(bundled("perfectible.jsonl")), "Problems with answers: a file, or a data set on the hub."
    )
    prompt_field: str = setting("", "Field of the problem; empty: the first of the usual names.")
    answer_field: str = setting("", "Field of the answer; empty: the first of the usual names.")
    split: str = setting("train", "Split of a data set on the hub.")
    num_problems: int = setting(0, "Take only the first N problems; 0: all.", least=0)
    eval_dataset: str = setting("", "Problems of the evaluations, like --dataset; empty: the problems of the training.")
    eval_split: str = setting("test", "Split of the evaluations' data set on the hub.")
    prompt_template: str = setting("chat", "How a problem is put: chat, raw or r1-distill.")
    reward: str = setting("", "A reward of your own, path/to/file.py:function; empty: math-verify on the last box.")
    algorithm: str = setting(
        "dppo-binary-tv", "NAME, NAME:PARAMETER=VALUE,… or my_mask.py; see `mismatch-cli algorithms`."
    )
    aggregation: str = setting(
        "sequence-sum",
        "sequence-sum (by the longest allowed), sequence-mean or token-mean.",
        choices=("aggregation", AGGREGATIONS),
    )
    recompute: bool = setting(
        False, "Score every batch at the weights that sampled, also where the algorithm does not ask."
    )
    seed: int = setting(0, "Seed of sampling and shuffling.")
    steps: int = setting(100, "Policy iterations.", least=1)
    prompts_per_step: int = setting(64, "Problems sampled in a step.", least=1)
    samples_per_prompt: int = setting(
        8, "Responses to each: the group of the advantage.", least=2, why=": a group of one response has no advantage"
    )
    minibatches: int = setting(4, "Optimiser steps on the responses of a step, in each epoch.", least=1)
    epochs: int = setting(1, "Passes over the responses of a step.", least=1)
    max_tokens: int = setting(1024, "Longest response.", least=1)
    temperature: float = setting(1.0, "Sampling temperature.")
    learning_rate: float = setting(1e-6, "AdamW, constant.", **ABOVE_0)
    beta1: float = setting(0.9, "AdamW.", **BELOW_1)
    beta2: float = setting(0.999, "AdamW.", **BELOW_1)
    adam_eps: float = setting(1e-8, "AdamW.", **FROM_0)
    weight_decay: float = setting(0.0, "AdamW.", **FROM_0)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm.", **ABOVE_0)
    lora: bool = setting(
        False, "Train a LoRA adapter; the model's own weights are frozen, and the engine gets the sum."
    )
    lora_rank: int = setting(32, "With --lora: rank of the adapter.", least=1)
    lora_alpha: float = setting(64.0, "With --lora: the product B A is scaled by alpha / rank.", **ABOVE_0)
    lora_targets: str = setting(
        "all-linear", "With --lora: modules or experts' parameters, such as q_proj,gate_up_proj; not the LM head."
    )
    engine: str = setting("vllm", "vllm or hf.")
    trainer_dtype: str = setting(
        "bfloat16", "Of the weights that compute; the ones that AdamW changes are float32.", **_DTYPE
    )
    rollout_dtype: str = setting("bfloat16", "Of the engine.", **_DTYPE)
    kv_cache_dtype: str = setting("auto", "Of the engine's KV cache; fp8 makes a large mismatch.")
    engine_memory: float = setting(0.4, "Share of a GPU's memory for vLLM; the trainer needs the rest.", **SHARE)
    attn: str = setting("", "Attention implementation of the trainer; empty: one that the model allows.")
    token_budget: int = setting(8192, "Padded tokens in a micro-batch of the trainer.", least=1)
    threads: int = setting(0, "CPU threads of torch; 0: chosen for the model.", least=0)
    eval_every: int = setting(
        0, "Steps between evaluations, and one before the first step; 0: one at the end only.", least=0
    )
    eval_samples: int = setting(4, "Samples of each problem in an evaluation: the k of avg@k.", least=1)
    trace_every: int = setting(0, "Steps between traces for `clipstats`; 0: none.", least=0)
    checkpoint_every: int = setting(50, "Steps between checkpoints.", least=1)

    def __post_init__(self) -> None:
        check(self, typed=False)
        if self.minibatches > (responses := self.prompts_per_step * self.samples_per_prompt):
            raise UsageError(
                f"{self.minibatches} minibatches are more than the responses of a step. Use at most {responses}."
            )

    def to_toml(self) -> str:
        """The file that is saved with a run, and that `--preset` reads."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in asdict(self).items())


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
    types = {known.name: type(default_of(known)) for known in fields(TrainConfig)}
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
