"""A trace reads back as it was written: flat, with nulls as NaN, and one sentence for damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.trace import writer
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import rows_to_table, shard_path, with_counts, write_shard
from tests.trace.conftest import LENGTHS, row_columns


def only_batch(folder: Path):
    (batch,) = Trace.open(folder).batches()
    return batch


def test_a_batch_is_flattened(write_trace):
    batch = only_batch(write_trace(row_columns()))
    assert batch.offset_S1.tolist() == [0, 3, 4, 6]
    assert batch.response_ids_T.tolist() == [10, 11, 12, 10, 10, 11]
    assert batch.logp_rollout_T.tolist() == [-1, -2, -3, -1, -1, -2]
    assert batch.topk_ids_TK.shape == (6, 2)
    assert batch.topk_ids_TK[4].tolist() == [0, 1]
    assert batch.prompt_id_S.tolist() == [7, 7, 8]
    assert batch.prompt_length_S.tolist() == [2, 2, 1]
    assert batch.truncated_S.tolist() == [False, True, False]
    assert batch.loss_mask_T.all()
    assert batch.entropy_trainer_T is None


def test_null_rows_become_nan(write_trace):
    batch = only_batch(write_trace(row_columns()))
    repeat_T = batch.logp_trainer_repeat_T
    assert np.isnan(repeat_T).tolist() == [True, True, True, False, True, True]
    assert repeat_T[3] == -1
    assert batch.reward_S[:2].tolist() == [1, 0]
    assert np.isnan(batch.reward_S[2])


def test_an_impossible_log_prob_is_not_a_measurement(write_trace):
    logp = [
        np.array([0.5, -1, np.nan], np.float32),
        np.array([0], np.float32),
        np.array([-np.inf, -2], np.float32),
    ]
    batch = only_batch(write_trace(row_columns(logp_rollout=logp)))
    assert np.isnan(batch.logp_rollout_T).tolist() == [True, False, True, False, False, False]
    assert batch.logp_rollout_T[3:].tolist() == [0, -np.inf, -2]


def test_token_columns_share_memory_with_arrow(write_trace):
    table = next(Trace.open(write_trace(row_columns())).tables())
    from mismatch_cli.trace.reader import table_to_batch

    batch = table_to_batch(table)
    buffer = table.column("logp_rollout").chunk(0).flatten().buffers()[1]
    assert batch.logp_rollout_T.ctypes.data == buffer.address


def test_equal_weights_serve_the_trainer_as_recomputed(write_trace):
    batch = only_batch(write_trace(row_columns()))
    assert batch.logp_recomputed_T is batch.logp_trainer_T


def test_recomputed_is_served_row_by_row_where_only_some_weights_are_equal(write_trace):
    recomputed = [None, np.array([-9.0], dtype=np.float32), None]
    batch = only_batch(
        write_trace(row_columns(version_trainer=[0, 1, 2], logp_recomputed=recomputed))
    )
    assert np.array_equal(batch.logp_recomputed_T[:3], batch.logp_trainer_T[:3])
    assert batch.logp_recomputed_T[3] == -9
    assert np.isnan(batch.logp_recomputed_T[4:]).all()


def test_a_trace_may_lack_the_trainer_in_some_shards(write_trace):
    sampled_only = row_columns()
    for name in ("logp_trainer", "logp_trainer_repeat", "version_trainer"):
        del sampled_only[name]
    first, second = Trace.open(write_trace(row_columns(), sampled_only)).batches()
    assert first.logp_trainer_T is not None
    assert second.logp_trainer_T is None


def test_columns_can_be_chosen(write_trace):
    (batch,) = Trace.open(write_trace(row_columns())).batches(["logp_trainer"])
    assert batch.logp_trainer_T is not None
    assert batch.topk_ids_TK is None
    assert batch.logp_rollout_T is not None


def test_a_run_folder_is_opened_like_its_trace(write_trace):
    folder = write_trace(row_columns())
    assert Trace.open(folder.parent).folder == folder


def test_row_groups_hold_a_bounded_number_of_tokens(write_trace, monkeypatch):
    monkeypatch.setattr(writer, "MAX_TOKENS_PER_ROW_GROUP", 3)
    trace = Trace.open(write_trace(row_columns()))
    assert [b.num_tokens for b in trace.batches()] == [3, 3]
    assert pq.ParquetFile(trace.shards[0]).num_row_groups == 2
    assert np.concatenate([b.response_ids_T for b in trace.batches()]).tolist() == [
        10,
        11,
        12,
        10,
        10,
        11,
    ]


def test_row_groups_can_be_chosen(write_trace, monkeypatch):
    monkeypatch.setattr(writer, "MAX_TOKENS_PER_ROW_GROUP", 3)
    trace = Trace.open(write_trace(row_columns()))
    _, second = trace.tables(("reward", "response_ids"))
    (chosen,) = trace.chosen_tables({trace.shards[0]: [1]}, ("reward",))
    assert chosen.select(second.column_names).equals(second)
    assert list(trace.chosen_tables({}, ("reward",))) == []


def test_counts_survive_in_the_metadata(tmp_path, write_trace):
    folder = write_trace(row_columns())
    write_shard(
        shard_path(folder, 1), with_counts(rows_to_table(row_columns()), grading_timeouts=3)
    )
    assert Trace.open(folder).count("grading_timeouts") == 3


def test_a_failed_write_leaves_the_shard_as_it_was(write_trace, monkeypatch):
    folder = write_trace(row_columns())
    before = shard_path(folder, 0).read_bytes()

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(MismatchError, match=r"No space left on device.*--resume"):
        write_shard(shard_path(folder, 0), rows_to_table(row_columns()))
    assert shard_path(folder, 0).read_bytes() == before
    assert [p.name for p in folder.glob("*.part")] == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), "holds no trace"),
        (lambda f: (f / "manifest.json").write_text("{"), "damaged"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not the manifest"),
        (lambda f: (f / "manifest.json").write_text('{"format": "x"}'), "not the manifest"),
        (lambda f: (f / "shard-00000.parquet").unlink(), "no finished shard"),
    ],
)
def test_what_is_not_a_trace_is_refused(write_trace, damage, message):
    folder = write_trace(row_columns())
    damage(folder)
    with pytest.raises(MismatchError, match=message):
        Trace.open(folder)


def test_a_newer_format_is_refused_with_the_way_out(write_trace):
    folder = write_trace(row_columns())
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | {"format_version": 99}))
    with pytest.raises(MismatchError, match=r"format 99.*pip install --upgrade"):
        Trace.open(folder)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.95])
def test_a_truncated_shard_is_refused(write_trace, keep):
    folder = write_trace(row_columns())
    path = shard_path(folder, 0)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(MismatchError, match="damaged"):
        list(Trace.open(folder).batches())


def test_wrong_lengths_are_refused(write_trace):
    wrong = [np.zeros(n + 1, dtype=np.float32) for n in LENGTHS]
    with pytest.raises(MismatchError, match="logp_trainer does not have one value per token"):
        only_batch(write_trace(row_columns(logp_trainer=wrong)))


def test_a_foreign_parquet_file_is_refused(write_trace):
    folder = write_trace(row_columns())
    table = pq.read_table(shard_path(folder, 0)).drop_columns(["logp_rollout"])
    pq.write_table(table, shard_path(folder, 0))
    with pytest.raises(MismatchError, match="lacks logp_rollout"):
        only_batch(folder)


def test_a_column_of_the_wrong_type_is_refused(write_trace):
    folder = write_trace(row_columns())
    table = pq.read_table(shard_path(folder, 0))
    changed = table.set_column(
        table.schema.get_field_index("prompt_id"), "prompt_id", [["a", "b", "c"]]
    )
    pq.write_table(changed, shard_path(folder, 0))
    with pytest.raises(MismatchError, match="column prompt_id is string, expected int64"):
        only_batch(folder)


def test_row_groups_know_their_shard(write_trace):
    trace = Trace.open(write_trace(*[row_columns()] * 3))
    groups = list(trace.row_groups(["logp_trainer"]))
    assert [group.path for group in groups] == trace.shards
    assert [path for path, *_ in trace.row_groups(shards=trace.shards[1:])] == trace.shards[1:]
    for group in groups:
        assert (
            group.table.num_rows == group.batch.num_responses
            and "rank_trainer" not in group.table.column_names
        )


def test_prefetched_row_groups_fail_in_their_turn(write_trace, monkeypatch):
    """The first row group is served, although the second, which is damaged, is read meanwhile."""
    monkeypatch.setattr(writer, "MAX_TOKENS_PER_ROW_GROUP", 3)
    folder = write_trace(row_columns())
    (path,) = Trace.open(folder).shards
    second = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(path.read_bytes()[:second] + b"\xff" * 8 + path.read_bytes()[second + 8 :])
    batches = Trace.open(folder).batches()
    assert next(batches).num_tokens == 3
    with pytest.raises(MismatchError, match="damaged in row group 1"):
        next(batches)


def test_reading_imports_no_pandas(write_trace):
    """It would take half a second in every process."""
    script = (
        "import sys; from pathlib import Path; from mismatch_cli.trace.reader import Trace; "
        f"print(len(list(Trace(Path({str(write_trace(row_columns()))!r})).batches())), 'pandas' "
        "in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1", "False"]


def test_every_bit_of_a_log_prob_is_kept(write_trace, rng):
    """Also of those next to 0, and of the smallest that float32 has."""
    edges = np.array([-0.0, -1e-45, -1e-38, -5.96e-8, -88.7, -3e38], np.float32)
    logp = [np.concatenate([edges, -rng.exponential(2.0, 200).astype(np.float32)])]
    size = len(logp[0])
    columns = {name: values[:1] for name, values in row_columns().items() if "topk" not in name}
    columns |= {"response_ids": [np.arange(size)], "loss_mask": [np.ones(size, dtype=bool)]}
    batch = only_batch(write_trace(columns | {"logp_rollout": logp, "logp_trainer": logp}))
    for column in (batch.logp_rollout_T, batch.logp_trainer_T):
        assert column.tobytes() == logp[0].tobytes()


def test_k_is_that_of_the_first_response_that_has_top_k(write_trace):
    ids = row_columns()["topk_ids"]
    assert Trace.open(write_trace(row_columns(topk_ids=[None, *ids[1:]]))).top_k == 2
    assert Trace.open(write_trace(row_columns(topk_ids=[None] * 3))).top_k == 0
