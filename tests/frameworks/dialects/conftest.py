"""Traces from lists of log-probabilities, one list per response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard


def rows(
    rollout: Sequence[Sequence[float]], first_prompt: int = 0, **columns: Any
) -> dict[str, Any]:
    """Columns of one shard; the other token columns are lists per response, None if not
    measured.
    """
    count = len(rollout)
    made = {
        name: [0] * count
        for name in ("step", "epoch", "minibatch", "version_rollout", "version_trainer")
    }
    made |= {
        "prompt_id": list(range(first_prompt, first_prompt + count)),
        "sample_index": [0] * count,
        "finish_reason": ["stop"] * count,
        "prompt_ids": [[1]] * count,
        "response_ids": [np.arange(len(row), dtype=np.int32) for row in rollout],
        "logp_rollout": [np.array(row, dtype=np.float32) for row in rollout],
    }
    for name, values in columns.items():
        dtype = bool if name == "loss_mask" else np.float32
        as_lists = not name.startswith("version") and name != "reward"
        made[name] = (
            [None if v is None else np.array(v, dtype=dtype) for v in values]
            if as_lists
            else values
        )
    return made


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Trace]:
    """A trace with one shard per argument."""

    def make(
        *shards: dict[str, Any], name: str = "trace", manifest: dict[str, Any] | None = None
    ) -> Trace:
        folder = tmp_path / name
        for index, columns in enumerate(shards):
            write_shard(shard_path(folder, index), rows_to_table(columns))
        write_manifest(folder, manifest or {})
        return Trace.open(folder)

    return make
