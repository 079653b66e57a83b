"""Batches made by hand, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import pytest

from mismatch_cli.rules.batch import TokenBatch


def _batch(logp_rollout: Sequence[Sequence[float]], **columns: object) -> TokenBatch:
    """A batch from one list per response; other columns are flat or per response, `prompt_id`
    counts up by default.
    """
    lengths = [len(row) for row in logp_rollout]
    responses, tokens = len(lengths), sum(lengths)
    values: dict[str, object] = {field.name: None for field in fields(TokenBatch)}
    values |= {
        "offset_S1": np.array(np.cumsum([0, *lengths]), dtype=np.int64),
        "prompt_id_S": np.arange(responses),
        "sample_index_S": np.zeros(responses, dtype=np.int32),
        **{
            f"{name}_S": np.zeros(responses, dtype=np.int32)
            for name in ("step", "epoch", "minibatch")
        },
        "prompt_length_S": np.full((responses,), 5),
        "truncated_S": np.zeros(responses, dtype=bool),
        "response_ids_T": np.arange(tokens, dtype=np.int32),
        "loss_mask_T": np.ones(tokens, dtype=bool),
        "logp_rollout_T": np.array([x for row in logp_rollout for x in row], dtype=np.float32),
    }
    for name, column in columns.items():
        rows = column if isinstance(column, np.ndarray) else _flat(column)
        key = next(k for k in (f"{name}_T", f"{name}_S", f"{name}_TK") if k in values)
        like = values[key]
        dtype = (
            like.dtype
            if isinstance(like, np.ndarray)
            else np.int32
            if "ids" in name
            else np.float32
        )
        values[key] = np.asarray(rows).astype(dtype)
    return TokenBatch(**values)  # type: ignore[arg-type]


def _flat(column: object) -> list[float]:
    rows = list(column)  # type: ignore[call-overload]
    return [x for row in rows for x in row] if rows and isinstance(rows[0], list | tuple) else rows


def _random_batch(
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
    logp = [np.minimum(q + gap * rng.normal(size=len(q)) * -np.expm1(q), -1e-6) for q in logq]
    repeat = [np.minimum(p + 1e-3 * rng.normal(size=len(p)), -1e-6) for p in logp]
    tokens = int(lengths.sum())
    columns: dict[str, object] = {
        "logp_trainer": np.array(np.concatenate(logp)),
        "logp_recomputed": np.array(np.concatenate(logp)),
        "logp_trainer_repeat": np.array(np.concatenate(repeat)),
        "entropy_trainer": np.array(rng.exponential(0.5, tokens)),
        "prompt_id": np.arange(responses) // samples + 1000 * seed,
        "sample_index": np.arange(responses) % samples,
        "reward": np.array(rng.integers(0, 2, responses)),
        "truncated": np.array(rng.random(responses) < 0.1),
    }
    if top_k:
        logits = rng.normal(size=(tokens, top_k)) * 3
        for name in ("rollout", "recomputed"):
            noisy = np.array(logits + gap * rng.normal(size=logits.shape))
            columns[f"topk_logp_{name}"] = (
                noisy - np.log(np.exp(noisy).sum(axis=-1, keepdims=True))
            ) - 0.01
        columns["topk_ids"] = np.array(rng.integers(0, 50, (tokens, top_k)))
        columns["response_ids"] = np.array(rng.integers(0, 50, tokens))
    return _batch(logq, **columns)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TokenBatch]:
    return _batch


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., TokenBatch]:
    return _random_batch


@pytest.fixture(scope="session")
def take_responses() -> Callable[..., TokenBatch]:
    """The responses of a batch at the given indices, in that order."""

    def take(batch: TokenBatch, order: Sequence[int]) -> TokenBatch:
        offsets = batch.offset_S1.tolist()
        tokens = np.concatenate(
            [np.arange(offsets[s], offsets[s + 1]) for s in order] or [np.arange(0)]
        )
        lengths = [offsets[s + 1] - offsets[s] for s in order]
        chosen: dict[str, object] = {
            "offset_S1": np.array(np.cumsum([0, *lengths]), dtype=np.int64)
        }
        for field in fields(TokenBatch):
            column = getattr(batch, field.name)
            if field.name != "offset_S1":
                index = (
                    np.array(list(order), dtype=np.int64) if field.name.endswith("_S") else tokens
                )
                chosen[field.name] = None if column is None else column[index]
        return TokenBatch(**chosen)  # type: ignore[arg-type]

    return take
