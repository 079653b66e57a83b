"""Hashes in place of random numbers: a weight or a group follows from a key, whatever the order and the sharding."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, factorial

import numpy as np

GROUPS = 32
_BLOCK = 4096
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: uint64 to uint64, every output bit depends on every input bit."""
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def hash_keys(*keys: np.ndarray, seed: int = 0) -> np.ndarray:
    """One uint64 for each row of the integer columns."""
    state = np.full(keys[0].shape, seed, dtype=np.int64).view(np.uint64)
    for key in keys:
        state = mix(state ^ key.astype(np.int64).view(np.uint64))
    return state


def _poisson_thresholds() -> np.ndarray:
    cumulative = np.cumsum([exp(-1) / factorial(k) for k in range(13)])  # P(X > 12) = 6e-11
    return np.array([int(c * 2**64) for c in cumulative], dtype=np.uint64)


_POISSON = _poisson_thresholds()


def poisson_weights(prompt_id_P: np.ndarray, replicates: int, seed: int = 0) -> np.ndarray:
    """Poisson(1) weights by inverse CDF of hash(seed, replicate, prompt_id): [replicates, P], uint8."""
    prompt_P = hash_keys(prompt_id_P, seed=seed)
    replicate_B = mix(np.arange(replicates, dtype=np.uint64))
    weight_BP = np.zeros((replicates, len(prompt_id_P)), dtype=np.uint8)
    for block in _blocks(len(prompt_id_P)):
        uniform_BP = mix(prompt_P[None, block] ^ replicate_B[:, None])
        for threshold in _POISSON:
            weight_BP[:, block] += uniform_BP >= threshold
    return weight_BP


def resample(weight_BP: np.ndarray, sums_PM: np.ndarray) -> np.ndarray:
    """Weighted totals in float64, [P, M] → [B, M]; in blocks, so that many prompts take no more memory."""
    totals_BM = np.zeros((len(weight_BP), sums_PM.shape[1]))
    for block in _blocks(len(sums_PM)):
        totals_BM += weight_BP[:, block].astype(np.float64) @ sums_PM[block]
    return totals_BM


def _blocks(count: int) -> list[slice]:
    return [slice(first, first + _BLOCK) for first in range(0, count, _BLOCK)]


def prompt_groups(prompt_id_P: np.ndarray) -> np.ndarray:
    """The group of 32 that a prompt falls into, for intervals that delete one group at a time: int64."""
    return (hash_keys(prompt_id_P, seed=1) >> np.uint64(64 - 5)).astype(np.int64)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a batch: which one each response answers, its bootstrap weights, its group of 32."""

    prompt_id_P: np.ndarray  # int64, distinct
    of_response_S: np.ndarray  # int64, index into P
    weight_BP: np.ndarray  # uint8
    group_S: np.ndarray  # int64

    @classmethod
    def of(cls, prompt_id_S: np.ndarray, replicates: int, seed: int = 0) -> Prompts:
        prompt_id_P, of_response_S = np.unique(prompt_id_S, return_inverse=True)
        weight_BP = poisson_weights(prompt_id_P, replicates, seed)
        return cls(prompt_id_P, of_response_S, weight_BP, prompt_groups(prompt_id_P)[of_response_S])

    def sum_by_prompt(self, values_SM: np.ndarray) -> np.ndarray:
        """[S, M] → [P, M]."""
        order_S = np.argsort(self.of_response_S, kind="stable")
        first_P = np.searchsorted(self.of_response_S[order_S], np.arange(len(self.prompt_id_P)))
        return np.add.reduceat(values_SM[order_S], first_P, axis=0)
