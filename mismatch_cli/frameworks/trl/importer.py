"""What TRL's GRPOTrainer passes to its loss, as JSONL or Parquet: a response or a whole batch per
line or row.

The names are those of `_generate_and_score_completions` in `trl/trainer/grpo_trainer.py`. Prompts
are padded on the left and completions on the right, each with a mask; `tool_mask` is 0 at tool
output. Where vLLM samples, there is log μ, and log π from a pass before the update.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.guess import may_be_sampled
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.sources import DumpFile, FileHead
from mismatch_cli.frameworks.plain import importer as plain

TITLE = "TRL's GRPO batches"
FILES = "*.jsonl, *.parquet"
ENABLE = (
    "mismatch_cli.frameworks.trl.record writes a trace; TRL itself saves no token ids (mismatch-cli "
    "guide trl)"
)
SAVES_IDS = False
PI = "recomputed"
HOLDS = (
    "old_per_token_logps, recomputed before the update; with per_token_logps also the current ones"
)
SHIFT = "none: index i describes completion_ids[i]"
PADDING = "prompts are cut by prompt_mask, completions after the last 1 of completion_mask"
AVERAGING = (
    "mean over tokens of the batch (loss_type dapo, the default); with grpo the mean of the "
    "means over responses"
)

# TRL's and its users' names of a trace's columns; the first one under which a row has a value
# counts
_NAMES = {
    "completion_mask": "response_mask",
    "tool_mask": "loss_mask",
    "env_mask": "loss_mask",
    "sampling_per_token_logps": "logp_rollout",
    "logprobs": "logp_rollout",
    "per_token_logps": "logp_trainer",
    "old_per_token_logps": "logp_recomputed",
    "advantages": "advantage",
    "rewards": "reward",
    "global_step": "step",
}
_ROLLOUT = {"logp_rollout", *(name for name, ours in _NAMES.items() if ours == "logp_rollout")}


def recognises(peek: FileHead) -> bool:
    """Token ids under TRL's names, unless log μ has a name that TRL does not use."""
    if peek.source.kind not in ("jsonl", "parquet") or not peek.has("prompt_ids", "completion_ids"):
        return False
    others = peek.keys - {*_NAMES, "completion_ids"}
    return not peek.keys.isdisjoint(_ROLLOUT) or not any(map(may_be_sampled, others))


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    columns = {"response_ids": "completion_ids"}
    renamed = [replace(source, columns=columns, also=_NAMES) for source in sources]
    rows = sampled = 0
    for table, where in plain.blocks(renamed, tally, advance):
        rows += table.num_rows
        if "logp_rollout" in table.column_names:
            sampled += table.num_rows - table.column("logp_rollout").null_count
        yield _with_log_pi(table), where
    if rows and not sampled:
        raise MismatchError(
            f"{sources[0].path} holds no sampling_per_token_logps: TRL has log-probabilities of "
            "the rollout engine only where vLLM samples. Train with use_vllm=True; see "
            "mismatch-cli guide trl."
        )


def _with_log_pi(table: pa.Table) -> pa.Table:
    """Use the old log-probabilities as log π where a response has none at the current weights."""
    if "logp_recomputed" not in table.column_names:
        return table
    columns = {name: table.column(name) for name in table.column_names}
    old = columns.pop("logp_recomputed")
    current = columns.get("logp_trainer", pa.nulls(len(old), old.type))
    columns["logp_trainer"] = pc.coalesce(current, old)
    # Where they serve as log π they are not also recomputed: the two would agree perfectly.
    columns["logp_recomputed"] = pc.if_else(pc.is_valid(current), old, pa.scalar(None, old.type))
    return pa.table(columns)
