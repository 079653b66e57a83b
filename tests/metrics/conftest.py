"""Batches made by hand, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch

from mismatch_cli.batch import TokenBatch


def _batch(logp_rollout: Sequence[Sequence[float]], **columns: object) -> TokenBatch:
    """A batch from one list per response; other columns flat or per response, `prompt_id` counting up by default."""
    lengths = [len(row) for row in logp_rollout]
    responses, tokens = len(lengths), sum(lengths)
    values: dict[str, object] = {field.name: None for field in fields(TokenBatch)}
    values |= {
        "offset_S1": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int64),
        "prompt_id_S": torch.arange(responses),
        "sample_index_S": torch.zeros(responses, dtype=torch.int32),
        "step_S": torch.zeros(responses, dtype=torch.int32),
        "prompt_length_S": torch.full((responses,), 5),
        "truncated_S": torch.zeros(responses, dtype=torch.bool),
        "response_ids_T": torch.arange(tokens, dtype=torch.int32),
        "loss_mask_T": torch.ones(tokens, dtype=torch.bool),
        "logp_rollout_T": torch.tensor([x for row in logp_rollout for x in row], dtype=torch.float32),
    }
    for name, column in columns.items():
        rows = column if torch.is_tensor(column) else _flat(column)
        key = next(k for k in (f"{name}_T", f"{name}_S", f"{name}_TK") if k in values)
        like = values[key]
        dtype = like.dtype if torch.is_tensor(like) else torch.int32 if "ids" in name else torch.float32
        values[key] = torch.as_tensor(rows).to(dtype)
    return TokenBatch(**values)  # type: ignore[arg-type]


def _flat(column: object) -> list[float]:
    rows = list(column)  # type: ignore[call-overload]
    return [x for row in rows for x in row] if rows and isinstance(rows[0], list | tuple) else rows


def _random_batch(
    seed: int = 0, responses: int = 40, samples: int = 2, gap: float = 0.1, longest: int = 60, top_k: int = 0
) -> TokenBatch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, responses)
    logq = [-(rng.exponential(1.0, n) ** 2) * 0.7 - 1e-5 for n in lengths]
    logp = [np.minimum(q + gap * rng.normal(size=len(q)) * -np.expm1(q), -1e-6) for q in logq]
    repeat = [np.minimum(p + 1e-3 * rng.normal(size=len(p)), -1e-6) for p in logp]
    tokens = int(lengths.sum())
    columns: dict[str, object] = {
        "logp_trainer": torch.tensor(np.concatenate(logp)),
        "logp_recomputed": torch.tensor(np.concatenate(logp)),
        "logp_trainer_repeat": torch.tensor(np.concatenate(repeat)),
        "entropy_trainer": torch.tensor(rng.exponential(0.5, tokens)),
        "prompt_id": torch.arange(responses) // samples + 1000 * seed,
        "sample_index": torch.arange(responses) % samples,
        "reward": torch.tensor(rng.integers(0, 2, responses)),
        "truncated": torch.tensor(rng.random(responses) < 0.1),
    }
    if top_k:
        logits = rng.normal(size=(tokens, top_k)) * 3
        for name in ("rollout", "recomputed"):
            noisy = torch.tensor(logits + gap * rng.normal(size=logits.shape))
            columns[f"topk_logp_{name}"] = noisy.log_softmax(-1) - 0.01
        columns["topk_ids"] = torch.tensor(rng.integers(0, 50, (tokens, top_k)))
        columns["response_ids"] = torch.tensor(rng.integers(0, 50, tokens))
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
        tokens = torch.cat([torch.arange(offsets[s], offsets[s + 1]) for s in order] or [torch.arange(0)])
        lengths = [offsets[s + 1] - offsets[s] for s in order]
        chosen: dict[str, object] = {"offset_S1": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int64)}
        for field in fields(TokenBatch):
            column = getattr(batch, field.name)
            if field.name != "offset_S1":
                index = torch.tensor(list(order), dtype=torch.int64) if field.name.endswith("_S") else tokens
                chosen[field.name] = None if column is None else column[index]
        return TokenBatch(**chosen)  # type: ignore[arg-type]

    return take
