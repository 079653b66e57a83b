"""Writes shards, each under a temporary name that is then renamed."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatch_cli.trace.columns import (
    COLUMNS,
    ROUTE_COLUMNS,
    TOKEN_COLUMNS,
    TOPK_COLUMNS,
    length_column,
)
from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.manifest import SHARD

MAX_TOKENS_PER_ROW_GROUP = 2**20
# Three such columns are 48 MB, which a reader holds at a time
_MAX_TOPK_ENTRIES_PER_ROW_GROUP = 2**22
# Compressing the log-probabilities of single tokens saves a tenth and takes a third of the writing
# time. For the top K, which are most of the file, it saves a fifth, so these are compressed.
_UNCOMPRESSED = {
    name
    for name in TOKEN_COLUMNS
    if pa.types.is_floating(COLUMNS[name].value) and name != "advantage"
}


def shard_path(folder: Path, index: int) -> Path:
    """The path of a shard by its number."""
    return folder / SHARD.format(index)


def rows_to_table(columns: dict[str, Sequence[Any]]) -> pa.Table:
    """A table with the schema's types and order from Python sequences or numpy arrays, one item
    per response.
    """
    arrays = {name: _column(name, columns[name]) for name in COLUMNS if name in columns}
    return pa.table(arrays)


def with_counts(table: pa.Table, **counts: int) -> pa.Table:
    """Attach counts that belong to a whole shard; they are file metadata and survive scoring."""
    metadata = dict(table.schema.metadata or {})
    for name, count in counts.items():
        metadata[name.encode()] = str(count).encode()
    return table.replace_schema_metadata(metadata)


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    if name in (*TOKEN_COLUMNS, *TOPK_COLUMNS, *ROUTE_COLUMNS):
        values = list(map(_flattened, values))
    # With `from_pandas`, Arrow would turn NaN into null, which means "not measured".
    return pa.array(values, type=COLUMNS[name].type, from_pandas=False)


def _flattened(values: Any) -> Any:
    """An array of any shape as a flat one; lists and None as they are."""
    if hasattr(values, "reshape"):
        return values.reshape(-1)
    return values


def write_shard(path: Path, table: pa.Table) -> None:
    """Write one shard in row groups of at most 2^20 tokens, fewer where tokens carry many top-K
    entries.
    """
    write_shard_parts(path, iter([table]))


def write_shard_parts(path: Path, tables: Iterator[pa.Table]) -> None:
    """Write one shard, in row groups as `write_shard` does, from consecutive tables of one schema;
    holds one of them at a time.
    """
    first = next(tables)
    options = _encoding(first.schema)
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, first.schema, **options) as writer,
    ):
        for table in chain([first], tables):
            for start, stop in _row_groups(table):
                writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """The writer's options: which columns are encoded with a dictionary, and which compressed."""
    with_dictionary = []
    compression = {}
    for field in schema:
        leaf = f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        # A dictionary does not pay for tokens: zstd packs their ids as well in half the time.
        if field.name not in (*TOKEN_COLUMNS, *TOPK_COLUMNS):
            with_dictionary.append(leaf)
        compression[leaf] = "none" if field.name in _UNCOMPRESSED else "zstd"
    return {"use_dictionary": with_dictionary, "compression": compression}


def _row_groups(table: pa.Table) -> list[tuple[int, int]]:
    """Where each row group starts and stops, in rows of the table."""
    lists = table.column(length_column(table.column_names))
    lengths = pc.list_value_length(lists).to_pylist()
    most = _most_tokens(table, sum(lengths))
    groups = []
    start = tokens = 0
    for row, length in enumerate(lengths):
        if tokens + length > most and row > start:
            groups.append((start, row))
            start, tokens = row, 0
        tokens += length
    groups.append((start, len(lengths)))
    return groups


def _most_tokens(table: pa.Table, tokens: int) -> int:
    """The most tokens of a row group; fewer where each of this table's has many top-K entries."""
    if "topk_ids" not in table.column_names or not tokens:
        return MAX_TOKENS_PER_ROW_GROUP
    entries = pc.sum(pc.list_value_length(table.column("topk_ids"))).as_py() or 0
    per_token = max(1, entries // tokens)
    return min(MAX_TOKENS_PER_ROW_GROUP, _MAX_TOPK_ENTRIES_PER_ROW_GROUP // per_token)
