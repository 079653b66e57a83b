"""Exports traces for other tools, one row per token or one line per response; streamed, so any
length fits.
"""

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.reader import Trace

_ROWS_AT_A_TIME = 64
# Beginnings that a spreadsheet takes for a formula, wide forms included, and those that already
# look quoted: dropping the first apostrophe of a cell that matches restores every text.
_FORMULA = re.compile("'*[=+\\-@\t\r\n＝＋－＠]")


def file_name(kind: str) -> str:
    """The name of the file that a trace is exported to as csv, parquet or jsonl."""
    if kind == "jsonl":
        return "responses.jsonl"
    return f"tokens.{kind}"


def export_responses(traces: list[Trace], folder: Path) -> Path:
    """Write `responses.jsonl`: every row in the plain schema, which `import` reads back to the same
    bits.

    Columns that were not measured for a response are left out of its line; NaN and −Infinity are
    kept.
    """
    path = folder / file_name("jsonl")
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for trace in traces:
            for table in trace.tables():
                # Python numbers take ten times the memory of Arrow's.
                # A few rows at a time become Python's, never a whole row group.
                for start in range(0, table.num_rows, _ROWS_AT_A_TIME):
                    for row in table.slice(start, _ROWS_AT_A_TIME).to_pylist():
                        measured = {key: value for key, value in row.items() if value is not None}
                        file.write(json.dumps(measured, separators=(",", ":")) + "\n")
    return path


def export_tokens(tables: Iterable[pa.Table], folder: Path, kind: str) -> Path:
    """Append tables of one schema to `tokens.csv` or `tokens.parquet`; missing values are empty.

    In CSV, a text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    path = folder / file_name(kind)
    with replacing(path) as temporary, ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None and kind == "csv":
                writer = stack.enter_context(pa_csv.CSVWriter(temporary, table.schema))
            elif writer is None:
                writer = stack.enter_context(
                    pq.ParquetWriter(temporary, table.schema, compression="zstd")
                )
            if kind == "csv":
                table = _without_formulas(table)
            writer.write_table(table)
    return path


def _without_formulas(table: pa.Table) -> pa.Table:
    """The table with texts that a spreadsheet shows as they are."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type) or pa.types.is_string(field.type):
            chunks = []
            for chunk in table.column(index).chunks:
                chunks.append(_quoted(chunk.dictionary_encode()).cast(field.type))
            table = table.set_column(index, field, pa.chunked_array(chunks, field.type))
    return table


def _quoted(texts: pa.DictionaryArray) -> pa.DictionaryArray:
    """The texts, with an apostrophe before each that a spreadsheet would run."""
    distinct = texts.dictionary.to_pylist()
    for index, text in enumerate(distinct):
        if text and _FORMULA.match(text):
            distinct[index] = f"'{text}"
    return pa.DictionaryArray.from_arrays(texts.indices, pa.array(distinct, pa.string()))
