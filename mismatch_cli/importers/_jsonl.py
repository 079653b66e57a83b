"""Reading JSONL as Arrow tables, some megabytes at a time; a line that cannot be read is left out and counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.json as paj

from mismatch_cli.errors import first_line
from mismatch_cli.importers._sources import Source
from mismatch_cli.importers._tally import Tally

CHUNK_BYTES = 2**24
CUT_OFF = "last lines that are cut off"
NO_JSON = "lines that are no JSON object"
OTHER_TYPES = "lines with values of other types than the layout has"
SchemaFor = Callable[[dict[str, Any]], pa.Schema]


def tables(source: Source, schema_for: SchemaFor, tally: Tally, advance: Callable[[int], None]) -> Iterator[pa.Table]:
    """The lines of a file, in order. `schema_for` says from a record in which types its like are to be read."""
    reader = _Reader(source.name, schema_for, tally)
    number = 1
    with source.path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            chunk += file.readline()
            yield from reader.read(chunk, number)
            number += chunk.count(b"\n")
            advance(len(chunk))


class _Reader:
    def __init__(self, name: str, schema_for: SchemaFor, tally: Tally) -> None:
        self._name, self._schema_for, self._tally = name, schema_for, tally
        self._schema: pa.Schema | None = None

    def read(self, chunk: bytes, number: int) -> Iterator[pa.Table]:
        if self._schema is None:
            self._schema = _first_schema(chunk, self._schema_for)
        if self._schema is not None:
            try:
                yield from _parse(chunk, self._schema)
                return
            except pa.ArrowInvalid:
                pass
        yield from self._halves(chunk.split(b"\n"), number, ends=chunk.endswith(b"\n"))

    def _halves(self, lines: list[bytes], number: int, ends: bool) -> Iterator[pa.Table]:
        """What can be read of lines of which one cannot; nearly always few can not."""
        try:
            if self._schema is None or len(lines) == 1:
                raise pa.ArrowInvalid
            found = _parse(b"\n".join(lines), self._schema)
        except pa.ArrowInvalid:
            if len(lines) == 1:
                yield from self._one(lines[0], number, ends)
                return
            half = len(lines) // 2
            yield from self._halves(lines[:half], number, ends=True)
            yield from self._halves(lines[half:], number + half, ends)
            return
        yield from found

    def _one(self, line: bytes, number: int, ends: bool) -> Iterator[pa.Table]:
        if not line.strip():
            return
        where = f"{self._name}, line {number}"
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
        except (ValueError, RecursionError):
            self._tally.leave_out(NO_JSON if ends else CUT_OFF, 1, where)
            return
        try:
            yield from _parse(line, self._schema_for(record))
        except pa.ArrowInvalid as error:
            self._tally.leave_out(OTHER_TYPES, 1, f"{where}: {first_line(error)}")


def _first_schema(chunk: bytes, schema_for: SchemaFor) -> pa.Schema | None:
    for line in chunk.split(b"\n", 64)[:64]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return schema_for(record)
    return None


def _parse(chunk: bytes, schema: pa.Schema) -> list[pa.Table]:
    if not chunk.strip():
        return []
    table = paj.read_json(
        pa.BufferReader(chunk),
        read_options=paj.ReadOptions(use_threads=False, block_size=len(chunk) + 1),
        parse_options=paj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    return [table] if table.num_rows else []
