"""The progress of reading a file, and how much of it a first look takes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.frameworks.importing import sources as _sources
from mismatch_cli.frameworks.importing.sources import Source, first_rows, jsonl_tables
from mismatch_cli.frameworks.importing.tally import Tally


def test_the_progress_of_a_file_is_its_size_however_it_is_cut(tmp_path, monkeypatch):
    """Nine bytes a line: a batch has two of them, and a block four."""
    monkeypatch.setattr(_sources, "_BATCH_BYTES", 18)
    monkeypatch.setattr(_sources, "BLOCK_BYTES", 36)
    path, told = tmp_path / "a.jsonl", list[int]()
    path.write_text("".join(f'{{"a": {i}}}\n' for i in range(10)), encoding="utf-8")
    source = Source(path, path.name)
    tables = list(jsonl_tables(source, pa.schema({"a": pa.int64()}), Tally(), told.append))
    assert [table.num_rows for table in tables] == [4, 4, 2]
    assert told == [36, 36, 18] and sum(told) == source.size


def test_a_first_look_at_wide_rows_takes_fewer_of_them(tmp_path, monkeypatch):
    """Ten values a row: of at most 35 values there are three rows, and one row at least."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [list(range(10))] * 80}), path)
    for values, rows in ((2**20, 64), (35, 3), (9, 1)):
        monkeypatch.setattr(_sources, "_FIRST_VALUES", values)
        assert first_rows(Source(path, path.name)) == [{"a": list(range(10))}] * rows
