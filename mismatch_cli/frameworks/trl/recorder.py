"""TRL's `GRPOTrainer`: `record(trainer, "recorded")` before `trainer.train()`."""

from typing import Any

import numpy as np

from mismatch_cli.frameworks.recording._responses import copy_to_host
from mismatch_cli.frameworks.recording.recorder import Recorder, after


def record(trainer: Any, folder: str, every: int = 1) -> Recorder:
    """Record what the trainer samples from now on: vLLM's log μ, and log π from TRL's own pass
    at the same weights.
    """
    sample = trainer._generate_and_score_completions
    recorder = Recorder(
        folder,
        every,
        trainer.accelerator.process_index,
        lambda: run_facts(trainer),
        tokenizer=getattr(trainer, "_tokenizer", None),
        resume=lambda: trainer.state.global_step > 0,
    )

    def keep(batch: dict[str, Any]) -> None:
        if trainer.model.training:
            recorder.add_padded(**columns(trainer, batch))

    # A callback of transformers does not see the batch, so a private method is wrapped.
    trainer._generate_and_score_completions = after(sample, keep)
    return recorder


def run_facts(trainer: Any) -> dict[str, Any]:
    """The run's facts from the trainer's settings."""
    args = trainer.args
    model = trainer.model.name_or_path
    engine = getattr(trainer, "vllm_generation", None)
    rollout = {"engine": "vllm" if engine else "transformers", "model": model}
    colocated = getattr(engine, "llm", None)  # a server does not report its settings
    if colocated:
        config = colocated.llm_engine.vllm_config
        rollout["dtype"] = config.model_config.dtype
        rollout["kv_cache_dtype"] = config.cache_config.cache_dtype
    # With mixed precision the model's own dtype is that of its weights, not of its pass.
    if args.bf16:
        dtype = "bfloat16"
    elif args.fp16:
        dtype = "float16"
    else:
        dtype = trainer.model.dtype
    return {
        "rollout": rollout,
        "trainer": {"name": "TRL", "model": model, "dtype": dtype},
        "sampling": {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")},
    }


def columns(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A TRL batch for `add_padded`; responses hidden by `mask_truncated_completions` are
    recorded as untrained.
    """
    ids_ST = batch["completion_ids"].cpu().numpy()
    mask_ST = copy_to_host(batch["completion_mask"]) > 0
    number, width = ids_ST.shape
    pad = trainer._tokenizer.pad_token_id
    # The mask of a hidden response is empty: its length follows from the padding at its end.
    padding_S = (ids_ST != pad)[:, ::-1].argmax(1)
    last_S = np.where(mask_ST.any(1), mask_ST.sum(1), width - padding_S) - 1
    has_ended_S = np.isin(ids_ST[np.arange(number), last_S], [*trainer.eos_token_ids, pad])
    step = trainer.state.global_step
    return {
        "step": step,
        "version_rollout": step,
        "version_trainer": step,
        "prompt_ids": batch["prompt_ids"],
        "prompt_mask": batch["prompt_mask"],
        "response_ids": ids_ST,
        "response_mask": np.arange(width) <= last_S[:, None],
        "advantage": batch["advantages"],
        "logp_rollout": batch.get("sampling_per_token_logps"),
        "logp_trainer": batch.get("old_per_token_logps"),
        "loss_mask": mask_ST & (copy_to_host(batch.get("tool_mask", mask_ST)) > 0),
        "reward": _rewards(trainer, number),
        "finish_reason": [*np.where(has_ended_S, "stop", "length")],
    }


def _rewards(trainer: Any, number: int) -> np.ndarray:
    """Σ weight · reward of this rank's responses over R functions; NaN where none gave a reward."""
    # TRL logs the rewards of all ranks, one after another.
    all_SR = np.transpose([*trainer._logs["rewards"].values()])
    rewards_SR = all_SR[trainer.accelerator.process_index * number :][:number]
    weights = trainer.reward_weights.tolist()
    if len(weights) != rewards_SR.shape[1]:
        weights = np.nan  # it is unknown which weight is whose
    weighted_SR = rewards_SR * weights
    return np.where(np.isnan(weighted_SR).all(1), np.nan, np.nansum(weighted_SR, 1))
