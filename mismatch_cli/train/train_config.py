"""The configuration of a training run: a preset file, changed by what is given, saved with the
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError, unreadable
from mismatch_cli.base.options import (
    ABOVE_0,
    BELOW_1,
    FROM_0,
    SHARE,
    UP_TO_1,
    override,
    setting,
    settings_group,
    settings_of,
    values_by_key,
)
from mismatch_cli.base.places import bundled
from mismatch_cli.base.text import parse_toml
from mismatch_cli.base.values import Values, check_typed, read, toml_line
from mismatch_cli.probe.settings import (
    CpuSettings,
    ProblemSettings,
    RolloutSettings,
    SamplerSettings,
    ScorerSettings,
    TaskSettings,
    of_engine,
    of_sampling,
    of_trainer,
)

_PRESETS = Path(__file__).parent / "presets"
FILE_NAME = "config.toml"
EXPECTED = "expected"  # the only table of a preset: no setting
# Settings of earlier versions in files that they wrote, each with the value that every run has now.
# With another value, the file is refused as one with an unknown setting.
_RETIRED = {"weight_transfer": "folder"}

AGGREGATIONS = ("sequence-sum", "sequence-mean", "token-mean")
_BFLOAT16 = override("bfloat16")

of_problems = partial(setting, panel="Problems")
of_evaluation = partial(setting, panel="Evaluation")
of_training = partial(setting, panel="Training")
of_records = partial(setting, panel="Records")


@dataclass(frozen=True, kw_only=True)
class DatasetSettings(ProblemSettings):
    """The problems that are trained on."""

    dataset: str = of_problems(
        lambda: str(bundled("perfectible.jsonl")),
        "Problems with answers: a file or hub data set.",
        metavar="FILE|NAME",
        show_default="the bundled problems",
    )
    number: int | None = of_problems(
        None,
        "Only the first N problems; 0: all.",
        key="num_problems",
        nothing=0,
        least=0,
    )
    unique: bool = of_problems(
        False,
        "Drop duplicates: same prompt, same answer.",
        key="unique_problems",
        flag=False,
    )
    max_prompt_tokens: int | None = of_problems(
        None,
        "Drop problems with a longer prompt; 0: only those that fill the context.",
        flag=False,
        nothing=0,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What accuracy is measured on, when, and how."""

    every: int | None = of_evaluation(
        None,
        "Steps between evaluations, from before training; 0: only at the end.",
        key="eval_every",
        nothing=0,
        least=0,
    )
    dataset: str | None = of_evaluation(
        None,
        "Problems to evaluate on; several with commas.",
        key="eval_dataset",
        metavar="FILE|NAME",
        show_default="the training problems",
    )
    split: str = of_evaluation(
        "test",
        "Split of the evaluation sets: one for all, or one each, with commas.",
        key="eval_split",
        flag=False,
        metavar="NAME",
    )
    samples: int = of_evaluation(
        4,
        "Responses per problem: the k of avg@k.",
        key="eval_samples",
        flag=False,
        least=1,
    )
    temperature: float | None = of_evaluation(
        None,
        "Temperature of evaluations; 0: the training one.",
        key="eval_temperature",
        flag=False,
        nothing=0.0,
        **ABOVE_0,
    )
    top_p: float = of_evaluation(
        1.0,
        "Top-p of evaluations; 1: off.",
        key="eval_top_p",
        flag=False,
        **UP_TO_1,
    )
    episodes: int = of_evaluation(
        0,
        "Other problems that the environment generates to evaluate on; 0: --eval-dataset or the "
        "training problems.",
        key="eval_episodes",
        flag=False,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """What replies to the model, in several turns."""

    environment: str | None = of_problems(
        None,
        "Replies to the model and gives the reward: a class with reset and step.",
        metavar="FILE.py:NAME",
        typed=True,
        show_default="one turn, graded by --reward",
    )
    episodes: int = of_problems(
        0,
        "Problems that the environment generates, one per seed; 0: --dataset.",
        flag=False,
        least=0,
    )
    max_turns: int = of_problems(10, "Maximum turns of the model.", flag=False, least=1)
    turn_tokens: int | None = of_problems(
        None,
        "Maximum tokens per turn; 0: what --max-tokens leaves.",
        flag=False,
        nothing=0,
        least=0,
    )
    seconds: float = of_problems(
        30.0,
        "Seconds for each reset or step of the environment.",
        key="environment_seconds",
        flag=False,
        **ABOVE_0,
    )
    processes: int = of_problems(
        1,
        "Processes that run episodes.",
        key="environment_processes",
        flag=False,
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class OptimiserSettings:
    """The steps of AdamW."""

    learning_rate: float = of_training(1e-6, "Learning rate of AdamW; constant.", **ABOVE_0)
    max_grad_norm: float = of_training(1.0, "Clip gradients to this norm.", **ABOVE_0)
    beta1: float = of_training(0.9, "β₁ of AdamW.", flag=False, **BELOW_1)
    beta2: float = of_training(0.999, "β₂ of AdamW.", flag=False, **BELOW_1)
    epsilon: float = of_training(1e-8, "ε of AdamW.", key="adam_eps", flag=False, **FROM_0)
    weight_decay: float = of_training(0.0, "Weight decay of AdamW.", flag=False, **FROM_0)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """A LoRA adapter that is trained instead of the weights."""

    wanted: bool = of_trainer(
        False,
        "Train a LoRA adapter, merged for the engine.",
        key="lora",
    )
    rank: int = of_trainer(32, "Rank of the adapter.", key="lora_rank", flag=False, least=1)
    alpha: float = of_trainer(
        64.0,
        "The adapter's product B A is scaled by alpha / rank.",
        key="lora_alpha",
        flag=False,
        **ABOVE_0,
    )
    targets: str = of_trainer(
        "all-linear",
        "Modules or expert parameters, such as q_proj,gate_up_proj; never the LM head.",
        key="lora_targets",
        flag=False,
        metavar="NAMES",
    )


@dataclass(frozen=True, kw_only=True)
class SyncedEngineSettings(RolloutSettings):
    """A rollout engine that gets new weights after every step."""

    memory: float = of_engine(
        0.4,
        "Share of GPU memory for vLLM.",
        key="engine_memory",
        flag=False,
        **SHARE,
    )
    weights_folder: str | None = of_engine(
        None,
        "Folder for weights that the servers can read.",
        flag=False,
        metavar="DIR",
        show_default="weights/ in the run",
    )


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(ScorerSettings):
    """A trainer that also learns."""

    gradient_checkpointing: bool = of_trainer(
        False,
        "Recompute activations: less memory, a third more time.",
        flag=False,
    )
    cpu_offload: bool = of_trainer(
        False,
        "Several ranks: keep weights and AdamW's state in CPU memory.",
        flag=False,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides how a run trains; the defaults are those of the sanity test."""

    algorithm: str = of_training(
        "dppo-binary-tv",
        "NAME, NAME:PARAMETER=VALUE,… or a file such as my_mask.py; see `mismatch-cli algorithms`.",
        metavar="ALGORITHM",
        typed=registry.names_file,
    )
    steps: int = of_training(100, "Training steps (policy iterations).", least=1)
    prompts_per_step: int = of_training(64, "Problems sampled per step.", least=1)
    minibatches: int = of_training(4, "Optimiser steps per epoch on a step's responses.", least=1)
    epochs: int = of_training(1, "Passes over the responses of each step.", least=1)
    aggregation: str = of_training(
        "sequence-sum",
        "How token losses add up; sequence-sum divides by the longest allowed response.",
        flag=False,
        choices=("aggregation", AGGREGATIONS),
    )
    recompute: bool = of_training(
        False,
        "Score every batch at the weights that sampled it, whatever the algorithm.",
        flag=False,
    )
    average_decay: float = of_training(
        0.0,
        "β of the weights' moving average, ppo-ewma's proximal policy; 0: none.",
        flag=False,
        **BELOW_1,
    )
    staleness: int = of_training(
        0,
        "Sample with weights N optimiser steps old (--minibatches × --epochs a step).",
        flag=False,
        least=0,
    )
    dynamic_sampling: int = of_training(
        0,
        "Replace groups with equal rewards: sample up to N × --prompts-per-step other problems; "
        "0: off.",
        flag=False,
        least=0,
    )
    max_context_tokens: int | None = of_sampling(
        None,
        "Maximum tokens of prompt and response; 0: the model's limit.",
        flag=False,
        nothing=0,
        least=0,
    )
    optimiser: OptimiserSettings = settings_group(OptimiserSettings)
    problems: DatasetSettings = settings_group(DatasetSettings, panel="Problems")
    task: TaskSettings = settings_group(TaskSettings, panel="Problems")
    turns: EnvironmentSettings = settings_group(EnvironmentSettings)
    sampler: SamplerSettings = settings_group(
        SamplerSettings,
        "samples_per_prompt",
        "max_tokens",
        "temperature",
        "seed",
        samples_per_prompt=override(least=2, why=": a group of one response has no advantage"),
        max_tokens=override(1024),
        seed=override(least=None, most=None),
    )
    engine: SyncedEngineSettings = settings_group(
        SyncedEngineSettings,
        without=("adapter", "eager", "prefix_caching", "max_model_len", "arguments"),
        dtype=_BFLOAT16,
    )
    scorer: LearnerSettings = settings_group(
        LearnerSettings,
        "attn",
        "replay_routes",
        "token_budget",
        "gradient_checkpointing",
        "cpu_offload",
        dtype=_BFLOAT16,
    )
    lora: LoraSettings = settings_group(LoraSettings)
    cpu: CpuSettings = settings_group(CpuSettings)
    evaluation: EvaluationSettings = settings_group(EvaluationSettings)
    trace_every: int | None = of_records(None, "Steps between traces; 0: none.", nothing=0, least=0)
    bounds_share: float = of_records(
        0.01,
        "Share of tokens whose full TV is measured; 0: none.",
        flag=False,
        **BELOW_1,
    )
    checkpoint_every: int = of_records(50, "Steps between checkpoints.", flag=False, least=1)

    def __post_init__(self) -> None:
        responses = self.prompts_per_step * self.sampler.samples_per_prompt
        if self.minibatches > responses:
            raise UsageError(
                f"{self.minibatches} minibatches are more than the responses per step. Use at "
                f"most {responses}."
            )

    def to_toml(self) -> str:
        """The file that is saved with a run, and that `--preset` reads."""
        values = values_by_key(self)
        lines = [toml_line(each, values[each.key]) for each in settings_of(TrainConfig)]
        return "\n".join([*lines, ""])


def presets() -> list[str]:
    """The names of the preset files."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def shown_defaults(preset: str) -> dict[str, str]:
    """The value of each setting in a preset as `--help` shows it: in words where the setting has
    some.
    """
    values = values_by_key(load_config(preset, {}))
    shown = {}
    for each in settings_of(TrainConfig):
        value = values[each.key]
        # What is off by default shows no value, rather than the Python of one.
        if value is None or value is False:
            value = ""
        shown[each.key] = str(each.about.get("show_default", value))
    return shown


def preset_values(preset: str, chosen: Values) -> Values:
    """The values chosen for a run, and below them those of a preset (by name or path).

    Raises a `UsageError` for an unknown name or another type, and if the file of the preset sets
    what only the command line may.
    """
    path, content = _preset(preset)
    content.pop(EXPECTED, None)
    place = str(path) if preset.endswith(".toml") else f"preset {preset}"
    of_preset = read(TrainConfig, _without_retired(content), place)
    check_typed(TrainConfig, of_preset, chosen)
    return chosen.over(of_preset)


def load_config(preset: str, chosen: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a preset (by name or path), with chosen values on top."""
    if not isinstance(chosen, Values):
        chosen = read(TrainConfig, chosen, "the settings")
    return preset_values(preset, chosen).build(TrainConfig)


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
    values = values_by_key(config)
    defaults = values_by_key(load_config(preset, {}))
    flags = []
    for each in settings_of(TrainConfig):
        belongs_to_run = each.key in ("algorithm", "seed")
        if not belongs_to_run and values[each.key] != defaults[each.key]:
            flags.append(each.flag)
    return flags


def parsed(text: str) -> TrainConfig:
    """The settings saved with a run, as `to_toml` spells them; a `UsageError` for anything else."""
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{FILE_NAME} is not valid TOML ({error}). Fix the file.") from error
    return read(TrainConfig, _without_retired(content), FILE_NAME).build(TrainConfig)


def _without_retired(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if _RETIRED.get(key) != value}


def _preset(preset: str) -> tuple[Path, dict[str, Any]]:
    """The file of a preset, and what it holds; a `UsageError` for an unknown or unreadable one."""
    path = _PRESETS / f"{preset}.toml"
    if preset.endswith(".toml"):
        path = Path(preset)
    elif not path.is_file():
        raise UsageError(registry.unknown_name("preset", preset, presets()))
    try:
        return path, parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        advice = "Name a TOML file like the one that `train --show-config` prints."
        raise unreadable(path, error, advice, "cannot be read ({})") from error
