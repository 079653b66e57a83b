"""The settings that a search changes one at a time: when each applies, what it changes on which
side, what to type.

Settings that need no engine restart come first, then those that caused large gaps elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_cli.bisect.experiments import Change
from mismatch_cli.bisect.side_settings import RolloutSide, TrainerSide, restarts
from mismatch_cli.limits.causes import CAUSES, cause_rank
from mismatch_cli.models.torch_settings import SIXTEEN_BITS, sends_rounded

_SUPPORT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
SWITCHES = {"VLLM_BATCH_INVARIANT": "1"}  # variables that a change may set for the engine


@dataclass(frozen=True)
class Toggle:
    """One setting changed: in the rollout, the trainer, or both."""

    setting: str  # as the manifest names it
    side: str  # whose setting it is: rollout, trainer, both
    value: Any  # now
    better: Any  # what to try
    change: str  # what to do, a clause
    rollout: Change = field(default_factory=dict)
    trainer: Change = field(default_factory=dict)
    flags: tuple[str, ...] = ()  # for `probe`, to measure new samples with this change
    floor: bool = False  # a precision that both sides share: its rounding is not one side's fault
    parts: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Whether an engine has to be started for it."""
        return restarts(self.rollout)

    @property
    def order(self) -> tuple[bool, int]:
        """What needs no restart first, then by the ranking of causes."""
        found = cause_rank(
            f"{'trainer' if self.side == 'trainer' else 'rollout'}.{self.setting.partition('.')[0]}"
        )
        return self.starts, found or len(CAUSES)


def toggles(rollout: RolloutSide, trainer: TrainerSide) -> list[Toggle]:
    """The settings of these two sides that can be changed, in the order to try them."""
    found = [toggle for rule in _RULES for toggle in rule(rollout, trainer)]
    return sorted(found, key=lambda toggle: toggle.order)


