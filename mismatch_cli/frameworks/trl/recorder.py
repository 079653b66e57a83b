"""TRL's `GRPOTrainer`: `record(trainer, "recorded")` before `trainer.train()`."""

from typing import Any

import numpy as np

from mismatch_cli.frameworks.recording._responses import copied
from mismatch_cli.frameworks.recording.recorder import Recorder, after


def record(trainer: Any, folder: str, every: int = 1) -> Recorder:
    """Record what the trainer samples from now on: vLLM's log μ, and log π from TRL's own pass
    at the same weights.
    """
    sample, rank = trainer._generate_and_score_completions, trainer.accelerator.process_index
    recorder = Recorder(
        folder,
        every,
        rank,
        lambda: run_facts(trainer),
        tokenizer=getattr(trainer, "_tokenizer", None),
        resume=lambda: trainer.state.global_step > 0,
    )

    def keep(batch: dict[str, Any]) -> None:
        if trainer.model.training:
            recorder.add_padded(**columns(trainer, batch))

    # A callback does not see the batch
    trainer._generate_and_score_completions = after(sample, keep)
    return recorder


def run_facts(trainer: Any) -> dict[str, Any]:
    """The run's facts from the trainer's settings."""
    args, model, engine = (
        trainer.args,
        trainer.model.name_or_path,
        getattr(trainer, "vllm_generation", None),
    )
    rollout = {"engine": "vllm" if engine else "transformers", "model": model}
    if colocated := getattr(engine, "llm", None):  # a server does not report its settings
        config = colocated.llm_engine.vllm_config
        rollout |= {
            "dtype": config.model_config.dtype,
            "kv_cache_dtype": config.cache_config.cache_dtype,
        }
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else trainer.model.dtype
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    return {
        "rollout": rollout,
        "trainer": {"name": "TRL", "model": model, "dtype": dtype},
        "sampling": sampling,
    }


def columns(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A TRL batch for `add_padded`; responses hidden by `mask_truncated_completions` are
    recorded as untrained.
    """
    ids, mask, pad = (
        batch["completion_ids"].cpu().numpy(),
        batch["completion_mask"],
        trainer._tokenizer.pad_token_id,
    )
    mask, (number, width), rank = copied(mask) > 0, ids.shape, trainer.accelerator.process_index
    last_S = np.where(mask.any(1), mask.sum(1), width - (ids != pad)[:, ::-1].argmax(1)) - 1
    ended = np.isin(ids[np.arange(number), last_S], [*trainer.eos_token_ids, pad])
    # All ranks
    all_SR, weights = (
        np.transpose([*trainer._logs["rewards"].values()]),
        trainer.reward_weights.tolist(),
    )
    reward_SR = all_SR[rank * number :][:number] * (
        weights if all_SR.shape[1] == len(weights) else np.nan
    )
    return {
        **dict.fromkeys(("step", "version_rollout", "version_trainer"), trainer.state.global_step),
        "prompt_ids": batch["prompt_ids"],
        "prompt_mask": batch["prompt_mask"],
        "response_ids": ids,
        "response_mask": np.arange(width) <= last_S[:, None],
        "advantage": batch["advantages"],
        "logp_rollout": batch.get("sampling_per_token_logps"),
        "logp_trainer": batch.get("old_per_token_logps"),
        "loss_mask": mask & (copied(batch.get("tool_mask", mask)) > 0),
        "reward": np.where(np.isnan(reward_SR).all(1), np.nan, np.nansum(reward_SR, 1)),
        "finish_reason": [*np.where(ended, "stop", "length")],
    }
