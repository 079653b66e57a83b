"""Small hand-written traces with every kind of column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard

LENGTHS = (3, 1, 2)


def row_columns(**changes: Any) -> dict[str, Any]:
    """Three responses of 3, 1 and 2 tokens, K = 2."""
    logp = [-np.arange(1, n + 1, dtype=np.float32) for n in LENGTHS]
    zero = ("step", "epoch", "minibatch", "version_rollout", "version_trainer")
    return (
        {name: [0, 0, 0] for name in zero}
        | {
            "prompt_id": [7, 7, 8],
            "sample_index": [0, 1, 0],
            "reward": [1.0, 0.0, None],
            "finish_reason": ["stop", "length", "stop"],
            "prompt_ids": [[1, 2], [1, 2], [3]],
            "response_ids": [np.arange(n, dtype=np.int32) + 10 for n in LENGTHS],
            "loss_mask": [np.ones(n, dtype=bool) for n in LENGTHS],
            "logp_rollout": logp,
            "logp_trainer": [x - np.float32(0.25) for x in logp],
            "logp_trainer_repeat": [None, logp[1], None],
            "topk_ids": [np.arange(2 * n, dtype=np.int32).reshape(n, 2) for n in LENGTHS],
            "topk_logp_rollout": [-np.ones((n, 2), dtype=np.float32) for n in LENGTHS],
        }
        | changes
    )


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Write a trace with one shard per argument, each a dict of columns."""

    def write(*shards: dict[str, Any], manifest: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / "trace"
        for index, columns in enumerate(shards):
            write_shard(shard_path(folder, index), rows_to_table(columns))
        write_manifest(folder, manifest or {"top_logprobs": 2})
        return folder

    return write
