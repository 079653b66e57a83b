"""From the user's paths to Arrow tables: finds files, peeks at them to detect the format, and
reads them in blocks.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, first_line, unreadable
from mismatch_cli.base.memory import allowance, decoded_bytes, too_large
from mismatch_cli.base.text import is_encodable, parse_json
from mismatch_cli.frameworks import PICKLES as READERS
from mismatch_cli.frameworks.importing import (
    KINDS,
    PICKLES,
    SEALED,
    files_at,
    opened,
    torch_file,
)
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.other_files import pointer
from mismatch_cli.frameworks.importing.paths import column_at, roots, with_paths
from mismatch_cli.frameworks.importing.torch_file import NeedsItsFramework
from mismatch_cli.trace import foreign_values

_FIRST_LINES, _FIRST_BYTES, _FIRST_VALUES = 64, 2**24, 2**20  # enough to tell what a file holds
_READ_BYTES = 2**20
TOKENS_PER_BLOCK = 2**19  # read at a time; of Parquet, whatever its row groups
_BYTES_PER_BLOCK = 2**27  # of Parquet with longer columns
BLOCK_BYTES = 2**24  # of JSONL
_BATCH_BYTES = 2**18  # as Python objects: few enough to stay in the cache until they are arrays
_SHOWN = 160  # characters of an error, which may repeat a whole row
CUT_OFF = "truncated last lines"
NO_JSON = "lines without a JSON object"
OTHER_TYPES = "lines with values of the wrong type"
_KINDS_OF_JSON = {list: "list", str: "text", bool: "flag", type(None): "null"}
_ELSE = "Copy it again, or leave it out."
_UNFIT = (pa.ArrowException, OverflowError, UnicodeError)
SchemaFor = Callable[[dict[str, Any]], pa.Schema]
_Row = tuple[int, list[Any]]  # line number, and the values in the schema's order


@dataclass(frozen=True)
class DumpFile:
    """One file of a dump; `name` is its path below the user's path, without `.zst`, `columns` its
    names for ours (ours: its).

    `also` holds further names (its: ours): the first one under which a row has a value counts.
    `span` limits reading to a range of bytes: whole lines of a growing JSONL file.
    """

    path: Path
    name: str
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    also: Mapping[str, str] = field(default_factory=dict, hash=False)
    span: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        suffix = self.path.suffix.lower()
        return "pickle" if suffix in PICKLES else KINDS.get(suffix, "jsonl")

    @property
    def group(self) -> tuple[str, str]:
        """The files of one layout: names that differ only in numbers."""
        return str(self.path.parent), re.sub(r"\d+", "#", self.path.name)

    @property
    def size(self) -> int:
        """In bytes, of a sealed file as if it were not."""
        return opened.size_of(self.path)

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Our name: the file's name, for each column; one of our names that maps to another
        column is not read.
        """
        ours = {its: name for name, its in self.columns.items()}
        return {
            ours.get(name, name): name for name in names if name in ours or name not in self.columns
        }


@dataclass(frozen=True)
class FileHead:
    """A first look at a file: its keys or columns, under our names."""

    source: DumpFile
    keys: frozenset[str] = frozenset()

    def has(self, *keys: str) -> bool:
        return self.keys.issuperset(keys)


def find(paths: Sequence[Path]) -> list[DumpFile]:
    """The files to read, in numeric order; a `MismatchError` for one that is missing or
    unreadable.
    """
    found = [source for path in paths for source in _below(path)]
    if not found:
        raise MismatchError(
            f"{paths[0]} holds no files to import ({', '.join(KINDS)}). Formats: mismatch-cli "
            "import --formats"
        )
    if odd := next((source.path for source in found if not is_encodable(source.name)), None):
        raise MismatchError(f"The name of {odd} is not UTF-8. Rename the file.")
    return found


def _below(path: Path) -> list[DumpFile]:
    files, root = files_at(path)
    if files == [path]:
        _refuse_pickle(path)
        return [DumpFile(path, path.name)]
    whole = set(files)
    sources = [
        DumpFile(p, str(p.relative_to(root)).removesuffix(SEALED))
        for p in files
        if (p.suffix.lower() in KINDS or _is_sealed_of_lines(p, whole) or _reader_of(p) is not None)
    ]
    if not sources:
        for file in sorted(files):
            _refuse_pickle(file)
    return sorted(sources, key=_numbers_by_value)


