"""What a training run does, as one flat object: a preset file, changed by flags, saved with the run."""

import tomllib
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_cli import attention, registry
from mismatch_cli.engines import TRANSFERS, engine_names
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.options import ABOVE_0, BELOW_1, FROM_0, SHARE, UP_TO_1, check, default_of, setting
from mismatch_cli.places import bundled
from mismatch_cli.tasks.answers import FORMAT_HELP, FORMATS, SECONDS_HELP
from mismatch_cli.tasks.prompts import A_FIELD, TEMPLATE_HELP, TEMPLATES
from mismatch_cli.torch_settings import DTYPES, KV_CACHE_DTYPES

_PRESETS = Path(__file__).parent.parent / "presets"
FILE_NAME = "config.toml"


AGGREGATIONS = ("sequence-sum", "sequence-mean", "token-mean")
_DTYPE: dict[str, Any] = {"choices": ("dtype", DTYPES)}

of_problems, of_evaluation, of_turns, of_algorithm, of_steps, of_optimiser, of_lora, of_compute, of_files = (
    partial(setting, panel=title)
    for title in (
        "Model and problems", "Evaluation", "Several turns", "Algorithm", "Steps", "Optimiser", "LoRA",
        "Engine and trainer", "Records",
    )
)  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Every field can stand in a preset file and on the command line; the defaults are the sanity test's."""

    model: str = of_problems(
        lambda: str(bundled("model")), "Model folder or hub name.", metavar="MODEL", show_default="the bundled model"
    )
    dataset: str = of_problems(
        lambda: str(bundled("perfectible.jsonl")),
        "Problems with answers: a file, or a data set on the hub.",
        metavar="FILE|NAME",
        show_default="the bundled problems",
    )
    prompt_field: str = of_problems("", "Field that holds the problem.", **A_FIELD)
    answer_field: str = of_problems("", "Field that holds the answer.", **A_FIELD)
    split: str = of_problems("train", "Split of a data set on the hub.", metavar="NAME")
    num_problems: int = of_problems(0, "Take only the first N problems; 0 for all.", least=0)
    unique_problems: bool = of_problems(
        False, "Leave out problems that are there before, with the same prompt and answer."
    )
    max_prompt_tokens: int = of_problems(
        0, "Leave out problems with a longer prompt, in tokens; 0 for those that fill the context.", least=0
    )
    eval_dataset: str = of_evaluation(
        "",
        "Problems to evaluate on; several sets with commas between.",
        metavar="FILE|NAME",
        show_default="those of the training",
    )
    eval_split: str = of_evaluation(
        "test", "Split of these data sets on the hub: one for all, or one for each with commas between.", metavar="NAME"
    )
    prompt_template: str = of_problems("chat", TEMPLATE_HELP, choices=("template", TEMPLATES))
    reward: str = of_problems(
        "",
        "A reward of your own.",
        metavar="FILE.py:FUNCTION",
        show_default="math-verify, on the answer that a response ends with",
    )
    reward_seconds: int = of_problems(0, SECONDS_HELP, least=0)
    answer_format: str = of_problems("auto", FORMAT_HELP, choices=("answer format", FORMATS))
    environment: str = of_turns(
        "",
        "An environment that answers the model, and gives the rewards: a class with reset and step.",
        metavar="FILE.py:NAME",
        show_default="one turn, and a reward",
    )
    episodes: int = of_turns(
        0, "Problems that the environment poses itself, each from a seed; 0 for those of --dataset.", least=0
    )
    eval_episodes: int = of_turns(
        0, "Further ones, to evaluate on; 0 for --eval-dataset, or those of the training.", least=0
    )
    max_turns: int = of_turns(10, "Most turns of the model in an episode.", least=1)
    turn_tokens: int = of_turns(0, "Longest turn, in tokens; 0 for what --max-tokens leaves to the response.", least=0)
    environment_seconds: float = of_turns(30.0, "Longest time of a reset or a step of the environment.", **ABOVE_0)
    environment_processes: int = of_turns(1, "Processes that play the episodes.", least=1)
    algorithm: str = of_algorithm(
        "dppo-binary-tv",
        "NAME, NAME:PARAMETER=VALUE,… or a file such as my_mask.py; see `mismatch-cli algorithms`.",
    )
    aggregation: str = of_algorithm(
        "sequence-sum",
        "How the loss of tokens becomes that of a batch; sequence-sum divides by the longest allowed response.",
        choices=("aggregation", AGGREGATIONS),
    )
    recompute: bool = of_algorithm(
        False, "Score every batch at the weights that sampled, even where the algorithm does not need it."
    )
    average_decay: float = of_algorithm(
        0.0, "β of the average of the trainer's weights that ppo-ewma measures from; 0 for none.", **BELOW_1
    )
    seed: int = of_steps(0, "Seed of sampling and shuffling.")
    steps: int = of_steps(100, "Policy iterations.", least=1)
    prompts_per_step: int = of_steps(64, "Problems sampled in a step.", least=1)
    samples_per_prompt: int = of_steps(
        8, "Responses to each, the group of its advantages.", least=2,
        why=": a group of one response has no advantage",
    )  # fmt: skip
    minibatches: int = of_steps(4, "Optimiser steps on the responses of a step, in each epoch.", least=1)
    epochs: int = of_steps(1, "Passes over the responses of a step.", least=1)
    dynamic_sampling: int = of_steps(
        0,
        "In place of groups with equal rewards sample other problems, up to N times as many as a step has; 0 for none.",
        least=0,
    )
    max_tokens: int = of_steps(1024, "Longest response, in tokens.", least=1)
    max_context_tokens: int = of_steps(
        0, "Longest prompt and response together, in tokens; 0 for as long as the model allows.", least=0
    )
    temperature: float = of_steps(1.0, "Sampling temperature.")
    learning_rate: float = of_optimiser(1e-6, "Learning rate of AdamW; it stays constant.", **ABOVE_0)
    beta1: float = of_optimiser(0.9, "β₁ of AdamW.", **BELOW_1)
    beta2: float = of_optimiser(0.999, "β₂ of AdamW.", **BELOW_1)
    adam_eps: float = of_optimiser(1e-8, "ε of AdamW.", **FROM_0)
    weight_decay: float = of_optimiser(0.0, "Weight decay of AdamW.", **FROM_0)
    max_grad_norm: float = of_optimiser(1.0, "Clip gradients to this norm.", **ABOVE_0)
    lora: bool = of_lora(
        False, "Train a LoRA adapter: the model's own weights stay frozen, and the engine gets the sum."
    )
    lora_rank: int = of_lora(32, "Rank of the adapter.", least=1)
    lora_alpha: float = of_lora(64.0, "The product B A is scaled by alpha / rank.", **ABOVE_0)
    lora_targets: str = of_lora(
        "all-linear",
        "Modules or experts' parameters to adapt, such as q_proj,gate_up_proj; not the LM head.",
        metavar="NAMES",
    )
    engine: str = of_compute(
        "vllm", "What samples: vLLM, Hugging Face, or vLLM servers.", choices=("engine", engine_names)
    )
    engine_url: str = of_compute("", "vLLM servers, with commas between.", metavar="URL,URL")
    served_model: str = of_compute(
        "", "What the servers call the model.", metavar="NAME", show_default="the one loaded from --model"
    )
    weight_transfer: str = of_compute(
        "folder",
        "How new weights reach the servers: as files, or from GPU to GPU by NCCL.",
        choices=("weight transfer", TRANSFERS),
    )
    weights_folder: str = of_compute(
        "", "Folder that the servers see, for new weights.", metavar="DIR", show_default="weights/ in the run"
    )
    trainer_dtype: str = of_compute(
        "bfloat16", "Dtype in which the trainer computes; AdamW's own copy of the weights is float32.", **_DTYPE
    )
    rollout_dtype: str = of_compute("bfloat16", "Dtype of the engine.", **_DTYPE)
    kv_cache_dtype: str = of_compute(
        "auto",
        "Dtype of the engine's KV cache; fp8 makes a large mismatch.",
        metavar="DTYPE",
        completes=KV_CACHE_DTYPES,
    )
    engine_memory: float = of_compute(0.4, "Share of a GPU's memory for vLLM; the trainer needs the rest.", **SHARE)
    tensor_parallel: int = of_compute(1, "Ranks that share one vLLM engine.", least=1)
    attn: str = of_compute(
        "", "Attention of the trainer, such as sdpa, eager or flash_attention_2.", metavar="NAME",
        show_default="one that the model allows", completes=attention.USUAL,
    )  # fmt: skip
    replay_routes: bool = of_compute(
        False, "Of a mixture of experts, send each token to the experts that the engine chose (R3)."
    )
    token_budget: int = of_compute(8192, "Tokens in a micro-batch of the trainer, padding included.", least=1)
    gradient_checkpointing: bool = of_compute(
        False, "Compute each layer again for its gradients: less memory, a third more time."
    )
    cpu_offload: bool = of_compute(
        False, "Of several ranks: keep weights and AdamW's state in the CPU's memory between their uses."
    )
    threads: int = of_compute(0, "CPU threads of torch; 0 to choose by the model.", least=0)
    eval_every: int = of_evaluation(
        0, "Steps between evaluations, the first before training; 0 for one at the end only.", least=0
    )
    eval_samples: int = of_evaluation(4, "Responses to each problem in an evaluation: the k of avg@k.", least=1)
    eval_temperature: float = of_evaluation(
        0.0, "Sampling temperature of evaluations; 0 for that of the training.", **FROM_0
    )
    eval_top_p: float = of_evaluation(1.0, "Nucleus sampling of evaluations; 1 turns it off.", **UP_TO_1)
    trace_every: int = of_files(0, "Steps between traces for `clipstats`; 0 for none.", least=0)
    checkpoint_every: int = of_files(50, "Steps between checkpoints.", least=1)

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


def shown_defaults(preset: str) -> dict[str, str]:
    """What `--help` shows as the value of each setting in a preset: words where the setting has some."""
    values, words = vars(load_config(preset, {})), {known.name: known.metadata for known in fields(TrainConfig)}
    shown = {name: words[name].get("show_default", value) for name, value in values.items()}
    return {name: str(value) for name, value in shown.items() if value is not False}


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


def parsed(text: str) -> TrainConfig:
    """The settings that were saved with a run, as `to_toml` spells them; a `UsageError` for others."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{FILE_NAME} is not TOML ({error}).") from error
    return TrainConfig(**_checked(content, Path(FILE_NAME)))


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
