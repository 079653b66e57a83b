"""Faults that do not touch either distribution: constants, orders, units, contradicting columns,
duplicated rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lab.pool import Pool, some

Plant = Callable[[Pool, float, np.random.Generator], None]


def constant(pool: Pool, nats: float, rng: np.random.Generator) -> None:
    """Subtract a constant from every log-probability of half the responses, on one side."""
    _add(pool, str(rng.choice(["logp_rollout", "logp_trainer"])), _chosen(pool, 0.5, rng), -nats)


def constant_added(pool: Pool, nats: float, rng: np.random.Generator) -> None:
    """Add a constant to all responses on one side, clipped at 0."""
    side = str(rng.choice(["logp_rollout", "logp_trainer"]))
    _add(pool, side, np.ones(pool.num_responses, dtype=bool), nats)
    pool.tokens[side] = np.minimum(pool.tokens[side], 0)


def constant_in_some(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Subtract a different constant in each of some responses."""
    chosen_S = _chosen(pool, share, rng)
    _add(pool, "logp_rollout", chosen_S, -rng.uniform(0.3, 1.5, pool.num_responses))


def _add(pool: Pool, side: str, chosen_S: np.ndarray, nats: float | np.ndarray) -> None:
    added_S = np.where(chosen_S, nats, 0.0)
    pool.tokens[side] = (pool.tokens[side] + added_S[pool.response_T]).astype(np.float32)


def permuted(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Permute the engine's log-probabilities within some groups; a longer response keeps its own
    tail.
    """
    prompts = np.unique(pool.rows["prompt_id"])
    for prompt in rng.choice(prompts, max(1, round(share * len(prompts))), replace=False):
        _exchange(pool, rng.permutation(np.flatnonzero(pool.rows["prompt_id"] == prompt)))


def permuted_anywhere(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Permute them between responses to any prompts."""
    members = rng.permutation(some(pool, share, rng))
    _exchange(pool, members)


def _exchange(pool: Pool, members: np.ndarray) -> None:
    logp_T = pool.tokens["logp_rollout"]
    before_T = logp_T.copy()
    for s, other in zip(members, np.roll(members, -1), strict=True):
        length = min(pool.length_S[s], pool.length_S[other])
        start, source = pool.offset_S1[s], pool.offset_S1[other]
        logp_T[start : start + length] = before_T[source : source + length]


def twice(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Replace some responses with copies of others, keeping the keys."""
    index_S = np.arange(pool.num_responses)
    copies = rng.permutation(index_S)[: 2 * max(1, round(share * pool.num_responses / 2))]
    half = len(copies) // 2
    index_S[copies[:half]] = copies[half:]
    # The keys stay those of the replaced rows: only the content repeats
    content = pool.take(index_S)
    for name in pool.rows:
        if name not in ("finish_reason", "prompt_ids"):
            content.rows[name] = pool.rows[name]
    vars(pool).update(vars(content))


def in_base(*sides: str) -> Plant:
    """Logarithms to a base other than e, in every column of the sides."""

    def plant(pool: Pool, base: float, _: np.random.Generator) -> None:
        for columns in (pool.tokens, pool.ranks):
            for name in columns:
                if name.endswith(sides) and "logp" in name:
                    columns[name] = (columns[name] / np.log(base)).astype(np.float32)

    return plant


def columns_at_odds(pool: Pool, share: float, rng: np.random.Generator) -> None:
    """Shift the engine's top-K of some responses by one token, so that sampled tokens have two
    log-probabilities.
    """
    for s in some(pool, share, rng):
        own = slice(pool.offset_S1[s], pool.offset_S1[s + 1])
        for name in ("topk_ids", "topk_logp_rollout", "topk_logp_trainer"):
            pool.ranks[name][own] = np.roll(pool.ranks[name][own], 1, axis=0)


def raw_top_k(pool: Pool, temperature: float, _: np.random.Generator) -> None:
    """The engine's top-K from before the temperature, its sampled token from after it."""
    pool.ranks["topk_logp_rollout"] = (pool.ranks["topk_logp_rollout"] * temperature).astype(
        np.float32
    )


def _chosen(pool: Pool, share: float, rng: np.random.Generator) -> np.ndarray:
    chosen_S = np.zeros(pool.num_responses, dtype=bool)
    chosen_S[some(pool, share, rng)] = True
    return chosen_S
