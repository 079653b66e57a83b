"""Reading JSONL as Arrow tables, some megabytes at a time; a line that cannot be read is left out and counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from textwrap import shorten
from typing import Any

import orjson
import pyarrow as pa

from mismatch_cli.errors import first_line
from mismatch_cli.importers._sources import Source, Tally, lines_of
from mismatch_cli.trace import foreign

BLOCK_BYTES = 2**24
_SHOWN = 160  # characters of an error, which may repeat a whole row
_BATCH_BYTES = 2**18  # as Python objects: few enough to stay in the cache until they are arrays
CUT_OFF = "last lines that are cut off"
NO_JSON = "lines that are no JSON object"
OTHER_TYPES = "lines with values of other types than the layout has"
_UNFIT = (pa.ArrowException, OverflowError, UnicodeError)
SchemaFor = Callable[[dict[str, Any]], pa.Schema]
_Row = tuple[int, list[Any]]  # the number of the line, and its values in the order of the schema


def tables(source: Source, schema_for: SchemaFor, tally: Tally, advance: Callable[[int], None]) -> Iterator[pa.Table]:
    """The lines of a file, in order. `schema_for` says from a record in which types its like are to be read."""
    schema: pa.Schema | None = None
    block: list[pa.Table] = []
    rows: list[_Row] = []
    size = batch_size = 0
    for number, line in enumerate(lines_of(source.path), 1):
        batch_size += len(line)
        record = _record(line, f"{source.name}, line {number}", tally)
        if record is None:
            continue
        schema = schema or schema_for(record)
        rows.append((number, [record.get(name) for name in schema.names]))
        if batch_size < _BATCH_BYTES:
            continue
        block += _tables(rows, schema, schema_for, source.name, tally)
        rows, size, batch_size = [], size + batch_size, 0
        if size >= BLOCK_BYTES:
            yield from _joined(block)
            advance(size)
            block, size = [], 0
    if schema is not None:
        yield from _joined([*block, *_tables(rows, schema, schema_for, source.name, tally)])
    advance(size + batch_size)


def _joined(tables: list[pa.Table]) -> Iterator[pa.Table]:
    """Tables of equal types as one, in their order; nearly always all of them."""
    for _, equal in groupby(tables, key=lambda table: table.schema):
        yield pa.concat_tables(list(equal)).combine_chunks()


def _record(line: bytes, where: str, tally: Tally) -> dict[str, Any] | None:
    """The object of a line; None, and a count, for anything else but an empty line."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN and −Infinity are no JSON, but Python writes them
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if line.strip():
                tally.leave_out(NO_JSON if line.endswith(b"\n") else CUT_OFF, 1, where)
            return None
    if not isinstance(record, dict):
        tally.leave_out(NO_JSON, 1, where)
        return None
    return record


def _tables(rows: list[_Row], schema: pa.Schema, schema_for: SchemaFor, name: str, tally: Tally) -> Iterator[pa.Table]:
    """All rows at once; where one does not fit, each by itself, in the types that it shows."""
    if not rows:
        return
    try:
        yield _table(rows, schema)
        return
    except MemoryError:  # Arrow's own is one of its exceptions too
        raise
    except _UNFIT:
        pass
    for row in rows:
        try:
            found = _table([row], schema_for(dict(zip(schema.names, row[1], strict=True))))
        except _UNFIT as error:
            tally.leave_out(
                OTHER_TYPES, 1, f"{name}, line {row[0]}: {shorten(first_line(error), _SHOWN, placeholder=' …')}"
            )
            continue
        yield found


def _table(rows: list[_Row], schema: pa.Schema) -> pa.Table:
    columns = zip(*(values for _, values in rows), strict=True)
    arrays = [foreign.from_python(values, kind) for values, kind in zip(columns, schema.types, strict=True)]
    return pa.table(arrays, schema=schema)
