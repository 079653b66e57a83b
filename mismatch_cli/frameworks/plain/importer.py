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
from mismatch_cli.frameworks.importing.guess import columns_in, guess_columns
from mismatch_cli.frameworks.importing.naming import IGNORED, REQUIRED, as_option, schema_columns
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.padded import (
    LISTS,
    is_batch,
    is_shared,
    kind_of,
    measure_of,
    split_batches,
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
    "prompt_mask": "of padded prompts: 1 for tokens",
    "response_mask": "of padded lists: 1 for tokens; a 0 before the last 1 is outside the loss",
    "token_ids": (
        "prompt and response in one list; the first 1 of response_mask or loss_mask (or, after "
        "−100, the first token's own id) begins the response"
    ),
    "target_ids": "token_ids moved by one; the other columns then describe these",
}
WRITER = """import json
with open("dump.jsonl", "w") as file:
    for prompt_ids, response_ids, logp_rollout, logp_trainer in batch:
        row = dict(prompt_ids=prompt_ids, response_ids=response_ids, logp_rollout=logp_rollout)
        file.write(json.dumps(row | dict(logp_trainer=logp_trainer)) + "\\n")
"""


def meanings() -> dict[str, str]:
    """What each column holds, in words; what a row must have comes first."""
    names = (*REQUIRED, *of_shape(Shape.TOKENS, Shape.RESPONSE, Shape.TOP_K, Shape.LIST))
    return {name: COLUMNS[name].description for name in names} | _OF_OTHERS


def recognises(peek: FileHead) -> bool:
    others = {"response_ids", "token_ids", "logp_trainer", "logp_recomputed", "logp_average"}
    return peek.has("logp_rollout") and not others.isdisjoint(peek.keys)


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    foreign: set[str] = set()
    guesses: dict[str, str] = {}
    for source in sources:
        names = [*schema_columns(), *source.also]
        keys = peek(source).keys
        unknown = keys.difference(names)
        foreign |= unknown
        if unknown and not guesses:
            guesses = _guesses(source, unknown)
        if source.kind == "parquet":
            tables = parquet_tables(source, names, measure_of(keys), advance)
        else:
            tables = jsonl_tables(source, partial(_schema, also=source.also), tally, advance)
        for table in tables:
            yield from responses(table, source, tally)
    if foreign:
        shown = ", ".join(sorted(foreign)[:_NAMED])
        more = ", …" if len(foreign) > _NAMED else ""
        hint = f"; to include: --columns {as_option(guesses)}" if guesses else ""
        tally.leave_out(_FOREIGN.format(shown + more) + hint, len(foreign))


def _guesses(source: DumpFile, unknown: Set[str]) -> dict[str, str]:
    """The columns of ours that these unknown ones seem to be."""
    guess = guess_columns(columns_in(first_rows(source)), source.columns)
    return {ours: its for ours, its in guess.items() if its in unknown}


def responses(table: pa.Table, source: DumpFile, tally: Tally) -> Iterator[tuple[pa.Table, str]]:
    """The rows of a table under this schema's names, without padding, and the name of their
    file.
    """
    for rows in _in_types(_rows(table, source, tally), source, tally):
        whole = sequences.cut(rows, tally, source.name)
        yield without_padding(whole, tally, source.name), source.name


def _rows(table: pa.Table, source: DumpFile, tally: Tally) -> pa.Table:
    """Split rows that hold a batch into one row per response."""
    columns = [name for name in table.column_names if _holds_values(table.column(name))]
    measure = measure_of(columns)
    if measure not in columns or not is_batch(table.schema.field(measure).type):
        return table
    with readable(source):
        return split_batches(table.select(columns), tally, source.name)


