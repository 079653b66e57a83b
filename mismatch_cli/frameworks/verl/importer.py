"""verl's batches: a saved `DataProto` (`DataProto.save_to_disk`), or its columns in a `.pt`, JSONL
or Parquet file.

The names are those of `verl/trainer/ppo/ray_trainer.py`. Prompts are padded on the left and
responses on the right; `attention_mask` covers both, and `response_mask` is 0 at tool output too.
In bypass mode `old_log_probs` is a copy of `rollout_log_probs`, not π.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
ENABLE = (
    "batch.save_to_disk(PATH) in a trainer, or record it: "
    "VERL_USE_EXTERNAL_MODULES=mismatch_cli.frameworks.verl.recorder"
)
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

_NUMBERS = {  # column of the trace: verl's names, a row's first one with a value counts
    "logp_rollout": ("rollout_log_probs",),
    "logp_trainer": ("old_log_probs",),
    "advantage": ("advantages",),
    "entropy_trainer": ("entropys", "entropy"),
}
_REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")  # one per token, summed
_FLAGS = ("attention_mask", "response_mask", "loss_mask")
_NAMES = (
    "prompts",
    "responses",
    *_FLAGS,
    *_REWARDS,
    *(name for names in _NUMBERS.values() for name in names),
    "uid",
)


def recognises(peek: FileHead) -> bool:
    return peek.has("prompts", "responses", "rollout_log_probs")


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    for source in sources:
        for table, step in _tables(source, tally, advance):
            columns = {
                name: foreign_values.single(table.column(name)) for name in table.column_names
            }
            yield from plain.responses(_in_our_names(columns, step, tally), source, tally)


def _tables(
    source: DumpFile, tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, int | None]]:
    """Tables with verl's names and types, and the batch's step, if known."""
    if source.kind == "parquet":
        tables = parquet_tables(source, _NAMES, "responses", advance)
        yield from (
            (pa.table({name: _typed(name, t.column(name)) for name in t.column_names}), None)
            for t in tables
        )
    elif source.kind == "jsonl":
        yield from ((table, None) for table in jsonl_tables(source, _schema, tally, advance))
    else:
        with torch_file.laid_out(source.path, TITLE):
            content = (pickles.load if source.kind == "pickle" else torch_file.load)(source.path)
            step = dict(content.get("meta_info") or {}).get("global_steps")
            found = {
                name: _typed(name, _arrow(content[name]))
                for name in _NAMES
                if content.get(name) is not None
            }
            yield (
                pa.table(found),
                None if step is None else foreign_values.whole_number(step, np.int32),
            )
        advance(source.size)


def _schema(record: Mapping[str, Any]) -> pa.Schema:
    return pa.schema({name: _kind(name, isinstance(record.get("uid"), str)) for name in _NAMES})


def _kind(name: str, text: bool = True) -> pa.DataType:
    if name == "uid":
        return pa.string() if text else pa.int64()
    return pa.list_(
        pa.bool_()
        if name in _FLAGS
        else pa.int32()
        if name in ("prompts", "responses")
        else pa.float32()
    )


def _typed(name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    column = foreign_values.single(column)
    return column if name == "uid" else foreign_values.exact(column, _kind(name))


def _arrow(values: Any) -> pa.Array:
    """A matrix as lists of equal length, a list of tensors as lists of their lengths, objects as
    text.
    """
    if hasattr(values, "detach"):
        values = (values.float() if values.is_floating_point() else values).numpy()
    if isinstance(values, np.ndarray) and values.dtype != object:
        if values.ndim > 2:
            raise foreign_values.WRONG_VALUE(
                f"a tensor of {values.ndim} dimensions where a matrix belongs"
            )
        return (
            pa.array(values)
            if values.ndim < 2
            else _lists.from_flat(values.ravel(), np.full(*values.shape))
        )
    if len(values) and hasattr(values[0], "detach"):
        rows = [(row.float() if row.is_floating_point() else row).numpy() for row in values]
        return _lists.from_flat(np.concatenate(rows), np.array([len(row) for row in rows]))
    return pa.array([str(value) for value in values])


def _in_our_names(columns: dict[str, pa.Array], step: int | None, tally: Tally) -> pa.Table:
    found = {"prompt_ids": columns["prompts"], "response_ids": columns["responses"]}
    # JSONL readers make a column of nulls of what a file does not have
    columns = {name: column for name, column in columns.items() if column.null_count < len(column)}
    numbers = {ours: _first_value(columns, names) for ours, names in _NUMBERS.items()}
    found |= {ours: column for ours, column in numbers.items() if column is not None}
    found |= _masks(columns)
    if (rewards := _first_value(columns, _REWARDS)) is not None:
        found["reward"] = _sums(rewards)
    if "uid" in columns:
        found["prompt_id"] = columns["uid"]
    if step is not None:
        found["step"] = pa.array(np.full(len(columns["responses"]), step, np.int32))
    return pa.table(_without_copies(found, tally))


def _first_value(columns: Mapping[str, pa.Array], names: Sequence[str]) -> pa.Array | None:
    """Each row's value under the first of these names that has one; None without such columns."""
    present = [columns[name] for name in names if name in columns]
    if not present:
        return None
    return pc.coalesce(*present)


def _masks(columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """The masks of padding and of the loss, in our names.

    Where a row has an `attention_mask` it covers prompt and response; where it has none, the
    response ends with the last 1 of its own mask.
    """
    loss = _first_value(columns, ("response_mask", "loss_mask"))
    if "attention_mask" not in columns:
        return {name: mask for name, mask in [("response_mask", loss)] if mask is not None}
    mask, prompts_S = columns["attention_mask"], _lists.lengths_of(columns["prompts"])
    total_S, null_S = _lists.lengths_of(mask), _lists.is_null(mask)
    place_T = np.arange(total_S.sum()) - np.repeat(_lists.offsets_of(total_S)[:-1], total_S)
    in_prompt_T = place_T < np.repeat(prompts_S, total_S)
    of_prompt_S = np.minimum(prompts_S, total_S)
    tokens_T = _lists.flat(mask)
    response = _lists.from_flat(tokens_T[~in_prompt_T], total_S - of_prompt_S, null_S)
    masks = {
        "prompt_mask": _lists.from_flat(tokens_T[in_prompt_T], of_prompt_S, null_S),
        "response_mask": response,
    }
    if loss is not None:
        masks |= {"response_mask": pc.coalesce(response, loss), "loss_mask": loss}
    return masks


def _sums(scores: pa.Array) -> pa.Array:
    """Each response's reward: the sum over its tokens, of which only the last has one."""
    sums = np.bincount(
        _lists.rows_of(_lists.lengths_of(scores)), _lists.flat(scores), minlength=len(scores)
    )
    return pc.if_else(scores.is_null(), None, pa.array(sums, pa.float32()))


def _without_copies(found: dict[str, pa.Array], tally: Tally) -> dict[str, pa.Array]:
    """Drop log π where it is a copy of log μ (bypass mode) in every row that has both: it would
    show no gap at all.
    """
    pi, mu = found.get("logp_trainer"), found.get("logp_rollout")
    if pi is None or mu is None:
        return found
    both = pc.and_(pi.is_valid(), mu.is_valid())
    if pi.filter(both).equals(mu.filter(both)):
        tally.note(BYPASSED, both.true_count)
        del found["logp_trainer"]
    return found