def _dtypes(rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    """One dtype on both sides where they differ; float32 on both where they share one of 16
    bits.
    """
    rolled, trained = (
        _dtype(rollout.told, rollout.dtype),
        _dtype(trainer.told, trainer.config.scorer.dtype),
    )
    both = ("--rollout-dtype", "float32", "--trainer-dtype", "float32")
    if rolled != trained:
        yield Toggle(
            "dtype",
            "rollout",
            rolled,
            trained,
            f"the rollout in {trained}, like the trainer",
            {"dtype": trained},
            flags=("--rollout-dtype", trained),
        )
        yield Toggle(
            "dtype",
            "trainer",
            trained,
            rolled,
            f"the trainer in {rolled}, like the rollout",
            trainer={"trainer_dtype": rolled},
            flags=("--trainer-dtype", rolled),
        )
    if sends_rounded(trained, rolled):
        yield Toggle(
            "rounded_weights",
            "trainer",
            trained,
            rolled,
            f"log π with the weights rounded to {rolled}, as the engine has them",
            trainer={"rounded_to": rolled},
        )
    if {rolled, trained} & {*SIXTEEN_BITS}:
        wide = {"dtype": "float32"}, {"trainer_dtype": "float32", "float32_head": False}
        yield Toggle(
            "dtype",
            "both",
            f"{rolled} / {trained}" if rolled != trained else rolled,
            "float32",
            "float32 on both sides, or float16",
            *wide,
            flags=both,
            floor=rolled == trained,
        )


def _dtype(told: Mapping[str, Any], asked: str) -> str:
    return str(told.get("dtype") or asked)


def _heads(rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    """A float32 LM head on one side, the other, or both; or on neither, if one has it; or undo a
    lower precision.
    """
    own = rollout.overrides.get("head_dtype")
    in_engine, in_trainer = own == "float32", trainer.config.scorer.float32_head
    can_engine = rollout.engine == "vllm" and _dtype(rollout.told, rollout.dtype) in SIXTEEN_BITS
    if own in SIXTEEN_BITS and not can_engine:
        off = {"engine_args": {"hf_overrides": {"head_dtype": None}}}
        yield Toggle(
            "head_dtype",
            "rollout",
            own,
            "as the weights",
            "an LM head of the weights’ dtype in the engine",
            off,
        )
    can_trainer = _dtype(trainer.told, trainer.config.scorer.dtype) in SIXTEEN_BITS
    on = {"engine_args": {"hf_overrides": {"head_dtype": "float32"}}}
    override = ("--engine-arg", 'hf_overrides={"head_dtype": "float32"}')
    value, trained = ("float32" if has else "as the weights" for has in (in_engine, in_trainer))
    if can_engine and not in_engine:
        yield Toggle(
            "head_dtype",
            "rollout",
            value,
            "float32",
            "an LM head in float32 in the engine",
            on,
            flags=override,
        )
    if can_engine and in_engine:
        off = {"engine_args": {"hf_overrides": {"head_dtype": None}}}
        yield Toggle(
            "head_dtype",
            "rollout",
            value,
            "as the weights",
            "no LM head in float32 in the engine",
            off,
        )
    if can_trainer:
        flags = () if in_trainer else ("--float32-head",)
        words = (
            "no LM head in float32 in the trainer"
            if in_trainer
            else "an LM head in float32 in the trainer"
        )
        yield Toggle(
            "head_dtype",
            "trainer",
            trained,
            "as the weights" if in_trainer else "float32",
            words,
            trainer={"float32_head": not in_trainer},
            flags=flags,
        )
    if can_engine and can_trainer and not in_engine and not in_trainer:
        yield Toggle(
            "head_dtype",
            "both",
            value,
            "float32",
            "an LM head in float32 on both sides",
            on,
            {"float32_head": True},
            flags=(*override, "--float32-head"),
        )


def _sampler(rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    """The sampler settings, applied to the trainer's logits as in the engine."""
    for name in _SUPPORT:
        rolled, trained = getattr(rollout.sampling, name), getattr(trainer.sampling, name)
        if rolled != trained:
            yield Toggle(
                name,
                "trainer",
                trained,
                rolled,
                f"the rollout’s {name.replace('_', '-')} in the trainer",
                trainer={name: rolled},
                flags=(),
            )


def _cache(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    found = rollout.arguments.get("kv_cache_dtype")
    if found not in (None, "auto", _dtype(rollout.told, rollout.dtype)):
        yield Toggle(
            "kv_cache_dtype",
            "rollout",
            found,
            "auto",
            "a KV cache in the dtype of the weights",
            {"engine_args": {"kv_cache_dtype": None}},
            flags=("--kv-cache-dtype", "auto"),
        )


def _overrides(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    for key, value in rollout.overrides.items():
        if key != "head_dtype":
            yield Toggle(
                f"hf_overrides.{key}",
                "rollout",
                value,
                None,
                f"the model's own {key} in the engine",
                {"engine_args": {"hf_overrides": {key: None}}},
                flags=(),
            )


def _argument(
    name: str, better: Any, words: str, when: Callable[[Any], bool], setting: str = ""
) -> Callable[..., Iterator[Toggle]]:
    """A rule for an argument of vLLM, which applies if `when` holds for its resolved value."""

    def rule(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
        value = rollout.told.get(setting or name, rollout.arguments.get(name))
        if rollout.engine == "vllm" and when(value):
            flag = ("--engine-arg", f"{name}={_typed(better)}")
            yield Toggle(
                setting or name,
                "rollout",
                value,
                better,
                words,
                {"engine_args": {name: better}},
                flags=flag,
            )

    return rule


def _typed(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _without_restart(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    """Changes that need no restart of the engine."""
    batch = rollout.told.get("max_num_seqs") or rollout.told.get("batch_size")
    if batch != 1:
        name = "batch_size" if rollout.engine == "hf" else "max_num_seqs"
        yield Toggle(
            name,
            "rollout",
            batch,
            1,
            "one response at a time, or batch-invariant kernels (VLLM_BATCH_INVARIANT=1)",
            {"alone": True},
            flags=("--engine-arg", f"{name}=1"),
        )
    if rollout.engine == "vllm" and rollout.told.get("prefix_caching", True):
        yield Toggle(
            "prefix_caching",
            "rollout",
            True,
            False,
            "no prefix cache",
            {"cached": False},
            flags=("--engine-arg", "enable_prefix_caching=false"),
        )


def _on_gpu(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    if rollout.engine != "vllm" or rollout.told.get("device") in (None, "cpu"):
        return
    yield Toggle(
        "batch_invariant",
        "rollout",
        False,
        True,
        "batch-invariant kernels (VLLM_BATCH_INVARIANT=1)",
        {"environment": dict(SWITCHES)},
    )
    backend = rollout.told.get("attention_backend")
    better = "TRITON_ATTN" if backend != "TRITON_ATTN" else "FLASH_ATTN"
    yield Toggle(
        "attention_backend",
        "rollout",
        backend,
        better,
        "another attention backend",
        {"engine_args": {"attention_backend": better}},
        flags=("--engine-arg", f"attention_backend={better}"),
    )


def _trainer_attention(_rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    used = trainer.config.scorer.attn
    if used in ("sdpa", "eager", None):
        better = "sdpa" if used == "eager" else "eager"
        yield Toggle(
            "attn_implementation",
            "trainer",
            used,
            better,
            f"{better} attention in the trainer",
            trainer={"attn": better},
            flags=("--attn", better),
        )


def _trainer_rest(_rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    if trainer.config.scorer.merge_adapter:
        yield Toggle(
            "adapter_merged",
            "trainer",
            True,
            False,
            "the adapter unmerged, beside the weights",
            trainer={"merge_adapter": False},
            flags=("--no-merge-adapter",),
        )
    yield Toggle(
        "token_budget",
        "trainer",
        trainer.config.scorer.token_budget,
        "another shape",
        "the micro-batches of the training step",
        trainer={"other_shape": True},
    )


_RULES: tuple[Callable[[RolloutSide, TrainerSide], Iterator[Toggle]], ...] = (
    _sampler,
    _cache,
    _overrides,
    _dtypes,
    _heads,
    _trainer_attention,
    _trainer_rest,
    _without_restart,
    _on_gpu,
    _argument("quantization", None, "weights as they are trained", bool),
    _argument("speculative_config", None, "no speculative decoding", bool),
    _argument("enable_chunked_prefill", False, "prefill in one piece", bool, "chunked_prefill"),
    _argument(
        "enforce_eager", True, "neither graphs nor compilation", lambda value: value is False
    ),
    _argument("tensor_parallel_size", 1, "one GPU", lambda value: (value or 1) > 1),
)
