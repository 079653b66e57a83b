"""Random batches from full distributions over a small vocabulary, so that all columns of a trace
are consistent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.clipping.masked_slice import Needs, add_to_first_pass
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.first_pass import FirstPass, batch_masks_of
from mismatch_cli.rules.algorithms.masks_and_factors import Rule
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.rules.joint_batches import BatchValues
from tests.leaves import leaves
from tests.metrics.batches import log_softmax, make_batch

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
    # Some tokens fall far, as after a step that went wrong
    now[np.flatnonzero(fallen), ids[fallen]] -= rng.exponential(3.0, int(fallen.sum()))
    logp = {"rollout": mu, "trainer": log_softmax(now), "recomputed": log_softmax(rescored)}
    levels = rng.choice([-1.3, -0.5, 0.0, 0.5, 0.7], responses)
    advantage = (
        rng.choice([-1.0, 0.0, 0.6], tokens) * rng.exponential(1.0, tokens)
        if per_token
        else levels[response_T]
    )
    entropy = -(np.exp(logp["trainer"]) * logp["trainer"]).sum(axis=1)
    entropy[response_T == 3] = np.nan
    reward = rng.integers(0, 2, responses).astype(float)
    reward[5:6] = np.nan
    top = np.argsort(-mu, axis=1)[:, :top_k]
    own = {name: x[np.arange(tokens), ids] for name, x in logp.items()}
    own["recomputed"][response_T == 7] = np.nan
    number = np.arange(responses)
    return make_batch(
        np.split(own.pop("rollout"), lengths.cumsum()[:-1]),
        **{f"logp_{name}": x for name, x in own.items()},
        **{f"topk_logp_{name}": np.take_along_axis(x, top, 1) for name, x in logp.items()},
        prompt_id=number // samples + 100 * seed,
        sample_index=number % samples,
        step=number * steps // responses,
        minibatch=number // samples % 2,
        reward=reward,
        response_ids=ids,
        loss_mask=rng.random(tokens) > 0.1,
        advantage=advantage,
        entropy_trainer=entropy,
        tv_full=np.abs(np.exp(mu) - np.exp(logp["trainer"])).sum(axis=1) / 2,
        kl_full=(np.exp(mu) * (mu - logp["trainer"])).sum(axis=1),
        topk_ids=top,
    )


def simple(
    logq: list[Any], logp: list[Any], advantage: list[float], **columns: np.ndarray
) -> TokenBatch:
    """A batch with one advantage and one prompt per response, and only what a plain algorithm
    needs.
    """
    advantage_T = np.repeat(np.array(advantage, dtype=float), [len(row) for row in logq])
    return make_batch(logq, logp_trainer=logp, **{"advantage_T": advantage_T} | columns)


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
) -> dict[Rule, BatchValues]:
    """The result of the first pass."""
    over_batches = [
        algorithm for algorithm in algorithms if needs.advantages and algorithm.batch_masks
    ]
    gathering = FirstPass(batch_masks_of(over_batches))
    for batch in batches:
        if over_batches and not Needs.of(over_batches).first_missing_in(batch):
            add_to_first_pass(gathering, batch, Needs.of(over_batches), 0)
    return gathering.settle()


def result_of(*batches: TokenBatch, blocked_tokens: int = 50, **question: Any) -> dict[str, Any]:
    result: dict[str, Any] = to_json(summarise(*batches, **question).result(blocked_tokens))
    return result


def is_estimate(value: Any) -> bool:
    return isinstance(value, dict) and {"value", "low", "high", "note"} <= set(value)


def estimates_in(result: Any) -> dict[str, dict[str, Any]]:
    """Every estimate of a result, by its path."""
    return {path: x for path, x in leaves(result, is_estimate).items() if is_estimate(x)}


def checked(*batches: TokenBatch, **question: Any) -> dict[str, Any]:
    """The result, checked to be valid JSON in which every missing value has a reason."""
    result = result_of(*batches, **question)
    json.dumps(result, allow_nan=False)
    for path, estimate in estimates_in(result).items():
        assert estimate["value"] is not None or estimate["note"], path
    return result


def row_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in result["algorithms"] if row["name"] == name)
