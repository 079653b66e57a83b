"""The configuration of a training run, as one flat object: a preset file, changed by flags,
saved with the run.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError, quoted, unreadable
from mismatch_cli.base.options import (
    ABOVE_0,
    BELOW_1,
    FROM_0,
    SHARE,
    UP_TO_1,
    check,
    default_of,
    flag_of,
    is_typed_only,
    setting,
)
from mismatch_cli.base.places import bundled
from mismatch_cli.base.text import parsed_toml
from mismatch_cli.models import attention
from mismatch_cli.models.engines import TRANSFERS, engine_names
from mismatch_cli.models.torch_settings import DTYPES, KV_CACHE_DTYPES
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

_PRESETS = Path(__file__).parent / "presets"
FILE_NAME = "config.toml"
EXPECTED = "expected"  # the only table of a preset: no setting


AGGREGATIONS = ("sequence-sum", "sequence-mean", "token-mean")
_DTYPE: dict[str, Any] = {"choices": ("dtype", DTYPES)}

(
    of_problems,
    of_evaluation,
    of_turns,
    of_algorithm,
    of_steps,
    of_optimiser,
    of_lora,
    of_compute,
    of_files,
) = (
    partial(setting, panel=title)
    for title in (
        "Model and problems",
        "Evaluation",
        "Several turns",
        "Algorithm",
        "Steps",
        "Optimiser",
        "LoRA",
        "Engine and trainer",
        "Records",
    )
)


@dataclass(frozen=True)
class TrainConfig:
    """Every field is a key of a preset file and a setting of `train`; the defaults are those of the
    sanity test.
    """

    model: str = of_problems(
        lambda: str(bundled("model")),
        "Model folder or hub name.",
        metavar="MODEL",
        show_default="the bundled model",
    )
    dataset: str = of_problems(
        lambda: str(bundled("perfectible.jsonl")),
        "Problems with answers: a file or a data set on the hub.",
        metavar="FILE|NAME",
        show_default="the bundled problems",
    )
    prompt_field: str = of_problems("", "Field that holds the problem.", **A_FIELD)
    answer_field: str = of_problems("", "Field that holds the answer.", **A_FIELD)
    split: str = of_problems("train", "Split of a data set on the hub.", metavar="NAME")
    num_problems: int = of_problems(0, "Use only the first N problems; 0 for all.", least=0)
    unique_problems: bool = of_problems(False, "Drop duplicate problems: same prompt, same answer.")
    max_prompt_tokens: int = of_problems(
        0,
        "Drop problems with a longer prompt, in tokens; 0 to drop only those that fill the "
        "context.",
        least=0,
    )
    eval_dataset: str = of_evaluation(
        "",
        "Problems to evaluate on; separate several sets with commas.",
        metavar="FILE|NAME",
        show_default="the training problems",
    )
    eval_split: str = of_evaluation(
        "test",
        "Split of these data sets on the hub: one for all, or one each, separated by commas.",
        metavar="NAME",
    )
    prompt_template: str = of_problems("chat", TEMPLATE_HELP, choices=("template", TEMPLATES))
    reward: str = of_problems(
        "",
        "A reward of the package (rare-opener, right-and-rare) or your own function.",
        metavar="NAME|FILE.py:FUNCTION",
        completes=named_rewards.names,
        typed=is_own,
        show_default="math-verify on the response's final answer",
    )
    reward_seconds: int = of_problems(0, SECONDS_HELP, least=0)
    answer_format: str = of_problems("auto", FORMAT_HELP, choices=("answer format", FORMATS))
    grader: str = of_problems(VERL_RULE, GRADER_HELP, flag=False, choices=("grader", GRADERS))
    environment: str = of_turns(
        "",
        "An environment that replies to the model and assigns the reward: a class with reset and "
        "step.",
        metavar="FILE.py:NAME",
        typed=True,
        show_default="a single turn, graded by --reward",
    )
    episodes: int = of_turns(
        0,
        "Number of problems that the environment generates itself, one per seed; 0 to use "
        "--dataset.",
        least=0,
    )
    eval_episodes: int = of_turns(
        0,
        "More generated problems, to evaluate on; 0 for --eval-dataset or the training problems.",
        least=0,
    )
    max_turns: int = of_turns(10, "Maximum turns of the model per episode.", least=1)
    turn_tokens: int = of_turns(
        0, "Maximum tokens per turn; 0 for whatever --max-tokens leaves.", least=0
    )
    environment_seconds: float = of_turns(
        30.0, "Time limit in seconds for each reset or step of the environment.", **ABOVE_0
    )
    environment_processes: int = of_turns(1, "Processes that run episodes.", least=1)
    algorithm: str = of_algorithm(
        "dppo-binary-tv",
        "NAME, NAME:PARAMETER=VALUE,… or a file such as my_mask.py; see `mismatch-cli algorithms`.",
        typed=registry.names_file,
    )
    aggregation: str = of_algorithm(
        "sequence-sum",
        "How token losses add up to the batch loss; sequence-sum divides by the longest allowed "
        "response.",
        choices=("aggregation", AGGREGATIONS),
    )
    recompute: bool = of_algorithm(
        False,
        "Score every batch at the weights that sampled it, even if the algorithm does not need "
        "that.",
    )
    average_decay: float = of_algorithm(
        0.0,
        "β of the moving average of the weights, ppo-ewma's proximal policy; 0 for none.",
        **BELOW_1,
    )
    seed: int = of_steps(0, "Seed for sampling and shuffling.")
    steps: int = of_steps(100, "Training steps (policy iterations).", least=1)
    prompts_per_step: int = of_steps(64, "Problems sampled per step.", least=1)
    samples_per_prompt: int = of_steps(
        8,
        "Responses per problem; each group has its own advantages.",
        least=2,
        why=": a group of one response has no advantage",
    )
    minibatches: int = of_steps(4, "Optimiser steps per epoch on the responses of a step.", least=1)
    epochs: int = of_steps(1, "Passes over the responses of each step.", least=1)
    staleness: int = of_steps(
        0,
        "Sample with weights that are N optimiser steps old (--minibatches × --epochs of them a "
        "step); 0 for the newest.",
        flag=False,
        least=0,
    )
    dynamic_sampling: int = of_steps(
        0,
        "Replace groups whose rewards are all equal: sample up to N × --prompts-per-step other "
        "problems; 0 for none.",
        least=0,
    )
    max_tokens: int = of_steps(1024, "Maximum response length, in tokens.", least=1)
    max_context_tokens: int = of_steps(
        0, "Maximum length of prompt plus response, in tokens; 0 for the model's limit.", least=0
    )
    temperature: float = of_steps(1.0, "Sampling temperature.")
    learning_rate: float = of_optimiser(1e-6, "Learning rate of AdamW; constant.", **ABOVE_0)
    beta1: float = of_optimiser(0.9, "β₁ of AdamW.", **BELOW_1)
    beta2: float = of_optimiser(0.999, "β₂ of AdamW.", **BELOW_1)
    adam_eps: float = of_optimiser(1e-8, "ε of AdamW.", **FROM_0)
    weight_decay: float = of_optimiser(0.0, "Weight decay of AdamW.", **FROM_0)
    max_grad_norm: float = of_optimiser(1.0, "Clip gradients to this norm.", **ABOVE_0)
    lora: bool = of_lora(
        False,
        "Train a LoRA adapter: the base weights stay frozen, and the engine gets the merged "
        "weights.",
    )
    lora_rank: int = of_lora(32, "Rank of the adapter.", least=1)
    lora_alpha: float = of_lora(
        64.0, "The adapter's product B A is scaled by alpha / rank.", **ABOVE_0
    )
    lora_targets: str = of_lora(
        "all-linear",
        "Modules or expert parameters to adapt, such as q_proj,gate_up_proj; never the LM head.",
        metavar="NAMES",
    )
    engine: str = of_compute(
        "vllm",
        "Rollout engine: vLLM, Hugging Face, or vLLM servers.",
        choices=("engine", engine_names),
    )
    engine_url: str = of_compute(
        "", "vLLM servers, separated by commas.", metavar="URL,URL", typed=True
    )
    served_model: str = of_compute(
        "",
        "The model's name on the servers.",
        metavar="NAME",
        show_default="the one loaded from --model",
    )
    weight_transfer: str = of_compute(
        "folder",
        "How new weights reach the servers: as files, or from GPU to GPU over NCCL.",
        choices=("weight transfer", TRANSFERS),
    )
    weights_folder: str = of_compute(
        "",
        "Folder for new weights that the servers can read.",
        metavar="DIR",
        show_default="weights/ in the run",
    )
    trainer_dtype: str = of_compute(
        "bfloat16",
        "Dtype the trainer computes in; AdamW keeps a float32 copy of the weights.",
        **_DTYPE,
    )
    rollout_dtype: str = of_compute("bfloat16", "Dtype of the engine.", **_DTYPE)
    kv_cache_dtype: str = of_compute(
        "auto",
        "Dtype of the engine's KV cache; fp8 causes a large mismatch.",
        metavar="DTYPE",
        completes=KV_CACHE_DTYPES,
    )
    engine_memory: float = of_compute(
        0.4, "Share of GPU memory for vLLM; the trainer needs the rest.", **SHARE
    )
    tensor_parallel: int = of_compute(1, "Ranks that share one vLLM engine.", least=1)
    attn: str = of_compute(
        "",
        "Attention implementation of the trainer, such as sdpa, eager or flash_attention_2.",
        metavar="NAME",
        show_default="one that the model supports",
        completes=attention.USUAL,
    )
    replay_routes: bool = of_compute(
        False, "Mixture of experts: route each token to the experts that the engine chose (R3)."
    )
    token_budget: int = of_compute(
        8192, "Tokens per micro-batch of the trainer, padding included.", least=1
    )
    gradient_checkpointing: bool = of_compute(
        False, "Recompute activations in the backward pass: less memory, a third more time."
    )
    cpu_offload: bool = of_compute(
        False, "With several ranks: keep weights and AdamW's state in CPU memory between uses."
    )
    threads: int = of_compute(0, "CPU threads for torch; 0 to choose by model size.", least=0)
    eval_every: int = of_evaluation(
        0,
        "Steps between evaluations, the first before training; 0 to evaluate only at the end.",
        least=0,
    )
    eval_samples: int = of_evaluation(
        4, "Responses per problem in an evaluation: the k of avg@k.", least=1
    )
    eval_temperature: float = of_evaluation(
        0.0, "Sampling temperature of evaluations; 0 for the training temperature.", **FROM_0
    )
    eval_top_p: float = of_evaluation(
        1.0, "Nucleus sampling (top-p) of evaluations; 1 turns it off.", **UP_TO_1
    )
    trace_every: int = of_files(0, "Steps between traces for `clipstats`; 0 for none.", least=0)
    bounds_share: float = of_files(
        0.01,
        "Share of the tokens whose TV over the full vocabulary is measured; 0 for none.",
        flag=False,
        **BELOW_1,
    )
    checkpoint_every: int = of_files(50, "Steps between checkpoints.", least=1)

    def __post_init__(self) -> None:
        check(self, typed=False)
        if self.minibatches > (responses := self.prompts_per_step * self.samples_per_prompt):
            raise UsageError(
                f"{self.minibatches} minibatches are more than the responses per step. Use at "
                f"most {responses}."
            )

    def to_toml(self) -> str:
        """The file that is saved with a run, and that `--preset` reads."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in asdict(self).items())


