"""Reads numbered rows from a local file or a data set on the hub, on request without
repetitions.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.errors import MismatchError, UsageError, first_line, unreadable
from mismatch_cli.base.memory import allowance, bounded, decoded_bytes, too_large
from mismatch_cli.base.text import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
Numbered = tuple[int, Row]
_ROWS_AT_A_TIME, _ROWS_COMPARED = 64, 2**16
_LOCAL_FORMATS = (".jsonl", ".json", ".parquet", ".csv")
_ENCODING = "utf-8-sig"  # spreadsheets write a mark before the first name, which is not part of it


def is_local(location: str) -> bool:
    """Whether this names a file, existing or not, rather than a data set on the hub or a folder
    laid out like one.
    """
    path = Path(location).expanduser()
    return path.is_file() or path.suffix in _LOCAL_FORMATS


def read_rows(
    location: str, config: str | None, split: str, unique_in: Sequence[str] | None = None
) -> tuple[list[int], list[Row]]:
    """The row numbers and the rows.

    With `unique_in`, a list of fields, rows that equal an earlier one in all of them may be left
    out: Arrow's columns tell before a row becomes a Python object, which data sets that repeat each
    problem a hundred times need.
    """
    path = Path(location).expanduser()
    if path.is_file():
        numbered = _read_file(path, unique_in)
    elif path.suffix in _LOCAL_FORMATS:
        raise MismatchError(
            f"{path} does not exist. Give the path of a .jsonl, .json, .parquet or .csv file."
        )
    else:
        numbered = list(_read_data_set(location, config, split, unique_in))
    return [number for number, _ in numbered], [row for _, row in numbered]


def _read_file(path: Path, unique_in: Sequence[str] | None) -> list[Numbered]:
    if path.suffix not in _LOCAL_FORMATS:
        raise UsageError(
            f"{path} has the extension '{path.suffix}'. Prompts are read from "
            f"{', '.join(_LOCAL_FORMATS)}."
        )
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    try:
        with bounded(path, path.stat().st_size):
            if path.suffix == ".parquet":
                return list(_read_parquet(path, unique_in))
            return list(enumerate(readers[path.suffix](path)))
    except (OSError, ValueError, csv.Error) as error:
        raise unreadable(
            path, error, "Fix the file, or name another.", "cannot be read: {}"
        ) from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding=_ENCODING) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON ({error}).") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object. Write one {{...}} per line.")
            yield row


def _read_json(path: Path) -> Iterator[Row]:
    content = parse_json(path.read_text(encoding=_ENCODING))
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError("the file is not a JSON list of objects.")
    yield from content


def _read_parquet(path: Path, unique_in: Sequence[str] | None) -> Iterator[Numbered]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        size = path.stat().st_size
        if decoded_bytes(file.metadata) > allowance(size):
            raise too_large(path, size)
        if unique_in is None:
            batches = (batch.to_pylist() for batch in file.iter_batches(_ROWS_AT_A_TIME))
            yield from enumerate(chain.from_iterable(batches))
        else:
            yield from first_of_each(map(_as_table, file.iter_batches(_ROWS_COMPARED)), unique_in)


def _as_table(rows: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([rows])


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row:
                # csv puts surplus values under None. One unquoted comma in a prompt is enough, and
                # every later column of the row, the answer among them, has the wrong value.
                raise ValueError(
                    f"line {reader.line_num} has more values than the first line has names"
                )
            yield row


def _read_data_set(
    location: str, config: str | None, split: str, unique_in: Sequence[str] | None
) -> Iterator[Numbered]:
    """A data set on the hub by name, or a folder laid out like one."""
    from datasets import disable_progress_bars, load_dataset

    if not sys.stderr.isatty():
        disable_progress_bars()  # in a log a bar is an endless line
    try:
        dataset = load_dataset(location, config, split=split)
    except Exception as error:  # the hub client has no common base class for "not found"
        raise MismatchError(
            f"'{location}' is not a local file, and loading it as a data set failed: "
            f"{first_line(error)}. Give the path of a .jsonl, .json, .parquet or .csv file, or "
            "the name of a data set and its split."
        ) from error
    if unique_in is None:
        yield from enumerate(dataset)
    else:
        yield from first_of_each(dataset.with_format("arrow").iter(_ROWS_COMPARED), unique_in)


def first_of_each(tables: Iterable[pa.Table], fields: Sequence[str]) -> Iterator[Numbered]:
    """The rows that differ from all earlier ones in the existing fields of these; a dotted name
    is inside a field.
    """
    import numpy as np
    import pyarrow as pa

    names = {field.partition(".")[0] for field in fields}
    earlier: set[bytes] = set()  # digests, since a data set's texts would fill the memory
    rows_before = 0
    for table in tables:
        keys = _keys(table, names).dictionary_encode()
        first_row = np.unique(keys.indices.to_numpy(), return_index=True)[1].tolist()
        new: list[int] = []
        for row, key in zip(first_row, keys.dictionary, strict=True):
            digest = hashlib.blake2b(key.as_buffer(), digest_size=16).digest()
            if digest not in earlier:
                earlier.add(digest)
                new.append(row)
        new.sort()
        numbers = [rows_before + row for row in new]
        yield from zip(numbers, table.take(pa.array(new, pa.int64())).to_pylist(), strict=True)
        rows_before += len(table)


def _keys(table: pa.Table, names: set[str]) -> pa.Array:
    """A text for each row; rows with equal values in these columns have equal texts."""
    import pyarrow as pa

    existing = sorted(names.intersection(table.column_names))
    if not existing:
        # Nothing to compare: rows stay as they are, and the caller refuses them.
        return pa.array(map(str, range(len(table))), pa.large_string())
    return _together([_as_text(table[name].combine_chunks()) for name in existing])


def _as_text(column: Any) -> pa.Array:
    """A text for each value: values of one type are equal exactly where their texts are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_struct(kind):
        return _together([_as_text(part) for part in column.flatten()])
    if pa.types.is_fixed_size_list(kind):
        return _as_text(column.cast(pa.list_(kind.value_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        length = pc.fill_null(pc.list_value_length(column), pa.scalar(0, column.offsets.type))
        # `flatten` leaves out null lists, which have no length either: they count as empty.
        ends = pc.cumulative_sum(length.cast(pa.int64()))
        offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
        texts = pa.LargeListArray.from_arrays(offsets, _counted(_as_text(column.flatten())))
        return pc.binary_join(texts, pa.scalar("", pa.large_string()))
    return column.cast(pa.large_string())


def _together(texts: Sequence[pa.Array]) -> pa.Array:
    """One text for each row; rows that differ in any part have different texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.binary_join_element_wise(*map(_counted, texts), pa.scalar("", pa.large_string()))


def _counted(text: pa.Array) -> pa.Array:
    """Each text with its length in front; null has a distinct text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    length = pc.binary_length(text).cast(pa.large_string())
    counted = pc.binary_join_element_wise(length, text, pa.scalar(":", pa.large_string()))
    return pc.fill_null(counted, pa.scalar("-", pa.large_string()))
