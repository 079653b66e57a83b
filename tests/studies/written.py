"""Random batches written to disk as a trace, one shard each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.columns import ROW_KEY, TOKEN_COLUMNS, TOPK_COLUMNS
from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard
from tests.metrics.clipping.world import simple

TEXTS = (b" the", b"Wait", b"7", b" +", b"\\(", b"\n", b"<b>bold</b>", b"+1")


def write_trace(
    folder: Path,
    *batches: TokenBatch,
    without: tuple[str, ...] = (),
    equal_weights: bool = False,
    seed: int = 0,
    imported: dict[str, int] | None = None,
    texts: Sequence[bytes] = TEXTS,
) -> Trace:
    """A trace whose trainer is one optimiser step ahead, or not; `without` names columns that were
    not measured.

    `imported` adds an importer's counts.
    """
    for number, batch in enumerate(batches):
        columns = {name: values for name, values in _columns(batch).items() if name not in without}
        if equal_weights:
            columns["version_trainer"] = columns["version_rollout"]
        write_shard(shard_path(folder, number), rows_to_table(columns))
    # Pages show tokens by their text
    ids = pa.array(range(len(texts)), pa.int32())
    pq.write_table(pa.table({"id": ids, "bytes": list(texts)}), folder / "vocab.parquet")
    counts: dict[str, Any] = {
        "title": "a dump",
        "file_count": 1,
        "left_out": {},
        "left_out_first": {},
        "noted": {},
    }
    origin = {} if imported is None else {"imported": counts | imported}
    write_manifest(folder, {"top_logprobs": 20, "config": {"seed": seed}} | origin)
    return Trace.open(folder)


def long_batch(lengths: Sequence[int], seed: int = 0) -> TokenBatch:
    """Responses of these lengths with an advantage each; their gap drifts."""
    rng = np.random.default_rng(seed)
    logq = [-rng.exponential(1.0, length) for length in lengths]
    logp = []
    for own in logq:
        drift = 0.1 * rng.standard_t(3, len(own)) * np.linspace(0.1, 1, len(own))
        logp.append(np.minimum(own + drift, 0))
    batch = simple(logq, logp, np.resize([-1.0, 0.5, 1.0], len(lengths)))
    ids_T = rng.integers(0, len(TEXTS), batch.num_tokens).astype(np.int32)
    return replace(batch, response_ids_T=ids_T, logp_recomputed_T=batch.logp_rollout_T)


def _columns(batch: TokenBatch) -> dict[str, Any]:
    bounds = list(zip(batch.offset_S1[:-1].tolist(), batch.offset_S1[1:].tolist(), strict=True))
    columns: dict[str, Any] = {name: getattr(batch, f"{name}_S").tolist() for name in ROW_KEY}
    columns["version_rollout"] = [0] * len(bounds)
    columns |= {"version_trainer": [1] * len(bounds), "finish_reason": ["stop"] * len(bounds)}
    columns["prompt_ids"] = [[1, 2, 3, 4]] * len(bounds)
    if batch.reward_S is not None:
        rewards = batch.reward_S.tolist()
        columns["reward"] = [None if np.isnan(reward) else reward for reward in rewards]
    for name in (*TOKEN_COLUMNS, *TOPK_COLUMNS):
        column = getattr(batch, f"{name}_TK" if name in TOPK_COLUMNS else f"{name}_T")
        if column is not None:
            columns[name] = [_values(column[start:stop]) for start, stop in bounds]
    return columns


def _values(column: np.ndarray) -> np.ndarray | None:
    """The values of a response; null if none was measured."""
    is_unmeasured = column.dtype.kind == "f" and np.isnan(column).all()
    return None if len(column) and is_unmeasured else column
