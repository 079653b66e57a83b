"""Generated traces of any size for the benchmarks, with the columns that a probe or a training
run writes.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.trace.columns import COLUMNS
from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard

SHARD_TOKENS, SAMPLES, VOCABULARY = 2**20, 16, 151_936
_ALTERNATIVES = 20  # to the sampled token, if no top-K is requested
_BLOCK = 2**14  # tokens drawn at a time, so that intermediates stay in cache


def generate(
    folder: Path,
    tokens: int,
    top_k: int,
    updates: float = 0.0,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """A trace with top-K columns of a peaked model whose trainer differs by a little noise in the
    logits.

    With `updates`, optimiser steps have added that much noise to the logits, and there are
    advantages. Without `top_k`, tokens are drawn as with 20, and only the columns are left out.
    """
    write_manifest(folder, {"top_logprobs": top_k})
    write = partial(_write_shard, folder, tokens, top_k, updates, shard_tokens)
    indices = range(-(-tokens // shard_tokens))
    if workers == 1:
        for index in indices:
            write(index)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(write, indices))


def _write_shard(
    folder: Path, tokens: int, top_k: int, updates: float, shard_tokens: int, index: int
) -> None:
    rng = np.random.default_rng([0, index])  # per shard: any number of workers writes the same
    size = min(shard_tokens, tokens - index * shard_tokens)
    write_shard(shard_path(folder, index), _shard(rng, index, size, top_k, updates))


def _shard(
    rng: np.random.Generator, index: int, tokens: int, top_k: int, updates: float
) -> pa.Table:
    cuts = np.cumsum(np.maximum(rng.lognormal(6.7, 0.6, tokens // 200 + 2), 1).astype(np.int64))
    offsets = np.concatenate([[0], cuts[cuts < tokens], [tokens]])
    count = len(offsets) - 1
    prompt = index * 10_000 + np.arange(count) // SAMPLES
    blocks = [
        _token_columns(rng, min(_BLOCK, tokens - first), top_k or _ALTERNATIVES, updates)
        for first in range(0, tokens, _BLOCK)
    ]
    names = [name for name in blocks[0] if top_k or not name.startswith("topk_")]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in names}
    if updates:
        columns["advantage"] = np.repeat(
            rng.choice([-0.5, -0.25, 0.25, 0.5], count), np.diff(offsets)
        ).astype(np.float32)
    repeated = np.repeat(prompt % 8 == 0, np.diff(offsets))
    arrays = {name: _lists(values, offsets) for name, values in columns.items()}
    arrays["logp_trainer_repeat"] = _some_lists(
        columns["logp_trainer"], repeated, offsets, prompt % 8 == 0, rng
    )
    keys: dict[str, Any] = {
        "step": np.zeros(count, np.int32),
        "epoch": np.zeros(count, np.int32),
        "minibatch": np.zeros(count, np.int32),
        "prompt_id": prompt,
        "sample_index": np.arange(count, dtype=np.int32) % SAMPLES,
        "version_rollout": np.zeros(count, np.int32),
        "version_trainer": np.full(count, int(updates > 0), np.int32),
        "reward": rng.integers(0, 2, count).astype(np.float32),
        "finish_reason": ["stop"] * count,
        "prompt_ids": [np.zeros(20, np.int32)] * count,
    }
    rows = rows_to_table(keys)
    table = {name: rows.column(name) for name in rows.column_names} | arrays
    return pa.table({name: table[name] for name in COLUMNS if name in table})


def _token_columns(
    rng: np.random.Generator, tokens: int, top_k: int, updates: float
) -> dict[str, np.ndarray]:
    scale = rng.gamma(2.0, 1.0, (tokens, 1)).astype(np.float32) + np.float32(0.3)
    parts = rng.standard_exponential((tokens, top_k + 1), dtype=np.float32) * scale
    parts.sort(axis=1)
    # Most tokens are nearly certain
    parts[:, 1:] += rng.standard_exponential((tokens, 1), dtype=np.float32) * 6
    rollout = _log_softmax(-parts)
    again = rng.standard_normal(parts.shape, dtype=np.float32) * np.float32(0.03) - parts
    recomputed = _log_softmax(again)
    trainer = _log_softmax(
        again + rng.standard_normal(parts.shape, dtype=np.float32) * np.float32(updates)
    )
    ids = rng.integers(0, VOCABULARY, (tokens, top_k + 1), dtype=np.int32)
    chosen = (np.exp(rollout).cumsum(axis=1) < rng.random((tokens, 1), dtype=np.float32)).sum(
        axis=1, keepdims=True
    )
    chosen = np.minimum(chosen, top_k)
    sampled = {
        name: np.take_along_axis(x, chosen, 1)[:, 0]
        for name, x in (("ids", ids), ("q", rollout), ("p", trainer), ("again", recomputed))
    }
    stale = {
        "logp_recomputed": sampled["again"],
        "topk_logp_recomputed": recomputed[:, :-1].reshape(-1),
    }
    return (stale if updates else {}) | {
        "response_ids": sampled["ids"],
        "loss_mask": np.ones(tokens, dtype=bool),
        "logp_rollout": sampled["q"],
        "rank_rollout": chosen[:, 0].astype(np.int32) + 1,
        "logp_trainer": sampled["p"],
        "entropy_trainer": -(np.exp(trainer) * trainer).sum(axis=1),
        "rank_trainer": chosen[:, 0].astype(np.int32) + 1,
        "topk_ids": ids[:, :-1].reshape(-1),
        "topk_logp_rollout": rollout[:, :-1].reshape(-1),
        "topk_logp_trainer": trainer[:, :-1].reshape(-1),
    }


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return np.minimum(x - np.log(np.exp(x).sum(axis=1, keepdims=True)), np.float32(-1e-7))


def _lists(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    width = len(values) // int(offsets[-1])
    return pa.ListArray.from_arrays(pa.array((offsets * width).astype(np.int32)), pa.array(values))


def _some_lists(
    values: np.ndarray,
    chosen: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    rng: np.random.Generator,
) -> pa.ListArray:
    repeats = values[chosen]
    repeats = np.minimum(
        repeats + rng.standard_normal(len(repeats), dtype=np.float32) * np.float32(1e-3),
        np.float32(-1e-7),
    )
    starts = np.concatenate([[0], np.cumsum(np.where(rows, np.diff(offsets), 0))])
    lengths = pa.array(starts.astype(np.int32), mask=np.append(~rows, False))
    return pa.ListArray.from_arrays(lengths, pa.array(repeats))
