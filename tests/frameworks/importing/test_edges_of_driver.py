"""Which thread writes the shards of an import, and how large they are."""

from __future__ import annotations

from threading import get_ident

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
