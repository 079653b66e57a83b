"""The progress of reading a file."""

from __future__ import annotations

import pyarrow as pa

from mismatch_cli.importers import _sources
from mismatch_cli.importers._sources import Source, jsonl_tables
from mismatch_cli.importers._tally import Tally


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
