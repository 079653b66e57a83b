"""Traces for whoever has tools of their own, a row per token or a line per response; streamed, so any length fits."""

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.batch import TokenBatch
from mismatch_cli.text import visible
from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.schema import TOKEN_COLUMNS

_ROWS_AT_A_TIME = 64
_Columns: TypeAlias = dict[str, np.ndarray | list[str]]  # the tokens of a batch


def file_name(kind: str) -> str:
    """The name under which a trace is exported as csv, parquet or jsonl."""
    return "responses.jsonl" if kind == "jsonl" else f"tokens.{kind}"


def export_responses(traces: list[Trace], folder: Path) -> Path:
    """Write `responses.jsonl`: every row in the plain schema, which `import` reads back to the same bits.

    A column that was not measured for a response is left out of its line; NaN and −Infinity are written as such.
    """
    path = folder / file_name("jsonl")
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for trace in traces:
            for table in trace.tables():
                for start in range(0, table.num_rows, _ROWS_AT_A_TIME):  # Python numbers take ten times the room
                    for row in table.slice(start, _ROWS_AT_A_TIME).to_pylist():
                        known = {name: value for name, value in row.items() if value is not None}
                        file.write(json.dumps(known, separators=(",", ":")) + "\n")
    return path


def export_tokens(traces: list[Trace], folder: Path, kind: str) -> Path:
    """Write `tokens.csv` or `tokens.parquet`; control characters in token text are spelled out, missing is empty."""
    path = folder / file_name(kind)
    with replacing(path) as temporary:
        (_write_csv if kind == "csv" else _write_parquet)(temporary, _token_tables(traces))
    return path


def _write_csv(path: Path, tables: Iterator[_Columns]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, columns in enumerate(tables):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*map(_cells, columns.values()), strict=True))


def _cells(values: np.ndarray | list[str]) -> list[Any]:
    """What the cells of a column say: as few digits as give a number back, nothing where it is NaN."""
    if isinstance(values, list) or values.dtype.kind != "f":
        return list(values)
    return np.where(np.isnan(values), "", values.astype(str)).tolist()


def _write_parquet(path: Path, tables: Iterator[_Columns]) -> None:
    with ExitStack() as stack:
        writer = None
        for columns in tables:
            arrays = {name: pa.array(values, from_pandas=True) for name, values in columns.items()}  # NaN is null
            table = pa.table(arrays, schema=writer and writer.schema)
            writer = writer or stack.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd"))
            writer.write_table(table)


def _token_tables(traces: list[Trace]) -> Iterator[_Columns]:
    measured = set().union(*(trace.columns() for trace in traces))
    columns = [name for name in TOKEN_COLUMNS if name in measured and name != "response_ids"]
    for trace in traces:
        texts: dict[int, str] = {}
        for batch in trace.batches():
            yield _keys(batch, trace, texts) | {name: _values(batch, name) for name in columns}


def _keys(batch: TokenBatch, trace: Trace, texts: dict[int, str]) -> _Columns:
    offset_S1 = batch.offset_S1
    lengths_S = np.diff(offset_S1)
    ids_T = batch.response_ids_T
    for token_id in np.unique(ids_T).tolist():
        texts.setdefault(token_id, visible(trace.vocabulary.decode([token_id])))
    reward_S = np.full(len(lengths_S), np.nan, np.float32) if batch.reward_S is None else batch.reward_S
    rows_S = {
        "step": batch.step_S,
        "prompt_id": batch.prompt_id_S,
        "sample_index": batch.sample_index_S,
        "truncated": batch.truncated_S,
        "reward": reward_S,
    }
    return {
        **{name: np.repeat(values_S, lengths_S) for name, values_S in rows_S.items()},
        "position": np.arange(len(ids_T)) - np.repeat(offset_S1[:-1], lengths_S),
        "token_id": ids_T,
        "token": [texts[i] for i in ids_T.tolist()],
    }


def _values(batch: TokenBatch, name: str) -> np.ndarray:
    column = getattr(batch, f"{name}_T")
    return np.full(batch.num_tokens, np.nan) if column is None else column
