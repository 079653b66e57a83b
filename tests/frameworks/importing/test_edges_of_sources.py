"""The progress of reading a file, and how much of it a first look takes."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import sources as _sources
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.paths import value_at
from mismatch_cli.frameworks.importing.sources import (
    DumpFile,
    find,
    first_rows,
    jsonl_tables,
    lines_of,
)


def test_the_progress_of_a_file_is_its_size_however_it_is_cut(tmp_path, monkeypatch):
    """Nine bytes a line: a batch has two of them, and a block four."""
    monkeypatch.setattr(_sources, "_BATCH_BYTES", 18)
    monkeypatch.setattr(_sources, "BLOCK_BYTES", 36)
    path, progress = tmp_path / "a.jsonl", list[int]()
    path.write_text("".join(f'{{"a": {i}}}\n' for i in range(10)), encoding="utf-8")
    source = DumpFile(path, path.name)
    tables = list(jsonl_tables(source, pa.schema({"a": pa.int64()}), Tally(), progress.append))
    assert [table.num_rows for table in tables] == [4, 4, 2]
    assert progress == [36, 36, 18] and sum(progress) == source.size


def test_a_first_look_at_wide_rows_takes_fewer_of_them(tmp_path, monkeypatch):
    """Ten values a row: of at most 35 values there are three rows, and one row at least."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [list(range(10))] * 80}), path)
    for values, rows in ((2**20, 64), (35, 3), (9, 1)):
        monkeypatch.setattr(_sources, "_FIRST_VALUES", values)
        assert first_rows(DumpFile(path, path.name)) == [{"a": list(range(10))}] * rows


def test_a_line_of_48_mib_is_too_long_and_one_byte_less_is_not(tmp_path):
    """A file of zeros, which takes no space on the disk."""
    path, longest = tmp_path / "a.jsonl", 48 * 2**20
    for size in (longest - 1, longest):
        path.touch()
        os.truncate(path, size)
        with nullcontext() if size < longest else pytest.raises(MismatchError, match="48 MiB, too"):
            assert [len(line) for line in lines_of(path)] == [size]


def test_a_raised_digit_is_no_number_of_a_file_or_path(tmp_path):
    """Python counts it among the digits, and cannot read it as a number."""
    for name in ("²10.jsonl", "²9.jsonl", "1²2.jsonl"):
        (tmp_path / name).write_text("{}\n", encoding="utf-8")
    assert [source.name for source in find([tmp_path])] == ["1²2.jsonl", "²9.jsonl", "²10.jsonl"]
    assert value_at({"a": [{"²": 7}, {"²": 8}]}, "a.²") == [7, 8]
