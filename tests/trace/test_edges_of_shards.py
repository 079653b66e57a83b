"""What the footer of a shard says about its rows."""

from __future__ import annotations

from mismatch_cli.trace.shards import footer_of
from mismatch_cli.trace.writer import shard_path
from tests.trace.conftest import row_columns


def test_a_footer_has_the_ranges_of_the_step_and_of_both_versions(write_trace):
    """They show without reading a row whether any response was scored at the weights of the
    rollout.
    """
    columns = row_columns(step=[2, 1, 2], version_rollout=[4, 3, 4], version_trainer=[5, 6, 5])
    (ranges,) = footer_of(shard_path(write_trace(columns), 0)).ranges
    assert ranges == {"step": (1, 2), "version_rollout": (3, 4), "version_trainer": (5, 6)}
