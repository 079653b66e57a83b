"""verl's batches: a saved `DataProto` (`DataProto.save_to_disk`), or its columns in a `.pt`, JSONL
or Parquet file.

The names are those of `verl/trainer/ppo/ray_trainer.py`. Prompts are padded on the left and
responses on the right; `attention_mask` covers both, and `response_mask` is 0 at tool output too.
In bypass mode `old_log_probs` is a copy of `rollout_log_probs`, not π.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.frameworks.importing import (
    lists as _lists,
)
from mismatch_cli.frameworks.importing import (
    torch_file,
)
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.sources import (
    DumpFile,
    FileHead,
    jsonl_tables,
    parquet_tables,
)
from mismatch_cli.frameworks.plain import importer as plain
from mismatch_cli.frameworks.verl import pickles
from mismatch_cli.trace import foreign_values

TITLE = "verl's batches"
FILES = "*.dp, *.pkl, *.pt, *.jsonl, *.parquet"
ENABLE = "batch.save_to_disk(PATH) in a trainer, or record it (mismatch-cli guide verl)"
PI = "recomputed"
HOLDS = "old_log_probs, recomputed before the update"
SHIFT = "none: index i describes responses[i]"
PADDING = (
    "prompts and responses are cut by attention_mask, or responses after the last 1 of "
    "response_mask"
)
AVERAGING = "mean over tokens of the batch (loss_agg_mode token-mean, the default)"
BYPASSED = (
    "responses have old_log_probs equal to rollout_log_probs (bypass mode), which is not log π"
)

# Column of the trace: verl's names, of which a row's first one with a value counts
_NUMBERS = {
    "logp_rollout": ("rollout_log_probs",),
    "logp_trainer": ("old_log_probs",),
    "advantage": ("advantages",),
    "entropy_trainer": ("entropys", "entropy"),
}
_REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")  # one per token, summed
_STEPS = ("step", "global_steps")  # beside the columns of rows; a saved batch has it in meta_info
_FLAGS = ("attention_mask", "response_mask", "loss_mask")
_NAMES = (
    "prompts",
    "responses",
    *_FLAGS,
    *_REWARDS,
    *chain.from_iterable(_NUMBERS.values()),
    "uid",
)


def recognises(peek: FileHead) -> bool:
    return peek.has("prompts", "responses", "rollout_log_probs")


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    for source in sources:
        for table, step in _tables(source, tally, advance):
            with torch_file.laid_out(source.path, TITLE):
                columns = _in_our_names(_lists.columns_of(table), step, tally)
            yield from plain.responses(columns, source, tally)


def _tables(
    source: DumpFile, tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, int | None]]:
    """Tables with verl's names and types, and the batch's step, if known."""
    if source.kind == "parquet":
        for table in parquet_tables(source, (*_NAMES, *_STEPS), "responses", advance):
            with torch_file.laid_out(source.path, TITLE):
                typed = _typed(_lists.columns_of(table))
            yield typed, None
    elif source.kind == "jsonl":
        for table in jsonl_tables(source, _schema, tally, advance):
            yield table, None
    else:
        load = pickles.load if source.kind == "pickle" else torch_file.load
        with torch_file.laid_out(source.path, TITLE):
            content = load(source.path)
            yield _typed(_saved_columns(content)), _step(content)
        advance(source.size)


def _saved_columns(content: Mapping[str, Any]) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    for name in _NAMES:
        if content.get(name) is not None:
            columns[name] = _arrow(content[name])
    return columns


def _step(content: Mapping[str, Any]) -> int | None:
    step = dict(content.get("meta_info") or {}).get("global_steps")
    if step is None:
        return None
    return foreign_values.whole_number(step, np.int32)


def _schema(record: Mapping[str, Any]) -> pa.Schema:
    kinds = {name: _kind(name) for name in (*_NAMES, *_STEPS)}
    if not isinstance(record.get("uid"), str):
        kinds["uid"] = pa.int64()
    return pa.schema(kinds)


def _kind(name: str) -> pa.DataType:
    """The type of one of verl's columns; that of `uid` may also be an integer."""
    if name == "uid":
        return pa.string()
    if name in _STEPS:
        return pa.int32()
    if name in _FLAGS:
        return pa.list_(pa.bool_())
    if name in ("prompts", "responses"):
        return pa.list_(pa.int32())
    return pa.list_(pa.float32())


def _typed(columns: dict[str, pa.Array]) -> pa.Table:
    for name, column in columns.items():
        if name != "uid":
            columns[name] = foreign_values.exact(column, _kind(name))
    return pa.table(columns)


