"""Shards of several row groups and parts: their rows, and how columns are encoded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.trace import writer
from mismatch_cli.trace.writer import rows_to_table, write_shard, write_shard_parts

LENGTHS = (2, 2, 1, 5, 3, 1)


@pytest.fixture
def table() -> pa.Table:
    logp = [np.full(length, -length, dtype=np.float32) for length in LENGTHS]
    return rows_to_table(
        {
            "prompt_id": list(range(6)),
            "prompt_ids": [[row] for row in range(6)],
            "response_ids": [[10 + row] * length for row, length in enumerate(LENGTHS)],
            "logp_rollout": logp,
            "advantage": logp,
            "topk_ids": [np.zeros((length, 2), dtype=np.int32) for length in LENGTHS],
            "topk_logp_rollout": [np.zeros((length, 2), np.float32) for length in LENGTHS],
            "reward": [0.5] * 6,
            "finish_reason": ["stop"] * 6,
        }
    )


def test_row_groups_and_parts_hold_every_row_once_and_in_order(table, tmp_path, monkeypatch):
    """At most four tokens, but a longer response whole; no row group crosses a part."""
    monkeypatch.setattr(writer, "MAX_TOKENS_PER_ROW_GROUP", 4)
    for parts, sizes in (
        ([table], [2, 1, 1, 2]),
        ([table.slice(0, 1), table.slice(1, 3), table.slice(4)], [1, 2, 1, 2]),
    ):
        write_shard_parts(tmp_path / "shard.parquet", iter(parts))
        file = pq.ParquetFile(tmp_path / "shard.parquet")
        groups = [file.metadata.row_group(number).num_rows for number in range(len(sizes))]
        assert (groups, file.num_row_groups) == (sizes, len(sizes))
        assert file.read().equals(table)
    # Two entries for each token
    monkeypatch.setattr(writer, "MAX_TOKENS_PER_ROW_GROUP", 100)
    monkeypatch.setattr(writer, "_MAX_TOPK_ENTRIES_PER_ROW_GROUP", 8)
    write_shard(tmp_path / "shard.parquet", table)
    file = pq.ParquetFile(tmp_path / "shard.parquet")
    assert [file.metadata.row_group(number).num_rows for number in range(4)] == [2, 1, 1, 2]


def test_only_log_probs_of_single_tokens_are_not_compressed(table, tmp_path):
    write_shard(tmp_path / "shard.parquet", table)
    group = pq.ParquetFile(tmp_path / "shard.parquet").metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    names = [column.path_in_schema.split(".")[0] for column in columns]
    plain = {
        name
        for name, column in zip(names, columns, strict=True)
        if column.compression == "UNCOMPRESSED"
    }
    assert plain == {"logp_rollout"}
    with_dictionary = {
        name for name, column in zip(names, columns, strict=True) if column.has_dictionary_page
    }
    assert with_dictionary == {"prompt_id", "prompt_ids", "reward", "finish_reason"}