def presets() -> list[str]:
    """The names of the preset files."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def shown_defaults(preset: str) -> dict[str, str]:
    """The value of each setting in a preset as `--help` shows it: in words where the setting has
    some.
    """
    values, words = (
        vars(load_config(preset, {})),
        {known.name: known.metadata for known in fields(TrainConfig)},
    )
    shown = {name: words[name].get("show_default", value) for name, value in values.items()}
    return {name: str(value) for name, value in shown.items() if value is not False}


def load_config(preset: str, changes: dict[str, Any]) -> TrainConfig:
    """A preset (by name or path) with changes on top; a `UsageError` for unknown names and
    types.
    """
    path, content = _preset(preset)
    content.pop(EXPECTED, None)
    _check_typed(content, changes, path)
    return TrainConfig(**_checked(content | changes, path))


def expected_of(preset: str) -> tuple[Path, Any]:
    """The file of a preset, and its table of what a run should show at its start, unchecked; None
    if it has no such table.
    """
    path, content = _preset(preset)
    return path, content.get(EXPECTED)


def changed_from(preset: str, config: TrainConfig) -> list[str]:
    """The settings in which a run departs from its preset, as they are typed; each run has an
    algorithm and a seed of its own.
    """
    path, content = _preset(preset)
    content.pop(EXPECTED, None)
    plain = TrainConfig(**_checked(content, path))
    changed = []
    for field in fields(TrainConfig):
        differs = getattr(config, field.name) != getattr(plain, field.name)
        if differs and field.name not in ("algorithm", "seed"):
            changed.append(flag_of(field))
    return changed


def _preset(preset: str) -> tuple[Path, dict[str, Any]]:
    path = _PRESETS / f"{preset}.toml"
    if preset.endswith(".toml"):
        path = Path(preset)
    elif not path.is_file():
        raise UsageError(registry.unknown("preset", preset, presets()))
    try:
        return path, parsed_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        advice = "Name a TOML file like the one that `train --show-config` prints."
        raise unreadable(path, error, advice, "cannot be read ({})") from error


def _check_typed(content: Mapping[str, Any], changes: Mapping[str, Any], path: Path) -> None:
    """A `UsageError` for what only the command line may set, if the file of a preset sets it."""
    reserved = [
        known for known in fields(TrainConfig) if is_typed_only(known, content.get(known.name))
    ]
    for known in (known for known in reserved if known.name not in changes):
        typed = quoted(flag_of(known), str(content[known.name]))
        raise UsageError(
            f"{path}: {known.name} can start code or send keys to a host, so a file may not set "
            f"it. If you trust it, add: {typed}"
        )


def parsed(text: str) -> TrainConfig:
    """The settings saved with a run, as `to_toml` spells them; a `UsageError` for anything else."""
    try:
        content = parsed_toml(text)
    except ValueError as error:
        raise UsageError(f"{FILE_NAME} is not valid TOML ({error}).") from error
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
            raise UsageError(
                f"{path}: {name} = {value!r} must be {kind}. See: mismatch-cli train --show-config"
            )
    return content


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
