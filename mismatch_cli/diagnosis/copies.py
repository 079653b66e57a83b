"""Responses that stand in a trace more than once, under other keys: counted by a hash of their tokens."""

from __future__ import annotations

import numpy as np

from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.hashing import hash_keys, mix

MOST_RESPONSES = 2**20  # that are remembered; of a longer trace those with the smallest hashes
UNREPEATABLE = 16.0  # nats: a response that is this improbable is sampled twice in one of ten million pairs


class Copies:
    """The tokens and the key of every response that is too improbable to be sampled twice, as two hashes.

    What is forgotten of a long trace goes by the hash of the tokens, so that a response and its copy are both kept or
    both forgotten: shares stay unbiased.
    """

    def __init__(self, most_responses: int = MOST_RESPONSES) -> None:
        self._most = most_responses
        self._hashes = [np.zeros((2, 0), dtype=np.uint64)]  # of the tokens, of the key
        self._kept, self._limit = 0, np.uint64(2**64 - 1)

    def update(self, batch: TokenBatch) -> None:
        """Take in the responses of one table; all its tokens count, in the loss or not."""
        offset_S1, logq_T = batch.offset_S1.numpy(), batch.logp_rollout_T.numpy()
        surprise_S = _sums(np.nan_to_num(-logq_T.astype(np.float64), nan=0.0, posinf=0.0), offset_S1)
        content_S = content_hashes(batch.response_ids_T.numpy(), offset_S1)
        key_S = hash_keys(*(k.numpy() for k in (batch.step_S, batch.prompt_id_S, batch.sample_index_S)), seed=3)
        taken_S = (surprise_S >= UNREPEATABLE) & (content_S < self._limit)
        self._hashes.append(np.stack([content_S, key_S])[:, taken_S])
        self._kept += int(taken_S.sum())
        if self._kept > 2 * self._most:
            self._forget()

    def _forget(self) -> None:
        """Each use of a response once, and of many responses those with the smallest hashes."""
        hashes = np.unique(np.concatenate(self._hashes, axis=1), axis=1)
        if hashes.shape[1] > self._most:
            self._limit = hashes[0, self._most]
            hashes = hashes[:, hashes[0] < self._limit]
        self._hashes, self._kept = [hashes], hashes.shape[1]

    def count(self) -> tuple[int, int]:
        """How many of the remembered responses stand under another key already, and how many are remembered."""
        self._forget()
        content_R = self._hashes[0][0]
        return len(content_R) - len(np.unique(content_R)), len(content_R)


def content_hashes(ids_T: np.ndarray, offset_S1: np.ndarray) -> np.ndarray:
    """One uint64 for the token ids of each response, in their order."""
    length_S = np.diff(offset_S1)
    position_T = np.arange(len(ids_T)) - np.repeat(offset_S1[:-1], length_S)
    token_T = mix(ids_T.astype(np.int64).view(np.uint64) ^ mix(position_T.astype(np.uint64)))
    with np.errstate(over="ignore"):
        total_T1 = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(token_T, dtype=np.uint64)])
        return mix(total_T1[offset_S1[1:]] - total_T1[offset_S1[:-1]])


def _sums(values_T: np.ndarray, offset_S1: np.ndarray) -> np.ndarray:
    total_T1 = np.concatenate([[0.0], np.cumsum(values_T)])
    return total_T1[offset_S1[1:]] - total_T1[offset_S1[:-1]]