def _arrow(values: Any) -> pa.Array:
    """A matrix as lists of equal length, a list of tensors as lists of their lengths, objects as
    text.
    """
    if hasattr(values, "detach"):
        values = _as_numpy(values)
    if isinstance(values, np.ndarray) and values.dtype != object:
        return _lists_of_matrix(values)
    if len(values) and hasattr(values[0], "detach"):
        rows = list(map(_as_numpy, values))
        return _lists.from_flat(np.concatenate(rows), np.array(list(map(len, rows))))
    return pa.array(list(map(str, values)))


def _lists_of_matrix(values: np.ndarray) -> pa.Array:
    if values.ndim > 2:
        raise foreign_values.WRONG_VALUE(
            f"a tensor of {values.ndim} dimensions where a matrix belongs"
        )
    if values.ndim < 2:
        return pa.array(values)
    rows, width = values.shape
    return _lists.from_flat(values.ravel(), np.full(rows, width))


def _as_numpy(tensor: Any) -> np.ndarray:
    # numpy has no bfloat16, which float32 holds exactly.
    if tensor.is_floating_point():
        tensor = tensor.float()
    return np.asarray(tensor.numpy())


def _in_our_names(columns: dict[str, pa.Array], step: int | None, tally: Tally) -> pa.Table:
    prompts = columns["prompts"]
    ours = {"prompt_ids": prompts, "response_ids": columns["responses"]}
    # JSONL readers make a column of nulls of what a file does not have
    columns = {name: column for name, column in columns.items() if column.null_count < len(column)}
    for name, theirs in _NUMBERS.items():
        numbers = _first_value(columns, theirs)
        if numbers is not None:
            ours[name] = numbers
    ours |= _masks(columns, prompts)
    rewards = _first_value(columns, _REWARDS)
    if rewards is not None:
        ours["reward"] = _sums(rewards)
    if "uid" in columns:
        ours["prompt_id"] = columns["uid"]
    steps = _first_value(columns, _STEPS)
    if step is not None:
        steps = pa.array(np.full(len(prompts), step, np.int32))
    if steps is not None:
        ours["step"] = steps
    return pa.table(_without_copies(ours, tally))


def _first_value(columns: Mapping[str, pa.Array], names: Sequence[str]) -> pa.Array | None:
    """Each row's value under the first of these names that has one; None without such columns."""
    present = [columns[name] for name in names if name in columns]
    if not present:
        return None
    return pc.coalesce(*present)


def _masks(columns: Mapping[str, pa.Array], prompts: pa.Array) -> dict[str, pa.Array]:
    """The masks of padding and of the loss, in our names.

    Where a row has an `attention_mask` it covers prompt and response; where it has none, the
    response ends with the last 1 of its own mask.
    """
    loss = _first_value(columns, ("response_mask", "loss_mask"))
    if "attention_mask" not in columns:
        return {} if loss is None else {"response_mask": loss}
    mask = columns["attention_mask"]
    total_S = _lists.lengths_of(mask)
    null_S = _lists.is_null(mask)
    prompt_S = np.minimum(_lists.lengths_of(prompts), total_S)
    tokens_T = _lists.flat(mask)
    in_prompt_T = _lists.position_in_row(total_S) < np.repeat(prompt_S, total_S)
    prompt_mask = _lists.from_flat(tokens_T[in_prompt_T], prompt_S, null_S)
    responses = _lists.from_flat(tokens_T[~in_prompt_T], total_S - prompt_S, null_S)
    if loss is None:
        return {"prompt_mask": prompt_mask, "response_mask": responses}
    response_mask = pc.coalesce(responses, loss)
    return {"prompt_mask": prompt_mask, "response_mask": response_mask, "loss_mask": loss}


def _sums(scores: pa.Array) -> pa.Array:
    """Each response's reward: the sum over its tokens, of which only the last has one."""
    row_T = _lists.rows_of(_lists.lengths_of(scores))
    sums_S = np.bincount(row_T, _lists.flat(scores), minlength=len(scores))
    return pc.if_else(scores.is_null(), None, pa.array(sums_S, pa.float32()))


def _without_copies(columns: dict[str, pa.Array], tally: Tally) -> dict[str, pa.Array]:
    """Drop log π where it is a copy of log μ (bypass mode) in every row that has both: it would
    show no gap at all.
    """
    pi = columns.get("logp_trainer")
    mu = columns.get("logp_rollout")
    if pi is None or mu is None:
        return columns
    both = pc.and_(pi.is_valid(), mu.is_valid())
    if _are_equal(pi.filter(both), mu.filter(both)):
        tally.note(BYPASSED, both.true_count)
        del columns["logp_trainer"]
    return columns


def _are_equal(lists: pa.Array, others: pa.Array) -> bool:
    """Whether two columns of numbers are the same, also where both are NaN."""
    has_lengths = np.array_equal(_lists.lengths_of(lists), _lists.lengths_of(others))
    return has_lengths and np.array_equal(_lists.flat(lists), _lists.flat(others), equal_nan=True)
