"""Shards: each written whole under a temporary name and renamed in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.schema import TOKEN_COLUMNS, TOPK_COLUMNS, arrow_type, column_order

MAX_TOKENS_PER_ROW_GROUP = 2**20


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.parquet"


def rows_to_table(columns: dict[str, Sequence[Any]]) -> pa.Table:
    """Columns as Python sequences or numpy arrays, one item per response, in the types and the order of the schema."""
    arrays = {name: _column(name, columns[name]) for name in column_order() if name in columns}
    return pa.table(arrays)


def with_counts(table: pa.Table, **counts: int) -> pa.Table:
    """Attach counts that belong to a whole shard; they live in the file's metadata and survive its scoring."""
    metadata = (table.schema.metadata or {}) | {name.encode(): str(count).encode() for name, count in counts.items()}
    return table.replace_schema_metadata(metadata)


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    if name in TOKEN_COLUMNS or name in TOPK_COLUMNS:
        values = [None if v is None else v.reshape(-1) if hasattr(v, "reshape") else v for v in values]
    return pa.array(values, type=arrow_type(name), from_pandas=False)


def write_shard(path: Path, table: pa.Table) -> None:
    """Write one shard in row groups of at most 2^20 tokens."""
    with replacing(path) as temporary, pq.ParquetWriter(temporary, table.schema, compression="zstd") as writer:
        for start, stop in _row_groups(table.column("response_ids")):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def _row_groups(response_ids: pa.ChunkedArray) -> list[tuple[int, int]]:
    lengths = pc.list_value_length(response_ids).to_pylist()
    groups, start, tokens = [], 0, 0
    for row, length in enumerate(lengths):
        if tokens + length > MAX_TOKENS_PER_ROW_GROUP and row > start:
            groups.append((start, row))
            start, tokens = row, 0
        tokens += length
    groups.append((start, len(lengths)))
    return groups
