"""NeMo-RL's training data: `train_data_stepN.jsonl`, one sample per line, right-padded to the
longest of the step.

Written by `log_batched_dict_as_jsonl` in `nemo_rl/utils/logger.py`, called at the end of each step
in `algorithms/grpo.py`, `grpo_sync.py` and `ppo.py`. Each line is a slice of length 1, so every
value is wrapped in a list of one; unwrapped values are accepted too. With dynamic sampling
`filtered_rewards` belongs to the line's sample, and `rewards` to others. Where the forward pass for
prev_logprobs is skipped (force_on_policy_ratio), it is all 0.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import NO_IDS, NOTE, split
from mismatch_cli.frameworks.importing.sources import DumpFile, FileHead, jsonl_tables, peek
from mismatch_cli.trace import foreign_values

TITLE = "NeMo-RL train_data"
FILES = "LOG_DIR/train_data_stepN.jsonl"
ENABLE = "on by default, off with env.should_log_nemo_gym_responses"
PI = "recomputed"
HOLDS = (
    "prev_logprobs, recomputed before the update; in asynchronous runs the weights may be newer "
    "than the sampler's"
)
SHIFT = "index i describes token i; index 0 is unused (the loss reads [:, 1:])"
PADDING = (
    "on the right, cut at input_lengths; the response begins at the first position of "
    "token_loss_mask"
)
AVERAGING = (
    "mean over tokens, of the whole batch; a sample with sample_loss_mask 0 is kept and masked"
)

UNWRAPPABLE = "lines that hold more than one sample"
SKIPPED = "responses have prev_logprobs of all 0 (the pass was skipped): log π is left empty"
_FLOATS = {"logp_rollout": "generation_logprobs", "logp_trainer": "prev_logprobs"}
_MOST = 2**31 - 1
_WHOLE = ("input_lengths", "idx")
_SCALARS = ("rewards", "filtered_rewards", "input_lengths", "sample_loss_mask", "idx")


def recognises(peek: FileHead) -> bool:
    return peek.source.kind == "jsonl" and peek.has("generation_logprobs", "token_loss_mask")


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    for source in sources:
        if not peek(source).has("input_lengths"):
            raise MismatchError(
                f"{source.path} has no input_lengths, which NeMo-RL's grpo.py writes: without it "
                "padding cannot be told from tokens. Name another --format."
            )
        found = re.findall(r"step(\d+)", source.path.name)
        step = int(found[-1]) if found else 0
        for table in jsonl_tables(source, _schema, tally, advance):
            yield _block(table, step, tally, source.name), source.name


def _schema(record: dict[str, Any]) -> pa.Schema:
    wrapped = _lists.depth_of(record.get("token_loss_mask")) == 2
    lists = {"token_ids": pa.int32(), "token_loss_mask": pa.bool_()}
    lists |= dict.fromkeys(_FLOATS.values(), pa.float32())
    if _lists.depth_of(record.get("advantages")) == 1 + wrapped:
        lists["advantages"] = pa.float32()
    kinds = {name: pa.list_(kind) for name, kind in lists.items()}
    kinds |= {name: pa.int64() if name in _WHOLE else pa.float64() for name in _SCALARS}
    kinds.setdefault("advantages", pa.float32())
    if wrapped:
        kinds = {name: kind if name == "idx" else pa.list_(kind) for name, kind in kinds.items()}
    return pa.schema(kinds)


def _block(table: pa.Table, step: int, tally: Tally, where: str) -> pa.Table:
    columns = _unwrapped(table, tally, where)
    ids, mask = columns["token_ids"], columns["token_loss_mask"]
    per_token = {name: columns[source] for name, source in _FLOATS.items()}
    if pa.types.is_list(columns["advantages"].type):
        per_token["advantage"] = columns["advantages"]
    length_S = _numbers(columns["input_lengths"])
    length_S = (
        np.where(np.isnan(length_S), _lists.lengths_of(ids), length_S)
        .clip(0, _MOST)
        .astype(np.int64)
    )
    found, keep_S = split(ids, mask, per_token, tally, where, length_S)
    if not len(found["response_ids"]):
        return pa.table(found)
    return _finished(
        found, {name: columns[name].filter(pa.array(keep_S)) for name in columns}, step
    )


def _unwrapped(table: pa.Table, tally: Tally, where: str) -> dict[str, pa.Array]:
    columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
    if not pa.types.is_list(columns["input_lengths"].type):
        return columns
    wrapped = [name for name in columns if name != "idx"]
    bad_S = {
        NO_IDS: _lists.is_null(columns["token_ids"]),
        UNWRAPPABLE: np.zeros(table.num_rows, dtype=bool),
    }
    for name in wrapped:
        single_S = _lists.lengths_of(columns[name]) == 1
        bad_S[UNWRAPPABLE] |= ~(single_S | _lists.is_null(columns[name]) | (name == "rewards"))
    keep = pa.array(tally.sift(bad_S, where))
    columns = {name: column.filter(keep) for name, column in columns.items()}
    return {
        name: pc.list_element(column, 0) if name in wrapped and name != "rewards" else column
        for name, column in columns.items()
    } | {"rewards": _first_of(columns["rewards"])}


def _first_of(lists: pa.Array) -> pa.Array:
    return (
        lists
        if not pa.types.is_list(lists.type)
        else pa.array([row[0] if row else None for row in lists.to_pylist()], lists.type.value_type)
    )


def _numbers(column: pa.Array) -> np.ndarray:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _finished(found: dict[str, pa.Array], rows: dict[str, pa.Array], step: int) -> pa.Table:
    lengths_S = _lists.lengths_of(found["response_ids"])
    if "advantage" not in found and rows["advantages"].null_count < len(lengths_S):
        found["advantage"] = rows["advantages"]
    weight_S = np.nan_to_num(_numbers(rows["sample_loss_mask"]), nan=1.0) != 0
    found["loss_mask"] = _lists.from_flat(
        _lists.flat(found["loss_mask"]) & np.repeat(weight_S, lengths_S), lengths_S
    )
    found |= _without_placeholders(found["logp_trainer"], lengths_S)
    reward = (
        rows["filtered_rewards"]
        if rows["filtered_rewards"].null_count < len(lengths_S)
        else rows["rewards"]
    )
    found["reward"] = pa.array(_numbers(reward).astype(np.float32), mask=_lists.is_null(reward))
    index_S = _numbers(rows["idx"])
    if ((index_S >= 0) & (index_S <= _MOST)).all():  # False for NaN, which is null
        found["sample_index"] = pa.array(index_S.astype(np.int32))
    found["step"] = pa.array(np.full(len(lengths_S), step, np.int32))
    return pa.table(found)


def _without_placeholders(column: pa.Array, lengths_S: np.ndarray) -> dict[str, pa.Array]:
    """Null where log π = 0 in the whole response: it was not computed."""
    null_S = _lists.is_null(column)
    computed_S = np.zeros(len(lengths_S), dtype=bool)
    known_S = np.where(null_S, 0, lengths_S)
    computed_S[_lists.rows_of(known_S)[_lists.flat(column) != 0]] = True
    zero_S = ~null_S & ~computed_S
    left = pc.if_else(pa.array(zero_S), pa.scalar(None, column.type), column)
    return {"logp_trainer": left, NOTE + SKIPPED: pa.array(zero_S.astype(np.int64))}
