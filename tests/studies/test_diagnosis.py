"""What a diagnosis says of its traces."""

from __future__ import annotations

import pyarrow.parquet as pq

from mismatch_cli.diagnosis.diagnose import Shares
from mismatch_cli.studies.diagnosis import analyse_diagnosis
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import shard_path, write_shard
from tests.studies.compared import FLOAT32, write_rows


def test_responses_without_a_trainer_are_counted_as_in_a_report(tmp_path, float32_rows):
    """The second of two shards, with 6 of 12 responses, was not scored."""
    folder = write_rows(tmp_path / "trace", float32_rows[:12], FLOAT32, shards=2)
    last = shard_path(folder, 1)
    table = pq.read_table(last).drop_columns(["logp_trainer"])
    last.unlink()
    write_shard(last, table)
    trace = Trace.open(folder)
    diagnosis = analyse_diagnosis([trace]).result
    assert (diagnosis.responses, diagnosis.about.unscored_responses) == (6, 6)
    assert analyse_mismatch([trace]).result.about == diagnosis.about


def test_of_no_gap_nothing_is_explained(tmp_path, float32_rows):
    rows = [row | {"logp_trainer": row["logp_rollout"]} for row in float32_rows[:8]]
    trace = Trace.open(write_rows(tmp_path / "trace", rows, FLOAT32))
    result = analyse_diagnosis([trace]).result
    assert result.abs_d_mean == 0 and not result.faults
    assert result.shares == Shares(explained=0, expected=1, unexplained=0)
