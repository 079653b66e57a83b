"""What TRL's GRPOTrainer hands to its loss, as JSONL or Parquet: a response or a whole batch per line or row.

The names are those of `_generate_and_score_completions` in `trl/trainer/grpo_trainer.py`; read at 1.16.0. Prompts are
padded on the left and completions on the right, each with a mask; `tool_mask` is 0 at tool output. Log μ is there where
vLLM samples, and log π of a pass before the update with it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from mismatch_cli.errors import MismatchError
from mismatch_cli.importers import plain
from mismatch_cli.importers._guess import whose
from mismatch_cli.importers._sources import Peek, Source, peek, records_of
from mismatch_cli.importers._tally import Tally

TITLE = "TRL's GRPO batches"
FILES = "*.jsonl, *.parquet"
ENABLE = "mismatch_cli.record.trl writes a trace; TRL itself saves no token ids (the guide on record)"
PI = "recomputed"
HOLDS = "old_per_token_logps, recomputed before the update; with per_token_logps the current ones too"
SHIFT = "none: index i describes completion_ids[i]"
PADDING = "prompts are cut by prompt_mask, completions behind the last 1 of completion_mask"
AVERAGING = (
    "mean over tokens of the batch (loss_type dapo, the default); with grpo the mean of the means over responses"
)

# the column of a trace: what TRL or its users call it, the first that is there
_NAMES = {
    "response_ids": ("completion_ids",),
    "response_mask": ("completion_mask",),
    "loss_mask": ("tool_mask", "env_mask"),
    "logp_rollout": ("sampling_per_token_logps", "logprobs"),
    "logp_trainer": ("per_token_logps", "old_per_token_logps"),
    "advantage": ("advantages",),
    "reward": ("rewards",),
    "step": ("global_step",),
}


_ROLLOUT = {"logp_rollout", *_NAMES["logp_rollout"]}


def recognises(peek: Peek) -> bool:
    """Token ids under TRL's names, unless log μ goes by a name that TRL has not."""
    if peek.source.kind not in ("jsonl", "parquet") or not peek.has("prompt_ids", "completion_ids"):
        return False
    others = peek.keys - {name for names in _NAMES.values() for name in names}
    return bool(peek.keys & _ROLLOUT) or not any(whose(name) in ("rollout", "plain") for name in others)


def blocks(sources: Sequence[Source], tally: Tally, advance: Callable[[int], None]) -> Iterator[tuple[pa.Table, str]]:
    return plain.blocks([replace(source, columns=_columns(source)) for source in sources], tally, advance)


def _columns(source: Source) -> dict[str, str]:
    there = set(peek(source).keys)
    if source.kind == "jsonl":
        there = {name for record in records_of(source.path) for name, value in record.items() if value is not None}
    columns = {ours: name for ours, names in _NAMES.items() for name in names[::-1] if name in there}
    if columns.get("logp_trainer") == "per_token_logps" and "old_per_token_logps" in there:
        columns["logp_recomputed"] = "old_per_token_logps"
    if there and not there & _ROLLOUT:
        raise MismatchError(
            f"{source.path} holds no sampling_per_token_logps: TRL has log-probabilities of the rollout engine only "
            "where vLLM samples. Train with use_vllm=True, and see the guide on record."
        )
    return columns
