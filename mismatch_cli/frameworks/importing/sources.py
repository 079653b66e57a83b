"""From the user's paths to Arrow tables: finds files, peeks at them to detect the format, and
reads them in blocks.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
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

_READ_BYTES = 2**20
# So many lines, bytes of lines, and values of Parquet are enough to tell what a file holds
_FIRST_LINES = 64
_FIRST_BYTES = 2**24
_FIRST_VALUES = 2**20
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
        """How the file is read: "jsonl", "parquet", "pt" or "pickle"."""
        suffix = self.path.suffix.lower()
        if suffix in PICKLES:
            return "pickle"
        return KINDS.get(suffix, "jsonl")

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
        our_name = {its: ours for ours, its in self.columns.items()}
        renamed: dict[str, str] = {}
        for name in names:
            if name in our_name or name not in self.columns:
                renamed[our_name.get(name, name)] = name
        return renamed


@dataclass(frozen=True)
class FileHead:
    """A first look at a file: its keys or columns, under our names."""

    source: DumpFile
    keys: frozenset[str] = frozenset()

    def has(self, *keys: str) -> bool:
        """Whether the file has all of these keys."""
        return self.keys.issuperset(keys)


def find(paths: Sequence[Path]) -> list[DumpFile]:
    """The files to read, in numeric order; a `MismatchError` for one that is missing or
    unreadable.
    """
    sources = list(chain.from_iterable(map(_below, paths)))
    if not sources:
        raise MismatchError(
            f"{paths[0]} holds no files to import ({', '.join(KINDS)}). Formats: mismatch-cli "
            "import --formats"
        )
    for source in sources:
        if not is_encodable(source.name):
            raise MismatchError(f"The name of {source.path} is not UTF-8. Rename the file.")
    return sources


def _below(path: Path) -> list[DumpFile]:
    """The files that a path names, of those in a folder only the kinds that are read."""
    files, root = files_at(path)
    if files == [path]:
        _refuse_pickle(path)
        return [DumpFile(path, path.name)]
    others = set(files)
    sources: list[DumpFile] = []
    for file in files:
        is_of_a_kind = file.suffix.lower() in KINDS or _is_sealed_of_lines(file, others)
        if is_of_a_kind or _reader_of(file) is not None:
            name = str(file.relative_to(root)).removesuffix(SEALED)
            sources.append(DumpFile(file, name))
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
    key: list[tuple[int, int, str]] = []
    for piece in re.split(r"(\d+)", source.name):
        key.append((0, int(piece), "") if piece.isdecimal() else (1, 0, piece))
    return key


def _refuse_pickle(path: Path) -> None:
    """Raise a `MismatchError` for a pickle that nothing here reads as data."""
    if path.suffix.lower() not in PICKLES or _reader_of(path) is not None:
        return
    other = pointer(path)
    if other:
        raise MismatchError(f"{path} {other.why}")
    raise NeedsItsFramework(path, "is a pickle, which could run any code when opened")


def _reader_of(path: Path) -> ModuleType | None:
    """What reads this pickle as data: the `pickles.py` of the framework that saved it, if any."""
    if path.suffix.lower() not in PICKLES:
        return None
    for name in registry.names(READERS):
        reader = registry.load(READERS, name, "framework")
        if reader.is_saved(path):
            return reader
    return None


def peek(source: DumpFile) -> FileHead:
    """Look into one file; a `MismatchError` if it is broken or would have to be unpickled."""
    if source.kind == "parquet":
        names = roots(open_parquet(source).schema_arrow, source.columns.values())
        return FileHead(source, frozenset(source.renamed(names)))
    reader = _reader_of(source.path)
    if reader is not None:
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
    # Wide rows are few, since Python objects take many times the memory of Arrow's values.
    rows = file.metadata.num_rows * _FIRST_VALUES // max(1, _values_in(file.metadata))
    size = max(1, min(rows, _FIRST_LINES))
    with readable(source):
        for batch in file.iter_batches(size, use_threads=False):
            return list(batch.to_pylist())
    return []


def open_parquet(source: DumpFile) -> pq.ParquetFile:
    """Open a Parquet file; a `MismatchError` that names it where it cannot be read."""
    try:
        # Not mapped: the pages of a large file would count as memory of this process.
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
    renamed = source.renamed(held_in)
    ours = [name for name in columns if name in renamed]
    theirs = [renamed[name] for name in ours]
    size = decoded_bytes(file.metadata, [held_in[name] for name in theirs])
    if size > allowance(source.size):
        raise too_large(source.path, source.size)
    rows = max(1, file.metadata.num_rows)
    with readable(source):
        values = _values_in(file.metadata, renamed.get(tokens, tokens))
        batch_rows = _rows_of_a_block(rows, values, size)
        for batch in file.iter_batches(batch_rows, columns=theirs, use_threads=False):
            yield pa.table([column_at(batch, name) for name in theirs], names=ours)
            advance(source.size * batch.num_rows // rows)


def _rows_of_a_block(rows: int, tokens: int, size: int) -> int:
    """How many of a file's rows to read at a time, from its rows, tokens and bytes."""
    by_tokens = TOKENS_PER_BLOCK * rows // max(1, tokens)
    # Columns such as top-K have many more values than tokens: bytes bound a block too.
    by_bytes = _BYTES_PER_BLOCK * rows // max(1, size)
    return max(1, min(by_tokens, by_bytes))


