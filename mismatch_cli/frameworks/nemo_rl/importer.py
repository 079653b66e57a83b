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
from mismatch_cli.frameworks.importing.rows import NO_IDS, NOTE, split_sequences
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
        steps = re.findall(r"step(\d{1,9})(?!\d)", source.path.name)  # an int32 holds any
        step = int(steps[-1]) if steps else 0
        for table in jsonl_tables(source, _schema, tally, advance):
            yield _block(table, step, tally, source.name), source.name


def _schema(record: dict[str, Any]) -> pa.Schema:
    is_wrapped = _lists.depth_of(record.get("token_loss_mask")) == 2
    lists = {"token_ids": pa.int32(), "token_loss_mask": pa.bool_()}
    lists |= dict.fromkeys(_FLOATS.values(), pa.float32())
    if _lists.depth_of(record.get("advantages")) == 1 + is_wrapped:
        lists["advantages"] = pa.float32()
    kinds = {name: pa.list_(kind) for name, kind in lists.items()}
    kinds |= dict.fromkeys(_SCALARS, pa.float64()) | dict.fromkeys(_WHOLE, pa.int64())
    kinds.setdefault("advantages", pa.float32())
    if is_wrapped:
        for name in kinds.keys() - {"idx"}:
            kinds[name] = pa.list_(kinds[name])
    return pa.schema(kinds)


def _block(table: pa.Table, step: int, tally: Tally, where: str) -> pa.Table:
    columns = _unwrapped(table, tally, where)
    ids = columns["token_ids"]
    per_token = {name: columns[its] for name, its in _FLOATS.items()}
    if pa.types.is_list(columns["advantages"].type):
        per_token["advantage"] = columns["advantages"]
    length_S = _numbers(columns["input_lengths"])
    # Without a length, the sequence is as long as its ids.
    length_S = np.where(np.isnan(length_S), _lists.lengths_of(ids), length_S)
    length_S = length_S.clip(0, _MOST).astype(np.int64)
    mask = columns["token_loss_mask"]
    responses, keep_S = split_sequences(ids, mask, per_token, tally, where, length_S)
    if not len(responses["response_ids"]):
        return pa.table(responses)
    return _finished(responses, _lists.select_rows(columns, keep_S), step)


def _unwrapped(table: pa.Table, tally: Tally, where: str) -> dict[str, pa.Array]:
    """The columns without the lists of one around their values."""
    columns = _lists.columns_of(table)
    if not pa.types.is_list(columns["input_lengths"].type):
        return columns
    wrapped = columns.keys() - {"idx", "rewards"}
    several_S = np.zeros(table.num_rows, dtype=bool)
    for name in wrapped:
        is_single_S = _lists.lengths_of(columns[name]) == 1
        several_S |= ~is_single_S & ~_lists.is_null(columns[name])
    bad_S = {NO_IDS: _lists.is_null(columns["token_ids"]), UNWRAPPABLE: several_S}
    columns = _lists.select_rows(columns, tally.sift(bad_S, where))
    for name in wrapped:
        columns[name] = pc.list_element(columns[name], 0)
    # With dynamic sampling, `rewards` holds those of other samples too, or none.
    columns["rewards"] = _first_of(columns["rewards"])
    return columns


def _first_of(lists: pa.Array) -> pa.Array:
    """The first value of each row, which may be empty; a column of values as it is."""
    if not pa.types.is_list(lists.type):
        return lists
    values = [row[0] if row else None for row in lists.to_pylist()]
    return pa.array(values, lists.type.value_type)


def _numbers(column: pa.Array) -> np.ndarray:
    """A column of numbers as float64; NaN for null."""
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _finished(responses: dict[str, pa.Array], rows: dict[str, pa.Array], step: int) -> pa.Table:
    """The responses with the columns of their rows: mask, reward, index and step."""
    lengths_S = _lists.lengths_of(responses["response_ids"])
    count = len(lengths_S)
    if "advantage" not in responses and rows["advantages"].null_count < count:
        responses["advantage"] = rows["advantages"]
    has_weight_S = np.nan_to_num(_numbers(rows["sample_loss_mask"]), nan=1.0) != 0
    mask_T = _lists.flat(responses["loss_mask"]) & np.repeat(has_weight_S, lengths_S)
    responses["loss_mask"] = _lists.from_flat(mask_T, lengths_S)
    responses |= _without_placeholders(responses)
    reward = rows["filtered_rewards"]
    if reward.null_count == count:
        reward = rows["rewards"]
    responses["reward"] = pa.array(_numbers(reward).astype(np.float32), mask=_lists.is_null(reward))
    index_S = _numbers(rows["idx"])
    # A null is NaN here, which is in no range: then the rows are numbered by position.
    if ((index_S >= 0) & (index_S <= _MOST)).all():
        responses["sample_index"] = pa.array(index_S.astype(np.int32))
    responses["step"] = pa.array(np.full(count, step, np.int32))
    return pa.table(responses)


def _without_placeholders(responses: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """Null where log π = 0 in the whole response: it was not computed.

    Tokens that are certain have such values too. They stay if the pass has computed other responses
    and the rollout agrees.
    """
    column = responses["logp_trainer"]
    computed_S = _has_any(column, _lists.flat(column) != 0)
    zero_S = ~_lists.is_null(column) & ~computed_S
    if computed_S.any():
        rollout = responses["logp_rollout"]
        zero_S &= _has_any(rollout, _lists.flat(rollout) < foreign_values.UNCERTAIN)
    computed = pc.if_else(pa.array(zero_S), pa.scalar(None, column.type), column)
    return {"logp_trainer": computed, NOTE + SKIPPED: pa.array(zero_S.astype(np.int64))}


def _has_any(lists: pa.Array, flags_T: np.ndarray) -> np.ndarray:
    """Which rows have a value that is flagged."""
    first_S, _ = _lists.ends_of(flags_T, _lists.lengths_of(lists))
    return first_S >= 0
