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
    # Per shard: any number of workers writes the same
    rng = np.random.default_rng([0, index])
    size = min(shard_tokens, tokens - index * shard_tokens)
    write_shard(shard_path(folder, index), _shard(rng, index, size, top_k, updates))


def _shard(
    rng: np.random.Generator, index: int, tokens: int, top_k: int, updates: float
) -> pa.Table:
    offsets = _offsets(rng, tokens)
    count = len(offsets) - 1
    prompt_S = index * 10_000 + np.arange(count) // SAMPLES
    columns = _in_blocks(rng, tokens, top_k, updates)
    if updates:
        advantage_S = rng.choice([-0.5, -0.25, 0.25, 0.5], count)
        columns["advantage"] = np.repeat(advantage_S, np.diff(offsets)).astype(np.float32)
    arrays = {name: _lists(values, offsets) for name, values in columns.items()}
    logp_T = columns["logp_trainer"]
    arrays["logp_trainer_repeat"] = _repeats(rng, logp_T, offsets, prompt_S % 8 == 0)
    keys: dict[str, Any] = {
        "step": np.zeros(count, np.int32),
        "epoch": np.zeros(count, np.int32),
        "minibatch": np.zeros(count, np.int32),
        "prompt_id": prompt_S,
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


def _offsets(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Where responses of about 800 tokens begin and end."""
    length_S = np.maximum(rng.lognormal(6.7, 0.6, tokens // 200 + 2), 1).astype(np.int64)
    cuts = np.cumsum(length_S)
    return np.concatenate([[0], cuts[cuts < tokens], [tokens]])


def _in_blocks(
    rng: np.random.Generator, tokens: int, top_k: int, updates: float
) -> dict[str, np.ndarray]:
    """The columns of all tokens; those of the top-K only if there is one."""
    blocks = []
    for first in range(0, tokens, _BLOCK):
        size = min(_BLOCK, tokens - first)
        blocks.append(_token_columns(rng, size, top_k or _ALTERNATIVES, updates))
    columns = {}
    for name in blocks[0]:
        if top_k or not name.startswith("topk_"):
            columns[name] = np.concatenate([block[name] for block in blocks])
    return columns


def _token_columns(
    rng: np.random.Generator, tokens: int, top_k: int, updates: float
) -> dict[str, np.ndarray]:
    """The columns of some tokens, each sampled from its K + 1 candidates."""
    rollout_TV, recomputed_TV, trainer_TV = _policies(rng, tokens, top_k, updates)
    ids_TV = rng.integers(0, VOCABULARY, (tokens, top_k + 1), dtype=np.int32)
    uniform_T1 = rng.random((tokens, 1), dtype=np.float32)
    chosen_T1 = (np.exp(rollout_TV).cumsum(axis=1) < uniform_T1).sum(axis=1, keepdims=True)
    chosen_T1 = np.minimum(chosen_T1, top_k)

    def sampled(x_TV: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x_TV, chosen_T1, 1)[:, 0]

    columns = {
        "response_ids": sampled(ids_TV),
        "loss_mask": np.ones(tokens, dtype=bool),
        "logp_rollout": sampled(rollout_TV),
        "rank_rollout": chosen_T1[:, 0].astype(np.int32) + 1,
        "logp_trainer": sampled(trainer_TV),
        "entropy_trainer": -(np.exp(trainer_TV) * trainer_TV).sum(axis=1),
        "rank_trainer": chosen_T1[:, 0].astype(np.int32) + 1,
        "topk_ids": ids_TV[:, :-1].reshape(-1),
        "topk_logp_rollout": rollout_TV[:, :-1].reshape(-1),
        "topk_logp_trainer": trainer_TV[:, :-1].reshape(-1),
    }
    if updates:
        columns["logp_recomputed"] = sampled(recomputed_TV)
        columns["topk_logp_recomputed"] = recomputed_TV[:, :-1].reshape(-1)
    return columns


def _policies(
    rng: np.random.Generator, tokens: int, top_k: int, updates: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log μ over the candidates of each token, log π at the same weights, and log π now."""
    scale_T1 = rng.gamma(2.0, 1.0, (tokens, 1)).astype(np.float32) + np.float32(0.3)
    energy_TV = rng.standard_exponential((tokens, top_k + 1), dtype=np.float32) * scale_T1
    energy_TV.sort(axis=1)
    # Most tokens are nearly certain
    energy_TV[:, 1:] += rng.standard_exponential((tokens, 1), dtype=np.float32) * 6
    shape = energy_TV.shape
    again_TV = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.03) - energy_TV
    now_TV = again_TV + rng.standard_normal(shape, dtype=np.float32) * np.float32(updates)
    return _log_softmax(-energy_TV), _log_softmax(again_TV), _log_softmax(now_TV)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return np.minimum(x - np.log(np.exp(x).sum(axis=1, keepdims=True)), np.float32(-1e-7))


def _lists(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    width = len(values) // int(offsets[-1])
    return pa.ListArray.from_arrays(pa.array((offsets * width).astype(np.int32)), pa.array(values))


def _repeats(
    rng: np.random.Generator, logp_T: np.ndarray, offsets: np.ndarray, chosen_S: np.ndarray
) -> pa.ListArray:
    """Log-probs scored twice, in the chosen responses only; the others have no list."""
    logp_T = logp_T[np.repeat(chosen_S, np.diff(offsets))]
    noise_T = rng.standard_normal(len(logp_T), dtype=np.float32) * np.float32(1e-3)
    again_T = np.minimum(logp_T + noise_T, np.float32(-1e-7))
    starts = np.concatenate([[0], np.cumsum(np.where(chosen_S, np.diff(offsets), 0))])
    lengths = pa.array(starts.astype(np.int32), mask=np.append(~chosen_S, False))
    return pa.ListArray.from_arrays(lengths, pa.array(again_T))