@contextmanager
def readable(source: DumpFile) -> Iterator[None]:
    """Turn Arrow's errors about a damaged file into a `MismatchError` that names it."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable(source.path, error, _ELSE) from error


def _values_in(metadata: Any, column: str | None = None) -> int:
    """Number of values in a list column, or in all columns, from the footer."""
    values = 0
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for number in range(group.num_columns):
            chunk = group.column(number)
            # A list `x` is stored at a path such as `x.list.element`.
            if column is None or f"{chunk.path_in_schema}.".startswith(f"{column}."):
                values += chunk.num_values
    return values


def jsonl_tables(
    source: DumpFile, kinds: pa.Schema | SchemaFor, tally: Tally, advance: Callable[[int], None]
) -> Iterator[pa.Table]:
    """The lines of a file, some megabytes at a time; unreadable ones are left out and counted.

    `kinds` holds the types of the values, or is a function that derives them from a record.
    """
    rows = _JsonRows(source.name, kinds, tally)
    block: list[pa.Table] = []
    size = batch_size = 0
    for number, line in enumerate(lines_of(source.path, source.span), 1):
        batch_size += len(line)
        record = _record(line, f"{source.name}, line {number}", tally)
        if record is None:
            continue
        rows.add(number, _under_our_names(record, source))
        if batch_size < _BATCH_BYTES:
            continue
        # Python objects of a batch become arrays while they are in the processor's cache.
        # A block joins many of them, since an importer's work has a price per table.
        block += rows.convert()
        size += batch_size
        batch_size = 0
        if size >= BLOCK_BYTES:
            yield from _joined(block)
            advance(size)
            block = []
            size = 0
    yield from _joined([*block, *rows.convert()])
    advance(size + batch_size)


def _under_our_names(record: dict[str, Any], source: DumpFile) -> dict[str, Any]:
    if not source.columns:
        return record
    values = with_paths(record, source.columns.values())
    return {ours: values[its] for ours, its in source.renamed(values).items()}


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
        # A line without an end is the last one, and perhaps still being written.
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
    except orjson.JSONDecodeError:
        # NaN and −Infinity are not JSON, but Python writes them.
        # Without the line break, an error names a column of this line.
        return parse_json(line.rstrip(b"\r\n"))


class _JsonRows:
    """Collects the records of a file, and converts them to tables of the types that they show."""

    def __init__(self, file: str, kinds: pa.Schema | SchemaFor, tally: Tally) -> None:
        self._file = file
        self._kinds = kinds
        self._tally = tally
        self._names: list[str] = []  # of the columns
        self._rows: list[_Row] = []

    def add(self, number: int, record: dict[str, Any]) -> None:
        """Collect the record of a line."""
        if not self._names:
            self._names = self._schema_for(record).names
        self._rows.append((number, [record.get(name) for name in self._names]))

    def convert(self) -> Iterator[pa.Table]:
        """All rows at once, in the types of each column's first value; if one does not fit, each
        by itself, with its own types.
        """
        rows = self._rows
        self._rows = []
        if not rows:
            return
        columns = zip(*(values for _, values in rows), strict=True)
        record = dict(zip(self._names, map(_first_value, columns), strict=True))
        try:
            yield self._table(rows, record)
            return
        except MemoryError:  # Arrow's own is an ArrowException too
            raise
        except _UNFIT:
            pass
        for row in rows:
            table = self._table_of_row(row)
            if table is not None:
                yield table

    def _table_of_row(self, row: _Row) -> pa.Table | None:
        """A row with its own types; None, counted, where a value does not fit."""
        number, values = row
        try:
            return self._table([row], dict(zip(self._names, values, strict=True)))
        except _UNFIT as error:
            why = shorten(first_line(error), _SHOWN, placeholder=" …")
            self._tally.leave_out(OTHER_TYPES, 1, f"{self._file}, line {number}: {why}")
            return None

    def _table(self, rows: list[_Row], record: dict[str, Any]) -> pa.Table:
        """Some rows in the types that a record shows."""
        kinds = self._schema_for(record)
        schema = pa.schema([kinds.field(name) for name in self._names])
        columns = zip(*(values for _, values in rows), strict=True)
        arrays = list(map(foreign_values.from_python, columns, schema.types))
        return pa.table(arrays, schema=schema)

    def _schema_for(self, record: dict[str, Any]) -> pa.Schema:
        if isinstance(self._kinds, pa.Schema):
            return self._kinds
        return self._kinds(record)


def _first_value(column: Iterable[Any]) -> Any:
    """The first that is not null."""
    return next((value for value in column if value is not None), None)
