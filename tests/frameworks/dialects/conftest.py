"""Traces from lists of log-probabilities, one list per response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard

NUMBERS = ("step", "epoch", "minibatch", "sample_index", "version_rollout", "version_trainer")


def rows(rollout: Sequence[Sequence[float]], **columns: Any) -> dict[str, Any]:
    """Columns of one shard, with a prompt for each response; token columns are lists, None where
    nothing was measured.
    """
    count = len(rollout)
    standard = dict.fromkeys(NUMBERS, [0] * count) | {
        "prompt_id": list(range(count)),
        "finish_reason": ["stop"] * count,
        "prompt_ids": [[1]] * count,
        "response_ids": [list(range(len(row))) for row in rollout],
        "logp_rollout": rollout,
    }
    return standard | columns


def written(folder: Path, *shards: dict[str, Any]) -> Trace:
    """A trace with one shard per argument."""
    for index, columns in enumerate(shards):
        write_shard(shard_path(folder, index), rows_to_table(columns))
    write_manifest(folder, {})
    return Trace.open(folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Trace]:
    return lambda *shards, name="trace": written(tmp_path / name, *shards)
