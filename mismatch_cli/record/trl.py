"""TRL's `GRPOTrainer`: `record(trainer, "recorded")` before `trainer.train()`."""

from typing import Any

import numpy as np

from mismatch_cli.record._responses import copied
from mismatch_cli.record.recorder import Recorder


def record(trainer: Any, folder: str, every: int = 1) -> Recorder:
    """Record what the trainer samples from now on: log μ of vLLM, and log π of TRL's own pass at the same weights."""
    rank, tokenizer = trainer.accelerator.process_index, getattr(trainer, "_tokenizer", None)
    recorder = Recorder(folder, every, rank, lambda: told(trainer), tokenizer=tokenizer)
    sample = trainer._generate_and_score_completions  # a callback does not see the batch
    trainer._generate_and_score_completions = recorder.after(sample, lambda batch: columns(trainer, batch))
    return recorder


def told(trainer: Any) -> dict[str, Any]:
    """What the trainer's own settings say."""
    args, model, engine = trainer.args, trainer.model, getattr(trainer, "vllm_generation", None)
    rollout = {"engine": "vllm" if engine else "transformers", "model": model.name_or_path}
    if colocated := getattr(engine, "llm", None):  # a server tells nothing
        config = colocated.llm_engine.vllm_config
        rollout |= {"dtype": config.model_config.dtype, "kv_cache_dtype": config.cache_config.cache_dtype}
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else model.dtype
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    trainer_side = {"name": "TRL", "model": model.name_or_path, "dtype": dtype}
    return {"trainer": trainer_side, "rollout": rollout, "sampling": sampling}


def columns(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of TRL's for `add_padded`; responses that `mask_truncated_completions` hides are recorded untrained."""
    if not trainer.model.training:
        return {}
    batch, pad = {name: copied(value) for name, value in batch.items()}, trainer._tokenizer.pad_token_id
    ids, mask, rank = batch["completion_ids"], batch["completion_mask"] > 0, trainer.accelerator.process_index
    tokens = mask | (~mask.any(1, keepdims=True) & (ids != pad))
    ended = np.isin(ids[np.arange(len(ids)), tokens.sum(1) - 1], [*trainer.eos_token_ids, pad])
    each = np.transpose([*trainer._logs["rewards"].values()]) * trainer.reward_weights.tolist()  # of all ranks
    rewards = np.where(np.isnan(each).all(1), np.nan, np.nansum(each, 1))
    return {**dict.fromkeys(("step", "version_rollout", "version_trainer"), trainer.state.global_step),
            "advantage": batch["advantages"], "prompt_ids": batch["prompt_ids"], "prompt_mask": batch["prompt_mask"],
            "response_ids": ids, "response_mask": tokens, "loss_mask": mask & (batch.get("tool_mask", mask) > 0),
            "logp_rollout": batch.get("sampling_per_token_logps"), "logp_trainer": batch.get("old_per_token_logps"),
            "reward": rewards[rank * len(ids) :], "finish_reason": [*np.where(ended, "stop", "length")]}  # fmt: skip
