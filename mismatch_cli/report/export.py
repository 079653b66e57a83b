"""One row per token, for whoever wants to look with tools of their own; streamed, so a trace of any length fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from mismatch_cli.batch import TokenBatch
from mismatch_cli.errors import UsageError
from mismatch_cli.text import visible
from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.schema import TOKEN_COLUMNS

FORMATS = ("csv", "parquet")


def export_tokens(traces: list[Trace], folder: Path, kind: str) -> Path:
    """Write `tokens.csv` or `tokens.parquet`; control characters in token text are spelled out, missing is empty."""
    if kind not in FORMATS:
        raise UsageError(f"--export {kind} is not known. Choose one of: {', '.join(FORMATS)}.")
    path = folder / f"tokens.{kind}"
    with replacing(path) as temporary:
        _write(traces, temporary, kind)
    return path


def _write(traces: list[Trace], path: Path, kind: str) -> None:
    tables = _token_tables(traces)
    first = next(tables)
    with _writer(path, kind, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def _writer(path: Path, kind: str, schema: pa.Schema) -> AbstractContextManager[Any]:
    writer: AbstractContextManager[Any] = (
        pq.ParquetWriter(path, schema, compression="zstd") if kind == "parquet" else pa.csv.CSVWriter(path, schema)
    )
    return writer


def _token_tables(traces: list[Trace]) -> Iterator[pa.Table]:
    columns = sorted(set().union(*(trace.columns() for trace in traces)) & TOKEN_COLUMNS.keys() - {"response_ids"})
    for trace in traces:
        texts: dict[int, str] = {}
        for batch in trace.batches():
            yield pa.table(_keys(batch, trace, texts) | {name: _values(batch, name) for name in columns})


def _keys(batch: TokenBatch, trace: Trace, texts: dict[int, str]) -> dict[str, Any]:
    offset_S1 = batch.offset_S1.numpy()
    lengths_S = np.diff(offset_S1)
    ids_T = batch.response_ids_T.numpy()
    for token_id in np.unique(ids_T).tolist():
        texts.setdefault(token_id, visible(trace.vocabulary.decode([token_id])))
    rows_S = {"step": batch.step_S, "prompt_id": batch.prompt_id_S, "sample_index": batch.sample_index_S}
    return {
        **{name: np.repeat(values.numpy(), lengths_S) for name, values in rows_S.items()},
        "position": np.arange(len(ids_T), dtype=np.int32) - np.repeat(offset_S1[:-1], lengths_S).astype(np.int32),
        "token_id": ids_T,
        "token": pa.array([texts[i] for i in ids_T.tolist()], pa.string()),
    }


def _values(batch: TokenBatch, name: str) -> pa.Array:
    column = getattr(batch, f"{name}_T")
    kind = TOKEN_COLUMNS[name]
    if column is None:
        return pa.nulls(batch.num_tokens, kind)
    return pa.array(column.numpy(), kind, from_pandas=True)  # NaN, "not measured", becomes null
