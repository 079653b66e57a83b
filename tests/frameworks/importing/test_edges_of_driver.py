"""Which thread writes the shards of an import, and how large they are."""

from __future__ import annotations

from contextlib import contextmanager
from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import driver as _driver
from tests.frameworks.importing.layouts import (
    assert_holds,
    imported,
    plain_record,
    real_rows,
    write_lines,
)


@pytest.mark.parametrize(("large", "in_threads"), [(None, False), (2**26, False), (1, True)])
def test_only_a_large_dump_is_written_in_other_threads(tmp_path, monkeypatch, large, in_threads):
    """Where memory runs out, only this thread can raise an error. None: the usual limit."""
    writers = []
    write_shard = _driver.write_shard

    def noted(path, shard):
        writers.append(get_ident())
        write_shard(path, shard)

    monkeypatch.setattr(_driver, "write_shard", noted)
    if large is not None:
        monkeypatch.setattr(_driver, "_LARGE", large)
    dump = write_lines(tmp_path / "d.jsonl", map(plain_record, real_rows(2)))
    imported(dump, into=tmp_path / "trace")
    assert [writer != get_ident() for writer in writers] == [in_threads]


def test_tables_are_joined_until_they_have_two_million_tokens():
    """Three responses of 2^20 tokens: two of them fill a shard."""
    tokens = pa.array(np.zeros(2**20, dtype=np.int8))
    response = pa.ListArray.from_arrays(pa.array([0, 2**20], pa.int32()), tokens)
    table = pa.table({"response_ids": response})
    assert [shard.num_rows for shard in _driver.joined_shards(iter([table] * 3))] == [2, 1]


@pytest.mark.parametrize("header", [{}, {"run": "demo"}])
def test_a_dump_below_a_header_is_read_in_the_format_that_is_named(tmp_path, header):
    """The first line alone shows the format; that of the others comes with the flag."""
    records = list(map(plain_record, real_rows(2)))
    dump = write_lines(tmp_path / "d.jsonl", [header, *records])
    with pytest.raises(MismatchError, match=r"Later lines have the plain schema: .*--format plain"):
        imported(dump, into=tmp_path / "none")
    table, _ = imported(dump, into=tmp_path / "trace", format="plain")
    assert_holds(table, records, "response_ids", "logp_trainer")


def test_tables_are_joined_until_they_have_enough_bytes(monkeypatch):
    """Rows of few tokens may have many other values."""
    table = pa.table({"logp_rollout": pa.array([[-1.0, -2.0]], pa.list_(pa.float32()))})
    monkeypatch.setattr(_driver, "_SHARD_BYTES", 2 * table.nbytes)
    assert [shard.num_rows for shard in _driver.joined_shards(iter([table] * 5))] == [2, 2, 1]
    monkeypatch.setattr(_driver, "_SHARD_BYTES", 2 * table.nbytes + 1)
    assert [shard.num_rows for shard in _driver.joined_shards(iter([table] * 5))] == [3, 2]
    monkeypatch.setattr(_driver, "_SHARD_TOKENS", 4)
    assert [shard.num_rows for shard in _driver.joined_shards(iter([table] * 5))] == [2, 2, 1]


def test_the_progress_is_in_whole_megabytes_and_ends_at_its_total():
    """Each is shown once, and bytes beyond the total are none."""
    shown: list[int] = []
    advance = _driver._in_megabytes(shown.append, 3 * 2**20 + 5)
    for count in (2**20 - 1, 1, 10, 2**21, 2**21, 2**21):
        advance(count)
    assert shown == [1, 2]


def test_the_first_columns_of_an_unknown_file_are_named(tmp_path):
    """Eight of them in the order of the alphabet, without paths into objects."""
    names = "hgfedcba"
    for more, end in (({}, r"g, h\)"), ({"i": 1}, r"g, h, …\)")):
        record = {**dict.fromkeys(names, 1), **more, "0.x": 1}
        dump = write_lines(tmp_path / "d.jsonl", [record])
        with pytest.raises(MismatchError, match=rf"\(columns: a, b, c, d, e, f, {end}"):
            imported(dump, into=tmp_path / "trace")


def test_of_a_dump_without_a_usable_row_three_reasons_are_named(tmp_path):
    """The most frequent first."""
    good = {"prompt_ids": [1], "response_ids": [5, 6], "logp_rollout": [-1.0, -2.0]}
    changes = [{"logp_rollout": None}] * 3 + [{"response_ids": None}] * 2
    changes += [{"reward": "good"}] * 4 + [{"response_ids": [5, -6]}]
    dump = write_lines(tmp_path / "d.jsonl", [good | change for change in changes])
    with pytest.raises(MismatchError) as refused:
        imported(dump, into=tmp_path / "trace")
    reasons = str(refused.value).partition(": ")[2].split("; ")
    assert [reason[:12] for reason in reasons] == ["4 lines with", "3 responses ", "2 responses "]
    assert str(refused.value).endswith("See mismatch-cli import --schema")


def test_at_most_a_thousand_files_are_named_and_all_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(_driver, "_FILES_IN_MANIFEST", 2)
    for number, row in enumerate(real_rows(3)):
        write_lines(tmp_path / "dump" / f"{number}.jsonl", [plain_record(row)])
    _, about = imported(tmp_path / "dump", into=tmp_path / "trace")
    assert about["files"] == ["0.jsonl", "1.jsonl"] and about["file_count"] == 3
    assert about["steps"] == 1 and about["format"] == "plain"


def test_progress_counts_the_megabytes_that_were_read(tmp_path, monkeypatch):
    """At least one in all, and as many as there are once everything is read."""
    monkeypatch.setattr(_driver, "_MEGABYTE", 1000)
    path = write_lines(tmp_path / "d.jsonl", map(plain_record, real_rows(3)))
    counted, read = [], []

    @contextmanager
    def counting(phase, total, *, unit):
        counted.append((phase, total, unit))
        yield read.append

    progress = SimpleNamespace(say=lambda _: None, counting=counting)
    (tmp_path / "trace").mkdir()
    _driver.import_dump(_driver.Import((path,)), tmp_path / "trace", progress)
    megabytes = path.stat().st_size // 1000
    assert counted == [("Importing", megabytes, "MB")] and sum(read) == megabytes > 1
