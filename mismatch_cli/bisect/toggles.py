"""The settings that a search changes one at a time: when each applies, what it changes on which
side, what to type.

Settings that need no engine restart come first, then those that caused large gaps elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from mismatch_cli.bisect.experiments import Change
from mismatch_cli.bisect.side_settings import SAMPLER, RolloutSide, TrainerSide, restarts
from mismatch_cli.limits.causes import CAUSES, cause_rank
from mismatch_cli.models.torch_settings import SIXTEEN_BITS, sends_rounded

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
        """Whether an engine has to be started for this change."""
        return restarts(self.rollout)

    @property
    def order(self) -> tuple[bool, int]:
        """What needs no restart first, then by the ranking of causes."""
        side = "trainer" if self.side == "trainer" else "rollout"
        setting = self.setting.partition(".")[0]
        return self.starts, cause_rank(f"{side}.{setting}") or len(CAUSES)


def toggles(rollout: RolloutSide, trainer: TrainerSide) -> list[Toggle]:
    """The settings of these two sides that can be changed, in the order to try them."""
    applicable = chain.from_iterable(rule(rollout, trainer) for rule in _RULES)
    return sorted(applicable, key=lambda toggle: toggle.order)


def _dtypes(rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    """One dtype on both sides where they differ; float32 on both where they share one of 16
    bits.
    """
    dtype_rollout, dtype_trainer = _rollout_dtype(rollout), _trainer_dtype(trainer)
    differ = dtype_rollout != dtype_trainer
    if differ:
        yield Toggle(
            "dtype",
            "rollout",
            dtype_rollout,
            dtype_trainer,
            f"the rollout in {dtype_trainer}, like the trainer",
            {"dtype": dtype_trainer},
            flags=("--rollout-dtype", dtype_trainer),
        )
        yield Toggle(
            "dtype",
            "trainer",
            dtype_trainer,
            dtype_rollout,
            f"the trainer in {dtype_rollout}, like the rollout",
            trainer={"trainer_dtype": dtype_rollout},
            flags=("--trainer-dtype", dtype_rollout),
        )
    if sends_rounded(dtype_trainer, dtype_rollout):
        yield Toggle(
            "rounded_weights",
            "trainer",
            dtype_trainer,
            dtype_rollout,
            f"log π with the weights rounded to {dtype_rollout}, as the engine has them",
            trainer={"rounded_to": dtype_rollout},
        )
    if dtype_rollout in SIXTEEN_BITS or dtype_trainer in SIXTEEN_BITS:
        yield Toggle(
            "dtype",
            "both",
            f"{dtype_rollout} / {dtype_trainer}" if differ else dtype_rollout,
            "float32",
            "float32 on both sides, or float16",
            {"dtype": "float32"},
            {"trainer_dtype": "float32", "float32_head": False},
            flags=("--rollout-dtype", "float32", "--trainer-dtype", "float32"),
            floor=not differ,
        )


def _rollout_dtype(rollout: RolloutSide) -> str:
    """The dtype that the engine computed in; its description has it where the setting is `auto`."""
    return str(rollout.described.get("dtype") or rollout.dtype)


def _trainer_dtype(trainer: TrainerSide) -> str:
    """The dtype that the trainer computed in; its description has it where the setting is `auto`."""
    return str(trainer.described.get("dtype") or trainer.config.scorer.dtype)


_FLOAT32_HEAD = {"engine_args": {"hf_overrides": {"head_dtype": "float32"}}}
_HEAD_OF_MODEL = {"engine_args": {"hf_overrides": {"head_dtype": None}}}
_FLOAT32_HEAD_FLAGS = ("--engine-arg", 'hf_overrides={"head_dtype": "float32"}')


def _engine_may_have_float32_head(rollout: RolloutSide) -> bool:
    """Whether the engine's LM head can be more precise than its weights: vLLM's, in 16 bits."""
    return rollout.engine == "vllm" and _rollout_dtype(rollout) in SIXTEEN_BITS


def _engine_head(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    """An LM head in float32 in the engine, or not, if it has one; or undo a lower precision."""
    own = rollout.overrides.get("head_dtype")
    if not _engine_may_have_float32_head(rollout):
        if own in SIXTEEN_BITS:
            yield Toggle(
                "head_dtype",
                "rollout",
                own,
                "as the weights",
                "an LM head of the weights’ dtype in the engine",
                _HEAD_OF_MODEL,
            )
    elif own == "float32":
        yield Toggle(
            "head_dtype",
            "rollout",
            "float32",
            "as the weights",
            "no LM head in float32 in the engine",
            _HEAD_OF_MODEL,
        )
    else:
        yield Toggle(
            "head_dtype",
            "rollout",
            "as the weights",
            "float32",
            "an LM head in float32 in the engine",
            _FLOAT32_HEAD,
            flags=_FLOAT32_HEAD_FLAGS,
        )


def _trainer_head(_rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    """An LM head in float32 in a trainer of 16 bits, or not, if it has one."""
    if _trainer_dtype(trainer) not in SIXTEEN_BITS:
        return
    if trainer.config.scorer.float32_head:
        yield Toggle(
            "head_dtype",
            "trainer",
            "float32",
            "as the weights",
            "no LM head in float32 in the trainer",
            trainer={"float32_head": False},
        )
    else:
        yield Toggle(
            "head_dtype",
            "trainer",
            "as the weights",
            "float32",
            "an LM head in float32 in the trainer",
            trainer={"float32_head": True},
            flags=("--float32-head",),
        )


def _both_heads(rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    """An LM head in float32 on both sides, where neither has one and both can."""
    has_one = rollout.overrides.get("head_dtype") == "float32" or trainer.config.scorer.float32_head
    both_can = _engine_may_have_float32_head(rollout) and _trainer_dtype(trainer) in SIXTEEN_BITS
    if both_can and not has_one:
        yield Toggle(
            "head_dtype",
            "both",
            "as the weights",
            "float32",
            "an LM head in float32 on both sides",
            _FLOAT32_HEAD,
            {"float32_head": True},
            flags=(*_FLOAT32_HEAD_FLAGS, "--float32-head"),
        )


def _sampler(rollout: RolloutSide, trainer: TrainerSide) -> Iterator[Toggle]:
    """The sampler settings, applied to the trainer's logits as in the engine."""
    for name in SAMPLER:
        of_rollout, of_trainer = getattr(rollout.sampling, name), getattr(trainer.sampling, name)
        if of_rollout != of_trainer:
            yield Toggle(
                name,
                "trainer",
                of_trainer,
                of_rollout,
                f"the rollout’s {name.replace('_', '-')} in the trainer",
                trainer={name: of_rollout},
            )


