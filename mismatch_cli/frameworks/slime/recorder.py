"""slime: `--rollout-data-postprocess-path mismatch_cli.frameworks.slime.record`, into the
folder `$MISMATCH_RECORD`.
"""

import os
from typing import Any

from mismatch_cli.frameworks.recording.recorder import Recorder, never_raises

_FIELDS = {
    "logp_rollout": "rollout_log_probs",
    "logp_trainer": "log_probs",
    "advantage": "advantages",
    "loss_mask": "loss_masks",
    "reward": "local_raw_reward",
    "sample_index": "sample_indices",
}
_RECORDERS: dict[int, Recorder] = {}  # by rank; this process is one


@never_raises
def record(
    args: Any, rollout_id: int | None = None, rollout_data: dict[str, Any] | None = None
) -> None:
    """Called on every rank before it trains; in a data-parallel group, the rank with the
    log-probs records.
    """
    from megatron.core import mpu

    # Ranks of a tensor-parallel group hold the same responses: the first one records them.
    if not mpu.is_pipeline_last_stage() or mpu.get_tensor_model_parallel_rank():
        return
    rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    data = rollout_data or {}
    if "tokens" not in data:
        raise ValueError("this hook got no data: use --dump-details instead, and import the dump")
    if rank not in _RECORDERS:
        _RECORDERS[rank] = Recorder(
            os.environ.get("MISMATCH_RECORD", "recorded"),
            rank=rank,
            manifest=lambda: run_facts(args),
            resume=bool(rollout_id),
        )
    present = {ours: data[name] for ours, name in _FIELDS.items() if data.get(name) is not None}
    for number, tokens in enumerate(data["tokens"]):
        # Counted from the front: the last 0 tokens of an empty response would be all of them.
        start = len(tokens) - data["response_lengths"][number]
        _RECORDERS[rank].add(
            step=rollout_id,
            finish_reason="length" if data["truncated"][number] else "stop",
            prompt_ids=tokens[:start],
            response_ids=tokens[start:],
            **{ours: values[number] for ours, values in present.items()},
        )


def run_facts(args: Any) -> dict[str, Any]:
    """The run's facts from slime's flags."""
    dtype = "float32"
    if args.bf16:
        dtype = "bfloat16"
    elif args.fp16:
        dtype = "float16"
    return {
        "rollout": {"engine": "sglang", "model": args.hf_checkpoint},
        "trainer": {"name": "Megatron", "model": args.hf_checkpoint, "dtype": dtype},
        "sampling": {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p},
    }
