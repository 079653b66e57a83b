"""Exports traces for other tools, one row per token or one line per response; streamed, so any
length fits.
"""

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
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
    return "responses.jsonl" if kind == "jsonl" else f"tokens.{kind}"


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
                # Python numbers take ten times the memory
                for start in range(0, table.num_rows, _ROWS_AT_A_TIME):
                    for row in table.slice(start, _ROWS_AT_A_TIME).to_pylist():
                        known = {name: value for name, value in row.items() if value is not None}
                        file.write(json.dumps(known, separators=(",", ":")) + "\n")
    return path


def export_tokens(tables: Iterable[pa.Table], folder: Path, kind: str) -> Path:
    """Append tables of one schema to `tokens.csv` or `tokens.parquet`; missing values are empty.

    In CSV, a text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    path = folder / file_name(kind)
    with replacing(path) as temporary, ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None:
                made = (
                    pa_csv.CSVWriter
                    if kind == "csv"
                    else partial(pq.ParquetWriter, compression="zstd")
                )
                writer = stack.enter_context(made(temporary, table.schema))
            writer.write_table(_without_formulas(table) if kind == "csv" else table)
    return path


def _without_formulas(table: pa.Table) -> pa.Table:
    """The table with texts that a spreadsheet shows as they are."""
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type) or pa.types.is_string(field.type):
            parts = [
                _quoted(part.dictionary_encode()).cast(field.type)
                for part in table.column(place).chunks
            ]
            table = table.set_column(place, field, pa.chunked_array(parts, field.type))
    return table


def _quoted(texts: pa.DictionaryArray) -> pa.DictionaryArray:
    words = [
        f"'{word}" if word and _FORMULA.match(word) else word
        for word in texts.dictionary.to_pylist()
    ]
    return pa.DictionaryArray.from_arrays(texts.indices, pa.array(words, pa.string()))
