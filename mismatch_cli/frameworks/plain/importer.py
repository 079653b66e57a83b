"""The plain schema: one response per line or row, with a trace's column names. Any program can
write it.

A trace's own shards are plain Parquet. Numbers may have any width; `loss_mask` is true/false or
1/0, `advantage` one number per response (or a list of one) or one per token, `prompt_id` (or
`group_id`) a number or a text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing import sequences
from mismatch_cli.frameworks.importing.guess import columns_in, guessed
from mismatch_cli.frameworks.importing.naming import IGNORED, REQUIRED, known
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.padded import (
    LISTS,
    apart,
    is_batch,
    is_shared,
    kind_of,
    measure_of,
    without_padding,
)
from mismatch_cli.frameworks.importing.rows import text_key
from mismatch_cli.frameworks.importing.sources import (
    DumpFile,
    FileHead,
    first_rows,
    jsonl_tables,
    parquet_tables,
    peek,
    readable,
)
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.columns import ALIASES, COLUMNS, Shape, of_shape

TITLE = "plain JSONL or Parquet"
FILES = "*.jsonl, *.parquet"
ENABLE = "five lines of Python: mismatch-cli import --schema"
PI = "recomputed"
HOLDS = "logp_trainer, at the weights that version_trainer states"
SHIFT = "none: index i describes response_ids[i], or target_ids[i]"
PADDING = "none, or cut by prompt_mask and response_mask; token_ids are cut by their mask"
AVERAGING = "none assumed: tokens outside the loss have loss_mask false"

OTHER_VALUES = "rows with values that do not fit a trace's columns"
NEEDS_IDS = False  # pairs of log-probabilities are a trace
_FOREIGN = "unknown columns ({})"
_NAMED = 10

# Columns that a trace does not have
_OF_OTHERS = {
    "prompt_mask": "of padded prompts: 1 for tokens, 0 for padding",
    "response_mask": (
        "of padded lists: 1 for tokens; a 0 before the last 1 is a token outside the loss"
    ),
    "token_ids": (
        "prompt and response in one list; the first 1 of response_mask or loss_mask begins the "
        "response (these may hold the token's own id for 1, and −100 for 0)"
    ),
    "target_ids": "token_ids moved by one; index i of all other columns describes target_ids[i]",
}
WRITER = """import json
with open("dump.jsonl", "w") as file:
    for prompt_ids, response_ids, logp_rollout, logp_trainer in batch:
        row = dict(prompt_ids=prompt_ids, response_ids=response_ids, logp_rollout=logp_rollout)
        file.write(json.dumps(row | dict(logp_trainer=logp_trainer)) + "\\n")
