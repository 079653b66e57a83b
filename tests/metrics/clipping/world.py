"""Random batches from full distributions over a small vocabulary, so that all columns of a trace
are consistent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.clipping.masked import Needs, gather
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.gathering import Gathering, masks_of
from mismatch_cli.rules.algorithms.parts import Rule
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.rules.batches import Found

VOCABULARY = 60
EVERYTHING = Needs(advantages=True, recomputed=True, top_k=20, full=True, topk_recomputed=True)
PLAIN = Needs(advantages=True, recomputed=False, top_k=0)
# Entropy masks would drop the tokens without it
ALL = tuple(a for a in TABLE.values() if not a.needs_entropy)


def plain_algorithms() -> tuple[Algorithm, ...]:
    """The algorithms that need only log π and log μ of the sampled tokens."""
    return tuple(
        a for a in ALL if not a.needs_recomputed and not a.needs_top_k and not a.batch_masks
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def world(
    seed: int = 0,
    responses: int = 60,
    *,
    per_token: bool = False,
    steps: int = 6,
    top_k: int = 20,
    samples: int = 3,
) -> TokenBatch:
    """μ, π′ (little noise) and π (much noise, and some tokens that fall far), sampled from μ;
    some are not measured.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, responses)
    tokens, response_T = int(lengths.sum()), np.repeat(np.arange(responses), lengths)
    logits = rng.normal(size=(tokens, VOCABULARY)) * rng.gamma(3.0, 0.8, (tokens, 1))
    logits[np.arange(tokens), rng.integers(0, VOCABULARY, tokens)] += rng.exponential(3.0, tokens)
    mu = log_softmax(logits)
    ids = (np.exp(mu).cumsum(axis=1) < rng.random((tokens, 1))).sum(axis=1).clip(max=VOCABULARY - 1)
    rescored = logits + 0.02 * rng.normal(size=logits.shape)
    now = rescored + 0.25 * rng.standard_t(3, logits.shape)
    fallen = rng.random(tokens) < 0.08
    now[np.flatnonzero(fallen), ids[fallen]] -= rng.exponential(3.0, int(fallen.sum()))
    recomputed, trainer = log_softmax(rescored), log_softmax(now)
    top = np.argsort(-mu, axis=1)[:, :top_k]
    levels = rng.choice([-1.3, -0.5, 0.0, 0.5, 0.7], responses)
    advantage = (
        rng.choice([-1.0, 0.0, 0.6], tokens) * rng.exponential(1.0, tokens)
        if per_token
        else levels[response_T]
    )
    entropy = -(np.exp(trainer) * trainer).sum(axis=1)
    entropy[response_T == 3] = np.nan
    reward = rng.integers(0, 2, responses).astype(float)
    reward[5:6] = np.nan
    index = np.arange(tokens)
    columns: dict[str, Any] = {
        "offset_S1": np.concatenate([[0], lengths.cumsum()]),
        "prompt_id_S": np.arange(responses) // samples + 100 * seed,
        "sample_index_S": (np.arange(responses) % samples).astype(np.int32),
        "step_S": (np.arange(responses) * steps // responses).astype(np.int32),
        "epoch_S": np.zeros(responses, dtype=np.int32),
        "minibatch_S": (np.arange(responses) // samples % 2).astype(np.int32),
        "prompt_length_S": np.full(responses, 4),
        "truncated_S": np.zeros(responses, dtype=bool),
        "reward_S": reward.astype(np.float32),
        "response_ids_T": ids.astype(np.int32),
        "loss_mask_T": rng.random(tokens) > 0.1,
        "advantage_T": advantage,
        "entropy_trainer_T": entropy,
        "tv_full_T": np.abs(np.exp(mu) - np.exp(trainer)).sum(axis=1) / 2,
        "kl_full_T": (np.exp(mu) * (mu - trainer)).sum(axis=1),
        "topk_ids_TK": top.astype(np.int32),
    }
    for name, logp in (("rollout", mu), ("trainer", trainer), ("recomputed", recomputed)):
        columns[f"logp_{name}_T"] = logp[index, ids]
        columns[f"topk_logp_{name}_TK"] = np.take_along_axis(logp, top, 1)
    columns["logp_recomputed_T"][response_T == 7] = np.nan
    return _batch(columns)


def _batch(columns: dict[str, Any]) -> TokenBatch:
    tensors = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    tensors = {
        name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in tensors.items()
    }
    return TokenBatch(**(dict.fromkeys(field.name for field in fields(TokenBatch)) | tensors))  # type: ignore[arg-type]


def simple(
    logq: list[list[float]], logp: list[list[float]], advantage: list[float], **columns: Any
) -> TokenBatch:
    """A batch with one advantage and one prompt per response, and only what a plain algorithm
    needs.
    """
    lengths = [len(row) for row in logq]
    responses = len(lengths)
    given = {
        "offset_S1": np.cumsum([0, *lengths]),
        "prompt_id_S": np.arange(responses),
        "sample_index_S": np.zeros(responses, dtype=np.int32),
        **{
            f"{name}_S": np.zeros(responses, dtype=np.int32)
            for name in ("step", "epoch", "minibatch")
        },
        "prompt_length_S": np.full(responses, 4),
        "truncated_S": np.zeros(responses, dtype=bool),
        "response_ids_T": np.arange(sum(lengths), dtype=np.int32),
        "loss_mask_T": np.ones(sum(lengths), dtype=bool),
        "logp_rollout_T": np.concatenate([np.array(row, dtype=float) for row in logq]),
        "logp_trainer_T": np.concatenate([np.array(row, dtype=float) for row in logp]),
        "advantage_T": np.repeat(np.array(advantage, dtype=float), lengths),
    }
    return _batch(given | columns)


def without(batch: TokenBatch, *names: str) -> TokenBatch:
    return replace(batch, **dict.fromkeys(names))


def summarise(
    *batches: TokenBatch,
    needs: Needs = EVERYTHING,
    algorithms: tuple[Algorithm, ...] = ALL,
    theory: bool = False,
    whole: Sequence[TokenBatch] = (),
) -> ClippingSummary:
    """The result of parts of a `whole`; without advantages, rules on whole batches, which need
    them, are left out.
    """
    algorithms = tuple(a for a in algorithms if needs.advantages or not a.batch_masks)
    summary = ClippingSummary(
        Question(algorithms, needs, theory, found_in(whole or batches, needs, algorithms))
    )
    for batch in batches:
        summary.update(batch)
    return summary


def found_in(
    batches: Sequence[TokenBatch], needs: Needs, algorithms: Iterable[Algorithm]
) -> dict[Rule, Found]:
    """The result of the first pass."""
    asked = [algorithm for algorithm in algorithms if needs.advantages and algorithm.batch_masks]
    gathering = Gathering(masks_of(asked))
    for batch in batches:
        if asked and not Needs.of(asked).missing_in(batch):
            gather(gathering, batch, Needs.of(asked), 0)
    return gathering.found()


def result_of(*batches: TokenBatch, blocked_tokens: int = 50, **question: Any) -> dict[str, Any]:
    found: dict[str, Any] = to_json(summarise(*batches, **question).result(blocked_tokens))
    return found


def estimates_in(result: Any, path: str = "") -> dict[str, dict[str, Any]]:
    """Every estimate of a result, by its path."""
    if isinstance(result, dict) and {"value", "low", "high", "note"} <= set(result):
        return {path: result}
    items = (
        result.items()
        if isinstance(result, dict)
        else enumerate(result)
        if isinstance(result, list)
        else ()
    )
    return {
        name: found
        for key, value in items
        for name, found in estimates_in(value, f"{path}/{key}").items()
    }


def no_numbers_in(found: Any, path: str = "") -> dict[str, float]:
    """NaN and infinities, by their paths."""
    if isinstance(found, float) and not np.isfinite(found):
        return {path: found}
    items = (
        found.items()
        if isinstance(found, dict)
        else enumerate(found)
        if isinstance(found, list)
        else ()
    )
    return {
        name: x for key, inner in items for name, x in no_numbers_in(inner, f"{path}/{key}").items()
    }


def checked(*batches: TokenBatch, **question: Any) -> dict[str, Any]:
    """The result, checked to be valid JSON in which every missing value has a reason."""
    found = result_of(*batches, **question)
    assert no_numbers_in(found) == {}
    json.dumps(found, allow_nan=False)
    for path, estimate in estimates_in(found).items():
        assert estimate["value"] is not None or estimate["note"], path
    return found


def row_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in found["algorithms"] if row["name"] == name)