def _is_sealed_of_lines(path: Path, files: Set[Path]) -> bool:
    """Whether a file holds sealed lines that are in none of the other files as they were."""
    plain = path.with_suffix("")
    return opened.is_sealed(path) and plain.suffix.lower() in KINDS and plain not in files


def _numbers_by_value(source: DumpFile) -> list[tuple[int, int, str]]:
    """A sort key that puts `step_10` after `step_9`."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", source.name)
    ]


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in PICKLES and _reader_of(path) is None:
        other = pointer(path)
        if other:
            raise MismatchError(f"{path} {other.why}")
        raise NeedsItsFramework(path, "is a pickle, which could run any code when opened")


def _reader_of(path: Path) -> ModuleType | None:
    """What reads this pickle as data: the `pickles.py` of the framework that saved it, if any."""
    if path.suffix.lower() not in PICKLES:
        return None
    readers = (registry.load(READERS, name, "framework") for name in registry.names(READERS))
    return next((reader for reader in readers if reader.is_saved(path)), None)


def peek(source: DumpFile) -> FileHead:
    """Look into one file; a `MismatchError` if it is broken or would have to be unpickled."""
    if source.kind == "parquet":
        names = roots(open_parquet(source).schema_arrow, source.columns.values())
        return FileHead(source, frozenset(source.renamed(names)))
    if reader := _reader_of(source.path):
        return FileHead(source, frozenset(reader.load(source.path)))
    if source.kind == "pt":
        return FileHead(source, torch_file.keys_of(torch_file.load(source.path)))
    return FileHead(source, keys_of(source))


def keys_of(source: DumpFile) -> frozenset[str]:
    """The keys of the first record of a file of lines, under our names."""
    first = with_paths(next(records_of(source.path), {}), source.columns.values())
    return frozenset(source.renamed(first))


def first_rows(source: DumpFile) -> list[dict[str, Any]]:
    """The first few lines or rows of a file, as Python values under its own names."""
    if source.kind == "jsonl":
        return list(records_of(source.path))
    if source.kind != "parquet":
        return []
    file = open_parquet(source)
    if decoded_bytes(file.metadata) > allowance(source.size):
        raise too_large(source.path, source.size)
    rows = file.metadata.num_rows * _FIRST_VALUES // max(1, _values_in(file.metadata))
    with readable(source):
        batches = file.iter_batches(max(1, min(rows, _FIRST_LINES)), use_threads=False)
        return next((batch.to_pylist() for batch in batches), [])


def open_parquet(source: DumpFile) -> pq.ParquetFile:
    try:
        # Mmap of a large file would count as memory
        return pq.ParquetFile(source.path, buffer_size=_READ_BYTES)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable(source.path, error, _ELSE, "is broken or truncated ({})") from error


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects among the first lines."""
    size = 0
    for line in islice(lines_of(path), _FIRST_LINES):
        size += len(line)
        with suppress(ValueError):
            yield _object(line)
        if size > _FIRST_BYTES:
            return


def lines_of(path: Path, span: tuple[int, int] | None = None) -> Iterator[bytes]:
    """The lines of a file, or of a span of it, as bytes."""
    position, end = span or (0, None)
    for line in opened.lines(path, position):
        position += len(line)
        if end is not None and position > end:
            return
        yield line