"""


def meanings() -> dict[str, str]:
    """What each column holds, in words; what a row must have comes first."""
    names = of_shape(Shape.TOKENS, Shape.RESPONSE, Shape.TOP_K, Shape.LIST)
    return {
        name: COLUMNS[name].description for name in dict.fromkeys([*REQUIRED, *names])
    } | _OF_OTHERS


def recognises(peek: FileHead) -> bool:
    others = {"response_ids", "token_ids", "logp_trainer", "logp_recomputed"}
    return peek.has("logp_rollout") and not others.isdisjoint(peek.keys)


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    unknown: set[str] = set()
    guesses: dict[str, str] = {}
    for source in sources:
        names = [*known(), *source.also]
        if foreign_keys := peek(source).keys - {*names}:
            unknown |= foreign_keys
            guesses = guesses or _guesses(source, foreign_keys)
        if source.kind == "parquet":
            tables = parquet_tables(source, names, measure_of(peek(source).keys), advance)
        else:
            tables = jsonl_tables(source, partial(_schema, also=source.also), tally, advance)
        for table in tables:
            yield from responses(table, source, tally)
    if unknown:
        named = ", ".join(sorted(unknown)[:_NAMED]) + (", …" if len(unknown) > _NAMED else "")
        hint = (
            f"; to include: --columns {','.join(f'{ours}={its}' for ours, its in guesses.items())}"
            if guesses
            else ""
        )
        tally.leave_out(_FOREIGN.format(named) + hint, len(unknown))


def _guesses(source: DumpFile, unknown: Set[str]) -> dict[str, str]:
    """The columns of ours that these unknown ones seem to be."""
    return {
        ours: its
        for ours, its in guessed(columns_in(first_rows(source)), source.columns).items()
        if its in unknown
    }


def responses(table: pa.Table, source: DumpFile, tally: Tally) -> Iterator[tuple[pa.Table, str]]:
    """The rows of a table under this schema's names, without padding, and the name of their
    file.
    """
    for rows in _in_types(_rows(table, source, tally), source, tally):
        whole = sequences.cut(rows, tally, source.name)
        yield without_padding(whole, tally, source.name), source.name


def _rows(table: pa.Table, source: DumpFile, tally: Tally) -> pa.Table:
    """Split rows that hold a batch into one row per response."""
    held = [n for n in table.column_names if table.column(n).null_count < table.num_rows]
    measure = measure_of(held)
    if measure not in held or not is_batch(table.schema.field(measure).type):
        return table
    with readable(source):
        return apart(table.select(held), tally, source.name)


def _in_types(table: pa.Table, source: DumpFile, tally: Tally) -> Iterator[pa.Table]:
    """The table in the trace's types; if a value does not fit, row by row without the rows that
    hold one.
    """
    try:
        yield _in_the_trace_s_types(table, source)
        return
    except foreign_values.WRONG_VALUE:
        pass
    for row in range(table.num_rows):
        try:
            # A slice would keep the other rows' values
            found = _in_the_trace_s_types(table.take([row]), source)
        except foreign_values.WRONG_VALUE as error:
            tally.leave_out(OTHER_VALUES, 1, f"{source.name}: {first_line(error)}")
            continue
        yield found


def _schema(record: dict[str, Any], also: Mapping[str, str]) -> pa.Schema:
    """The types in which to read JSON: the trace's, unless a record shows another form of the
    same value.
    """
    present = {name for name, value in record.items() if value is not None}
    measure = measure_of({also.get(name, name) for name in present})
    in_batches = _lists.depth_of(record.get(measure)) > 1
    kinds: dict[str, pa.DataType] = {}
    for name, ours in {**{name: name for name in known()}, **also}.items():
        value = record.get(name)
        shared = _lists.depth_of(value) == 1 and is_shared(ours, kind_of(ours))
        matrix = in_batches and not shared and (ours in LISTS or isinstance(value, list))
        kind = _kind_shown(
            ours, value[0] if matrix and isinstance(value, list) and value else value
        )
        kinds[name] = pa.list_(kind) if matrix else kind
    return pa.schema(kinds)


def _kind_shown(ours: str, value: Any) -> pa.DataType:
    ours = ALIASES.get(ours, ours)
    if ours == "prompt_id":
        return pa.string() if isinstance(value, str) else pa.int64()
    if ours == "advantage" and value is not None and not isinstance(value, list):
        return pa.float32()
    if ours in sequences.MASKS and isinstance(value, list) and any(v == IGNORED for v in value):
        return pa.list_(pa.int32())  # labels
    return pa.bool_() if ours == "reward" and isinstance(value, bool) else kind_of(ours)


def _in_the_trace_s_types(table: pa.Table, source: DumpFile) -> pa.Table:
    columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
    columns = {name: column for name, column in columns.items() if column.null_count < len(column)}
    for alias in ALIASES.keys() & columns.keys():
        column = columns.pop(alias)
        columns.setdefault(ALIASES[alias], column)
    if "prompt_id" in columns and _is_text(columns["prompt_id"].type):
        columns["prompt_id"] = _hashed(columns["prompt_id"])
    return pa.table(
        _merged(
            {
                name: _cast(name, column, source, has_sequences="token_ids" in columns)
                for name, column in columns.items()
            },
            source.also,
        )
    )


def _merged(columns: dict[str, pa.Array], also: Mapping[str, str]) -> dict[str, pa.Array]:
    """Each column under our name, with each row's first value under any of its names."""
    for ours in {*also.values()}:
        names = [*(name for name, its in also.items() if its == ours), ours]
        if found := [columns.pop(name) for name in names if name in columns]:
            columns[ours] = pc.coalesce(*found) if found[0].null_count else found[0]
    return columns


def _are_flags(column: pa.Array) -> bool:
    """Whether no entry of a mask is the label of a token outside the loss."""
    values = column.flatten()
    if not pa.types.is_integer(values.type) or pa.types.is_unsigned_integer(values.type):
        return True  # or refused
    return not pc.any(pc.equal(values, IGNORED), min_count=0).as_py()


def _cast(name: str, column: pa.Array, source: DumpFile, *, has_sequences: bool) -> pa.Array:
    ours = source.also.get(name, name)
    kind = kind_of(ours)
    if ours in sequences.MASKS and has_sequences and not _are_flags(column):
        kind = pa.list_(pa.int32())  # labels
    if ours == "advantage" and not foreign_values.is_list(column.type):
        kind = kind.value_type  # one number for the response
    if column.type.equals(kind):
        return column
    try:
        if ours == "reward" and pa.types.is_boolean(column.type):
            return column.cast(pa.uint8()).cast(kind)
        return foreign_values.exact(column, kind)
    except (foreign_values.WRONG_TYPE, pa.ArrowNotImplementedError) as error:
        called = f"{name} ({source.columns[name]} of the file)" if name in source.columns else name
        raise MismatchError(
            f"{source.path}: column {called} is {column.type} and cannot be read as {kind} "
            f"({first_line(error)}). What each column holds: mismatch-cli import --schema"
        ) from error


def _is_text(kind: pa.DataType) -> bool:
    """Whether the column holds prompt names, to be hashed."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value))


def _hashed(names: pa.Array) -> pa.Array:
    """63 bits of each text; the same text gets the same bits in every file."""
    coded = pc.dictionary_encode(names.cast(pa.string()))
    numbers = np.array(
        [text_key(str(name)) for name in coded.dictionary.to_pylist()] or [0], dtype=np.int64
    )
    return pa.array(
        numbers[coded.indices.fill_null(0).to_numpy(zero_copy_only=False)],
        mask=_lists.is_null(names),
    )