def _cache(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    cache_dtype = rollout.arguments.get("kv_cache_dtype")
    if cache_dtype not in (None, "auto", _rollout_dtype(rollout)):
        yield Toggle(
            "kv_cache_dtype",
            "rollout",
            cache_dtype,
            "auto",
            "a KV cache in the dtype of the weights",
            {"engine_args": {"kv_cache_dtype": None}},
            flags=("--kv-cache-dtype", "auto"),
        )


def _overrides(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    for key, value in rollout.overrides.items():
        if key != "head_dtype":  # `_engine_head` has it
            yield Toggle(
                f"hf_overrides.{key}",
                "rollout",
                value,
                None,
                f"the model's own {key} in the engine",
                {"engine_args": {"hf_overrides": {key: None}}},
            )


def _argument(
    name: str, better: Any, change: str, when: Callable[[Any], bool], setting: str = ""
) -> Callable[..., Iterator[Toggle]]:
    """A rule for an argument of vLLM, which applies if `when` holds for its resolved value."""
    setting = setting or name

    def rule(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
        value = rollout.described.get(setting, rollout.arguments.get(name))
        if rollout.engine == "vllm" and when(value):
            yield Toggle(
                setting,
                "rollout",
                value,
                better,
                change,
                {"engine_args": {name: better}},
                flags=("--engine-arg", f"{name}={_typed(better)}"),
            )

    return rule


def _typed(value: bool | int | None) -> str:
    return json.dumps(value)


def _batching(rollout: RolloutSide, _trainer: TrainerSide) -> Iterator[Toggle]:
    """Changes of the batch and its cache, which need no restart of the engine."""
    batch = rollout.described.get("max_num_seqs") or rollout.described.get("batch_size")
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
    if rollout.engine == "vllm" and rollout.described.get("prefix_caching", True):
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
    """vLLM's kernels, which can be chosen only on a GPU."""
    if rollout.engine != "vllm" or rollout.described.get("device") in (None, "cpu"):
        return
    yield Toggle(
        "batch_invariant",
        "rollout",
        False,
        True,
        "batch-invariant kernels (VLLM_BATCH_INVARIANT=1)",
        {"environment": dict(SWITCHES)},
    )
    backend = rollout.described.get("attention_backend")
    better = "FLASH_ATTN" if backend == "TRITON_ATTN" else "TRITON_ATTN"
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
    attention = trainer.config.scorer.attn
    if attention in ("sdpa", "eager", None):
        better = "sdpa" if attention == "eager" else "eager"
        yield Toggle(
            "attn_implementation",
            "trainer",
            attention,
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


# Toggles of one rank are tried in this order.
_RULES: tuple[Callable[[RolloutSide, TrainerSide], Iterator[Toggle]], ...] = (
    _sampler,
    _cache,
    _overrides,
    _dtypes,
    _engine_head,
    _trainer_head,
    _both_heads,
    _trainer_attention,
    _trainer_rest,
    _batching,
    _on_gpu,
    _argument("quantization", None, "weights as they are trained", bool),
    _argument("speculative_config", None, "no speculative decoding", bool),
    _argument("enable_chunked_prefill", False, "prefill in one piece", bool, "chunked_prefill"),
    _argument(
        "enforce_eager", True, "neither graphs nor compilation", lambda value: value is False
    ),
    _argument("tensor_parallel_size", 1, "one GPU", lambda value: (value or 1) > 1),
)
