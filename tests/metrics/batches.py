"""Batches made by hand, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from mismatch_cli.rules.batch import TokenBatch


def make_batch(logp_rollout: Sequence[Any], **columns: Any) -> TokenBatch:
    """A batch from one list per response; other columns are flat or lists per response, `prompt_id`
    counts up by default.
    """
    lengths = [len(row) for row in logp_rollout]
    responses, tokens = len(lengths), sum(lengths)
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(TokenBatch))
    for name in ("sample_index_S", "step_S", "epoch_S", "minibatch_S"):
        values[name] = np.zeros(responses, dtype=np.int32)
    values |= {
        "offset_S1": np.cumsum([0, *lengths]),
        "prompt_id_S": np.arange(responses),
        "prompt_length_S": np.full(responses, 4),
        "truncated_S": np.zeros(responses, dtype=bool),
        "response_ids_T": np.arange(tokens, dtype=np.int32),
        "loss_mask_T": np.ones(tokens, dtype=bool),
    }
    for name, column in {"logp_rollout": list(logp_rollout), **columns}.items():
        (key,) = values.keys() & {name, f"{name}_T", f"{name}_S", f"{name}_TK"}
        dtype = np.dtype(np.int32 if "ids" in name else np.float32)
        if values[key] is not None:
            dtype = values[key].dtype
        # Lists per response are laid flat, columns that are flat stay
        rows = np.hstack(column) if isinstance(column, list) and column else np.asarray(column)
        values[key] = rows.astype(dtype)
    return TokenBatch(**values)


def random_batch(
    seed: int = 0,
    responses: int = 40,
    samples: int = 2,
    gap: float = 0.1,
    longest: int = 60,
    top_k: int = 0,
) -> TokenBatch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, responses)
    logq = [-(rng.exponential(1.0, n) ** 2) * 0.7 - 1e-5 for n in lengths]
    # The two sides first, for all responses, then the repetition
    logp = [np.minimum(q + gap * rng.normal(size=len(q)) * -np.expm1(q), -1e-6) for q in logq]
    repeat = [np.minimum(p + 1e-3 * rng.normal(size=len(p)), -1e-6) for p in logp]
    tokens = int(lengths.sum())
    columns: dict[str, Any] = {
        "logp_trainer": logp,
        "logp_recomputed": logp,
        "logp_trainer_repeat": repeat,
        "entropy_trainer": rng.exponential(0.5, tokens),
        "prompt_id": np.arange(responses) // samples + 1000 * seed,
        "sample_index": np.arange(responses) % samples,
        "reward": rng.integers(0, 2, responses),
        "truncated": rng.random(responses) < 0.1,
    }
    if top_k:
        logits = rng.normal(size=(tokens, top_k)) * 3
        for name in ("rollout", "recomputed"):
            noisy = logits + gap * rng.normal(size=logits.shape)
            columns[f"topk_logp_{name}"] = log_softmax(noisy) - 0.01
        columns["topk_ids"] = rng.integers(0, 50, (tokens, top_k))
        columns["response_ids"] = rng.integers(0, 50, tokens)
    return make_batch(logq, **columns)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def take_responses(batch: TokenBatch, order: Sequence[int]) -> TokenBatch:
    """The responses of a batch at the given indices, in that order."""
    spans = [np.arange(*batch.offset_S1[s : s + 2]) for s in order]
    place_T = np.concatenate([*spans, np.arange(0)])
    place_S = np.array(order, dtype=np.int64)
    chosen = {}
    for name, column in vars(batch).items():
        if column is not None and name != "offset_S1":
            chosen[name] = column[place_S if name.endswith("_S") else place_T]
    return replace(batch, offset_S1=np.cumsum([0, *map(len, spans)]), **chosen)
