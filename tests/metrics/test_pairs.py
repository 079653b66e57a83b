"""The pairs of a trace: the same for `report`, `compare` and `diagnose`, also if weights differ
by row.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.pairs import pairs_in, weights_are_equal
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.studies.diagnosis import gather_evidence
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.manifest import read_manifest, write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import shard_path, write_shard


def a_trace(folder, newer, recomputed=False):
    """The bundled trace, with a trainer one update newer if `newer(row)` is true."""
    source = Trace.open(bundled("traces/float32"))
    table = pa.concat_tables(source.tables()).drop_columns("version_trainer")
    versions = [int(newer(row)) for row in range(len(table))]
    table = table.append_column("version_trainer", pa.array(versions, pa.int32()))
    if recomputed:
        table = table.append_column("logp_recomputed", table.column("logp_trainer"))
    write_shard(shard_path(folder, 0), table)
    content = read_manifest(source.folder)
    content.pop("shards")
    write_manifest(folder, content)
    return Trace.open(folder)


def test_a_row_group_at_other_weights_is_noticed_from_the_footer(tmp_path):
    """One shard of two row groups: the first at equal weights throughout, the second nowhere."""
    trace = a_trace(tmp_path / "trace", lambda row: row >= 32)
    (shard,) = trace.shards
    table = pq.read_table(shard)
    pq.write_table(table, shard, row_group_size=32)
    cut = Trace.open(trace.folder)
    assert len(cut.footers[shard].ranges) > 1
    assert not weights_are_equal([cut]) and pairs_in([cut]) == ["mismatch", "total"]


@pytest.mark.parametrize(
    ("newer", "recomputed", "pairs"),
    [
        (lambda row: False, False, ["mismatch"]),
        (lambda row: True, False, ["total"]),
        (lambda row: row % 2, False, ["mismatch", "total"]),
        (lambda row: True, True, ["mismatch", "staleness", "total"]),
    ],
    ids=["equal", "newer", "some newer", "recomputed"],
)
def test_every_command_uses_the_same_pair(tmp_path, newer, recomputed, pairs):
    trace = a_trace(tmp_path / "trace", newer, recomputed)
    assert pairs_in([trace]) == pairs
    assert weights_are_equal([trace]) == (pairs == ["mismatch"])
    analysis = analyse_mismatch([trace], worst=1)
    assert list(analysis.pairs) == pairs and analysis.main_pair.name == pairs[0]
    assert gather_evidence([trace]).pair.name == pairs[0]
    assert analyse_comparison([trace, trace]).pair.name == pairs[0]


def test_only_responses_at_equal_weights_count_as_mismatch(tmp_path):
    trace = a_trace(tmp_path / "trace", lambda row: row % 2)
    analysis = analyse_mismatch([trace], worst=1)
    rows = pa.concat_tables(trace.tables(["response_ids"])).column("response_ids")
    lengths = [len(row) for row in rows]
    assert analysis.pairs["mismatch"].exact.counts.tokens == sum(lengths[::2])
    assert analysis.pairs["total"].exact.counts.tokens == sum(lengths)


def test_a_shard_without_equal_weights_is_not_unscored(tmp_path):
    trace = a_trace(tmp_path / "trace", lambda row: False)
    newer = pa.concat_tables(a_trace(tmp_path / "newer", lambda row: True).tables())
    place = newer.schema.get_field_index("step")
    newer = newer.set_column(place, "step", pa.array([1] * newer.num_rows, pa.int32()))
    write_shard(shard_path(trace.folder, 1), newer)
    analysis = analyse_mismatch([Trace.open(trace.folder)], worst=1)
    assert analysis.unscored_responses == 0
    assert (
        analysis.pairs["total"].exact.counts.tokens
        == 2 * analysis.pairs["mismatch"].exact.counts.tokens
    )
