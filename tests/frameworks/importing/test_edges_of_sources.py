"""The progress of reading a file, and how much of it a first look takes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import sources as _sources
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.paths import value_at
from mismatch_cli.frameworks.importing.sources import (
    CUT_OFF,
    NO_JSON,
    OTHER_TYPES,
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


def test_a_block_of_parquet_is_bounded_by_tokens_and_bytes(monkeypatch):
    """Of 100 rows: with 50 tokens and 200 bytes at a time, and one row at least."""
    monkeypatch.setattr(_sources, "TOKENS_PER_BLOCK", 50)
    monkeypatch.setattr(_sources, "_BYTES_PER_BLOCK", 200)
    rows = {(1000, 0): 5, (1000, 10_000): 2, (0, 10_000): 2, (500, 2000): 10, (10**6, 10**7): 1}
    for (tokens, size), expected in rows.items():
        assert _sources._rows_of_a_block(100, tokens, size) == expected


def test_the_values_of_a_column_are_counted_from_the_footer(tmp_path):
    """In two row groups; a column whose name begins like another's is a column of its own."""
    table = pa.table({"ids": [[1, 2], [3]], "ids_too": [[1], [2]], "s": [{"x": [1, 2, 3]}] * 2})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    values = {"ids": 3, "ids_too": 2, "s": 6, "s.x": 6, "x": 0, None: 11}
    assert {name: _sources._values_in(metadata, name) for name in values} == values


def test_only_whole_lines_of_a_span_are_read(tmp_path):
    (path := tmp_path / "a.jsonl").write_bytes(b"12\n345\n\n6")
    lines = [b"12\n", b"345\n", b"\n", b"6"]
    spans = {
        None: lines,
        (0, 7): lines[:2],
        (0, 6): lines[:1],
        (3, 8): lines[1:3],
        (3, 9): lines[1:],
    }
    for span, expected in spans.items():
        assert list(lines_of(path, span)) == expected, span


def test_a_file_has_our_names_for_its_columns():
    """A name of ours that means another column is not read; names without numbers are a group."""
    columns = {"response_ids": "out", "step": "reward"}
    source = DumpFile(Path("run/rank_12_of_3.JSONL"), "rank_12_of_3.JSONL", columns)
    names = source.renamed(["out", "step", "reward", "response_ids", "logp_rollout"])
    assert names == {"response_ids": "out", "step": "reward", "logp_rollout": "logp_rollout"}
    assert source.group == ("run", "rank_#_of_#.JSONL") and source.kind == "jsonl"
    kinds = {
        "a.pt": "pt",
        "a.PTH": "pt",
        "a.parquet": "parquet",
        "a.txt": "jsonl",
        "a.dp": "pickle",
    }
    assert {name: DumpFile(Path(name), name).kind for name in kinds} == kinds


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("b/2.jsonl", "b/10.jsonl", "a/11.jsonl", "a/9.jsonl.zst", "a/3.jsonl", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n", encoding="utf-8")
    (tmp_path / "a" / "3.jsonl.zst").write_bytes(b"")  # sealed, beside the file as it was
    names = ["a/3.jsonl", "a/9.jsonl", "a/11.jsonl", "b/2.jsonl", "b/10.jsonl"]
    assert [source.name for source in find([tmp_path])] == names
    assert [source.name for source in find([tmp_path / "c.txt", tmp_path / "b"])] == [
        "c.txt",
        "2.jsonl",
        "10.jsonl",
    ]


def test_lines_become_tables_of_equal_types(tmp_path, monkeypatch):
    """Two lines a batch: one that does not fit is left out with its number, others stay."""
    monkeypatch.setattr(_sources, "_BATCH_BYTES", 18)
    lines = ['{"a": 1}', "", '{"a": 2}', '{"a":"x"}', '{"a": 3}', "[1]", '{"b": 4}', '{"a"']
    (path := tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tally = Tally()
    source = DumpFile(path, path.name)
    tables = jsonl_tables(source, pa.schema({"a": pa.int64()}), tally, lambda _: None)
    assert pa.concat_tables(tables).column("a").to_pylist() == [1, 2, 3, None]
    assert tally.left_out == {OTHER_TYPES: 1, NO_JSON: 1, CUT_OFF: 1}
    assert tally.first[NO_JSON] == "a.jsonl, line 6: a JSON list, not an object"
    assert tally.first[OTHER_TYPES].startswith("a.jsonl, line 4: ")
    assert tally.first[CUT_OFF] == "a.jsonl, line 8"