def _holds_values(column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a column is not all null; JSONL's readers make columns of what a file lacks."""
    return bool(column.null_count < len(column))


def _in_types(table: pa.Table, source: DumpFile, tally: Tally) -> Iterator[pa.Table]:
    """The table in the trace's types; if a value does not fit, row by row without the rows that
    hold one.
    """
    try:
        yield _in_types_of_trace(table, source)
        return
    except foreign_values.WRONG_VALUE:
        pass
    for number in range(table.num_rows):
        try:
            # A slice would keep the other rows' values
            row = _in_types_of_trace(table.take([number]), source)
        except foreign_values.WRONG_VALUE as error:
            tally.leave_out(OTHER_VALUES, 1, f"{source.name}: {first_line(error)}")
            continue
        yield row


def _schema(record: dict[str, Any], also: Mapping[str, str]) -> pa.Schema:
    """The types in which to read JSON: the trace's, unless a record shows another form of the
    same value.
    """
    recorded = {also.get(name, name) for name, value in record.items() if value is not None}
    in_batches = _lists.depth_of(record.get(measure_of(recorded))) > 1
    columns = {name: name for name in schema_columns()}
    columns.update(also)
    kinds: dict[str, pa.DataType] = {}
    for name, ours in columns.items():
        value = record.get(name)
        is_of_all = _lists.depth_of(value) == 1 and is_shared(ours, kind_of(ours))
        may_be_matrix = isinstance(value, list) or (ours in LISTS and value is None)
        if not in_batches or is_of_all or not may_be_matrix:
            kinds[name] = _kind_shown(ours, value)
            continue
        # In a batch, the first response's value shows the form.
        first = value[0] if isinstance(value, list) and value else value
        kinds[name] = pa.list_(_kind_shown(ours, first))
    return pa.schema(kinds)


def _kind_shown(ours: str, value: Any) -> pa.DataType:
    """The type of a column for a response with this value."""
    ours = ALIASES.get(ours, ours)
    if ours == "prompt_id":
        return pa.string() if isinstance(value, str) else pa.int64()
    if ours == "advantage" and value is not None and not isinstance(value, list):
        return pa.float32()
    if ours in sequences.MASKS and isinstance(value, list) and IGNORED in value:
        return pa.list_(pa.int32())  # labels
    if ours == "reward" and isinstance(value, bool):
        return pa.bool_()
    return kind_of(ours)


def _in_types_of_trace(table: pa.Table, source: DumpFile) -> pa.Table:
    columns = _lists.columns_of(table)
    columns = {name: column for name, column in columns.items() if _holds_values(column)}
    for name, column in columns.items():
        if ALIASES.get(name, name) == "prompt_id" and _is_text(column.type):
            columns[name] = _hashed(column)
    has_sequences = "token_ids" in columns
    for name, column in columns.items():
        columns[name] = _cast(name, column, source, has_sequences=has_sequences)
    for alias in ALIASES.keys() & columns.keys():
        column = columns.pop(alias)
        ours = ALIASES[alias]
        columns[ours] = pc.coalesce(columns[ours], column) if ours in columns else column
    return pa.table(_merged(columns, source.also))


def _merged(columns: dict[str, pa.Array], also: Mapping[str, str]) -> dict[str, pa.Array]:
    """Each column under our name, with each row's first value under any of its names."""
    for ours in set(also.values()):
        names = [name for name, its in also.items() if its == ours]
        alternatives = [columns.pop(name) for name in (*names, ours) if name in columns]
        if not alternatives:
            continue
        first = alternatives[0]
        columns[ours] = pc.coalesce(*alternatives) if first.null_count else first
    return columns


def _are_flags(column: pa.Array) -> bool:
    """Whether no entry of a mask is the label of a token outside the loss."""
    values = column.flatten()
    if not pa.types.is_signed_integer(values.type):
        return True  # or refused
    return not pc.any(pc.equal(values, IGNORED), min_count=0).as_py()


def _cast(name: str, column: pa.Array, source: DumpFile, *, has_sequences: bool) -> pa.Array:
    """A column in the trace's type; a `MismatchError` that names it if it is of another kind."""
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
        both_names = name
        if name in source.columns:
            both_names = f"{name} ({source.columns[name]} of the file)"
        raise MismatchError(
            f"{source.path}: column {both_names} is {column.type} and cannot be read as {kind} "
            f"({first_line(error)}). What each column holds: mismatch-cli import --schema"
        ) from error


def _is_text(kind: pa.DataType) -> bool:
    """Whether the column holds prompt names, to be hashed."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return foreign_values.is_text(value)


def _hashed(names: pa.Array) -> pa.Array:
    """63 bits of each text; the same text gets the same bits in every file."""
    # Prompts repeat within a group: each text is hashed once, and looked up by its number.
    coded = pc.dictionary_encode(names.cast(pa.string()))
    keys = [text_key(str(name)) for name in coded.dictionary.to_pylist()] or [0]
    number_S = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return pa.array(np.array(keys, dtype=np.int64)[number_S], mask=_lists.is_null(names))
