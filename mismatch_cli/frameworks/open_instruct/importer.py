"""open-instruct's rollouts: JSONL, one response per line, with log μ and advantage but without log
π.

Written by `save_rollouts_to_disk` in `open_instruct/rl_utils.py`, without a mask: tokens of a
response that called tools are masked as tool output where their log-probability is exactly 0.
`prompt_idx` begins at 0 in every step, so token ids identify the prompts.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import NOTE
from mismatch_cli.frameworks.importing.sources import DumpFile, FileHead, jsonl_tables

TITLE = "open-instruct --save_traces"
FILES = "SAVE_PATH/RUN_rollouts_NNNNNN.jsonl"
ENABLE = "--save_traces --rollouts_save_path SAVE_PATH"
PI = None
HOLDS = "no π: only μ, as the engine computed it"
SHIFT = "none: logprobs[i] describes response_tokens[i]"
PADDING = "none: prompt_tokens and response_tokens are separate"
AVERAGING = (
    "one advantage per response; the loss is a mean over tokens unless --loss_denominator says "
    "otherwise"
)

TOOLS = (
    "tokens count as tool output and are masked (log-probability 0 in a response that called tools)"
)
_SCHEMA = pa.schema(
    {
        "step": pa.int32(),
        "sample_idx": pa.int32(),
        "prompt_tokens": pa.list_(pa.int32()),
        "response_tokens": pa.list_(pa.int32()),
        "reward": pa.float32(),
        "advantage": pa.float32(),
        "finish_reason": pa.string(),
        "logprobs": pa.list_(pa.float32()),
        "request_info": pa.struct({"tool_calleds": pa.bool_()}),
    }
)
_NAMES = {
    "sample_idx": "sample_index",
    "prompt_tokens": "prompt_ids",
    "response_tokens": "response_ids",
    "logprobs": "logp_rollout",
}


def recognises(peek: FileHead) -> bool:
    return peek.source.kind == "jsonl" and peek.has("prompt_tokens", "response_tokens")


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    for source in sources:
        for table in jsonl_tables(source, _SCHEMA, tally, advance):
            yield _block(table), source.name


def _block(table: pa.Table) -> pa.Table:
    columns = _lists.columns_of(table.rename_columns(_NAMES))
    called = pc.struct_field(columns.pop("request_info"), "tool_calleds")
    called_S = np.asarray(pc.fill_null(called, False))
    if called_S.any():
        columns |= _mask(columns["logp_rollout"], called_S)
    return pa.table(columns)


def _mask(logp: pa.Array, called_S: np.ndarray) -> dict[str, pa.Array]:
    """A mask as long as the log-probabilities: a response with fewer of them than tokens is left
    out anyway.
    """
    lengths_S = _lists.lengths_of(logp)
    tool_T = np.repeat(called_S, lengths_S) & (_lists.flat(logp) == 0)
    tool_S = np.bincount(_lists.rows_of(lengths_S)[tool_T], minlength=len(logp)).astype(np.int64)
    mask = _lists.from_flat(~tool_T, lengths_S, _lists.is_null(logp))
    return {"loss_mask": mask, NOTE + TOOLS: pa.array(tool_S)}
