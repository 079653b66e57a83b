"""What is recorded, as one object: kept in the manifest, and what `--resume` goes on with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mismatch_cli.errors import UsageError
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.tasks.prompts import PromptSource

EQUAL, NEWER = "equal", "newer"
_RESPONSES_PER_SHARD = 256
_TOKENS_PER_SHARD = 2**20


@dataclass(frozen=True)
class TrainerSettings:
    """How the trainer scores; `model` other than the rollout model makes it score at both weights."""

    model: str
    dtype: str = "auto"
    adapter: str | None = None  # LoRA, on `model`
    merge_adapter: bool = False
    attn_implementation: str | None = None
    float32_head: bool = False
    device_map: str | None = None
    token_budget: int = 8192
    noise_responses: int = 128  # responses per run that are scored twice, for the self-noise floor

    def check(self) -> None:
        """A `UsageError` for what makes no sense."""
        _at_least(1, "--token-budget", self.token_budget)
        _at_least(0, "--noise-responses", self.noise_responses)


@dataclass(frozen=True)
class RolloutConfig:
    """Everything that decides what the engine samples."""

    model: str
    engine: str
    prompts: PromptSource
    sampling: SamplingSettings
    samples_per_prompt: int = 8
    top_logprobs: int = 20
    seed: int = 0
    prompt_template: str = "chat"
    rollout_dtype: str = "auto"
    adapter: str | None = None  # LoRA, that the engine samples with
    threads: int | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    reward: str = ""  # FILE.py:FUNCTION; empty: math-verify

    def __post_init__(self) -> None:
        _at_least(1, "--samples-per-prompt", self.samples_per_prompt)
        _at_least(0, "--top-logprobs", self.top_logprobs)

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that is to be loaded."""
        return (self.model,)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Every LoRA adapter that is to be put on one."""
        return (self.adapter,) if self.adapter else ()

    @property
    def name(self) -> str:
        """What its run folder is called after: the model's."""
        return Path(self.model).name

    @property
    def prompts_per_shard(self) -> int:
        """Enough responses to fill an engine's batch, few enough to hold in memory and to lose."""
        responses = min(_RESPONSES_PER_SHARD, _TOKENS_PER_SHARD // self.sampling.max_tokens)
        return max(1, responses // self.samples_per_prompt)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ProbeConfig(RolloutConfig):
    """Everything that decides what is in the trace of a probe."""

    trainer: TrainerSettings = field(kw_only=True)
    full_divergence: int = 0  # the first responses, whose TV and KL run over the whole vocabulary
    full_divergence_memory: float | None = None  # GiB that the engine may take for it; None: half of what is free

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trainer.check()
        _at_least(0, "--full-divergence", self.full_divergence)

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, self.trainer.model)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in (self.adapter, self.trainer.adapter) if name))


@dataclass(frozen=True)
class CurateConfig(RolloutConfig):
    """Everything that decides which problems `curate` keeps."""

    held_out_samples: int = 40
    keep: tuple[float, float] = (0.2, 0.8)  # accuracies, both ends included

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, "--held-out-samples", self.held_out_samples)
        low, high = self.keep
        if not 0 <= low <= high <= 1:
            raise UsageError(f"--keep {low:g} {high:g} is no range of accuracies. Example: --keep 0.2 0.8")


@dataclass(frozen=True)
class RescoreConfig:
    """Everything that decides what a rescored trace holds."""

    trace: str
    trainer: TrainerSettings
    weights: str | int = EQUAL  # the weights that sampled, NEWER ones, or those of a version as the trace counts
    keep_trainer: bool = False  # fill in logp_recomputed, beside the trace's own logp_trainer
    sampling: dict[str, float | None] = field(default_factory=dict)  # as asked; None: as the trace says
    threads: int | None = None

    def __post_init__(self) -> None:
        self.trainer.check()

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that is to be loaded."""
        return (self.trainer.model,)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Every LoRA adapter that is to be put on one."""
        return (self.trainer.adapter,) if self.trainer.adapter else ()

    @property
    def name(self) -> str:
        """What its run folder is called after: the trace's."""
        path = Path(self.trace).resolve()
        return path.parent.name if path.name == "trace" else path.name


def _at_least(least: int, flag: str, value: int) -> None:
    if value < least:
        raise UsageError(f"{flag} {value} is too small. Use at least {least}.")