def parquet_tables(
    source: DumpFile, columns: Sequence[str], tokens: str, advance: Callable[[int], None]
) -> Iterator[pa.Table]:
    """The file's columns among `columns`, some 500,000 values of the list column `tokens` at a
    time.
    """
    file = open_parquet(source)
    held_in = roots(file.schema_arrow, source.columns.values())
    its = source.renamed(held_in)
    ours = [name for name in columns if name in its]
    names = [its[name] for name in ours]
    size = decoded_bytes(file.metadata, [held_in[name] for name in names])
    if size > allowance(source.size):
        raise too_large(source.path, source.size)
    rows = max(1, file.metadata.num_rows)
    with readable(source):
        values = _values_in(file.metadata, its.get(tokens, tokens))
        batch = min(
            TOKENS_PER_BLOCK * rows // max(1, values), _BYTES_PER_BLOCK * rows // max(1, size)
        )
        for found in file.iter_batches(max(1, batch), columns=names, use_threads=False):
            yield pa.table([column_at(found, name) for name in names], names=ours)
            advance(source.size * found.num_rows // rows)


@contextmanager
def readable(source: DumpFile) -> Iterator[None]:
    """Turn Arrow's errors about a damaged file into a `MismatchError` that names it."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable(source.path, error, _ELSE) from error


def _values_in(metadata: object, tokens: str | None = None) -> int:
    """Number of values in the list column, or in all columns, from the footer."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]  # type: ignore[attr-defined]
    return sum(
        group.column(i).num_values
        for group in groups
        for i in range(group.num_columns)
        if tokens is None or f"{group.column(i).path_in_schema}.".startswith(f"{tokens}.")
    )


def jsonl_tables(
    source: DumpFile, kinds: pa.Schema | SchemaFor, tally: Tally, advance: Callable[[int], None]
) -> Iterator[pa.Table]:
    """The lines of a file, some megabytes at a time; unreadable ones are left out and counted.

    `kinds` holds the types of the values, or is a function that derives them from a record.
    """
    schema_for: SchemaFor = (lambda _: kinds) if isinstance(kinds, pa.Schema) else kinds
    schema: pa.Schema | None = None
    block: list[pa.Table] = []
    rows: list[_Row] = []
    size = batch_size = 0
    for number, line in enumerate(lines_of(source.path, source.span), 1):
        batch_size += len(line)
        record = _record(line, f"{source.name}, line {number}", tally)
        if record is None:
            continue
        if source.columns:
            record = with_paths(record, source.columns.values())
            record = {ours: record[its] for ours, its in source.renamed(record).items()}
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
    """Concatenate neighboring tables of equal types, which nearly always are all of them."""
    for _, equal in groupby(tables, key=lambda table: table.schema):
        yield pa.concat_tables(list(equal)).combine_chunks()


def _record(line: bytes, where: str, tally: Tally) -> dict[str, Any] | None:
    """The object of a line; None for anything else, which is counted unless it is an empty line."""
    try:
        return _object(line)
    except ValueError as error:
        if not line.strip():
            return None
        if line.endswith(b"\n") or isinstance(error, _NoObject):
            tally.leave_out(NO_JSON, 1, f"{where}: {_why(error)}")
        else:
            tally.leave_out(CUT_OFF, 1, where)
        return None


def first_fault(source: DumpFile) -> str:
    """The first line that is no object, with what is wrong with it; empty if there is none."""
    if source.kind != "jsonl":
        return ""
    for number, line in enumerate(islice(lines_of(source.path), _FIRST_LINES), 1):
        try:
            _object(line)
        except ValueError as error:
            if line.strip():
                return f"; line {number}: {_why(error)}"
    return ""


class _NoObject(ValueError):
    """A line of whole JSON that is no object."""


def _object(line: bytes) -> dict[str, Any]:
    """The object of a line; a ValueError for anything else."""
    record = _parsed(line)
    if not isinstance(record, dict):
        raise _NoObject(f"a JSON {_KINDS_OF_JSON.get(type(record), 'number')}, not an object")
    return record


def _why(error: ValueError) -> str:
    """What is wrong with a line, and at which character of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"column {error.colno}, {error.msg[:1].lower()}{error.msg[1:]}"
    return first_line(error)


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN and −Infinity are not JSON, but Python writes them
        return parse_json(line.rstrip(b"\r\n"))  # an error names a column of this line


def _tables(
    rows: list[_Row], schema: pa.Schema, schema_for: SchemaFor, file: str, tally: Tally
) -> Iterator[pa.Table]:
    """Convert all rows at once; if one does not fit, each by itself, with its own types."""
    if not rows:
        return
    try:
        yield _table(rows, schema)
        return
    except MemoryError:  # Arrow's own is an ArrowException too
        raise
    except _UNFIT:
        pass
    for number, values in rows:
        record = dict(zip(schema.names, values, strict=True))
        own = schema_for(record)
        try:
            # Its order may differ, since each record shows its own forms
            found = _table([(number, [record.get(name) for name in own.names])], own)
        except _UNFIT as error:
            why = shorten(first_line(error), _SHOWN, placeholder=" …")
            tally.leave_out(OTHER_TYPES, 1, f"{file}, line {number}: {why}")
            continue
        yield found


def _table(rows: list[_Row], schema: pa.Schema) -> pa.Table:
    columns = zip(*(values for _, values in rows), strict=True)
    arrays = [
        foreign_values.from_python(values, kind)
        for values, kind in zip(columns, schema.types, strict=True)
    ]
    return pa.table(arrays, schema=schema)
