"""A bounded sample of tokens and of responses for plots: those whose keys have the smallest hashes."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.hashing import hash_keys, mix
from mismatch_cli.metrics.keep import RESPONSE_ROW, TOKEN_ROW, SmallestRows, response_rows, token_rows

_ALMOST_1 = 1 - 2.0**-53


class ScatterSample:
    """About the same tokens and responses for every pair of policies, whatever the order and the sharding.

    A token is chosen by hash(prompt_id, sample_index, step, position), a response by the first three. Each response of
    the sample has the number of its tokens in support and Σd over them.
    """

    def __init__(self, tokens: int = 20_000, responses: int = 5_000) -> None:
        self.tokens, self.responses = SmallestRows(TOKEN_ROW, tokens), SmallestRows(RESPONSE_ROW, responses)

    def update(self, gaps: TokenGaps) -> None:
        batch, part = gaps.batch, slice(gaps.first, gaps.last)
        keys = (batch.prompt_id_S, batch.sample_index_S, batch.step_S)
        hash_S = hash_keys(*(key.numpy()[part] for key in keys))
        hash_N = _token_hashes(gaps, hash_S)
        low = np.flatnonzero(hash_N <= np.uint64(min(self.tokens.limit, _ALMOST_1) * 2.0**64))
        self.tokens.offer(_unit(hash_N[low]), lambda index: token_rows(gaps, low[index]))
        length_S, d_sum_S = gaps.length_and_d_sum
        real = np.flatnonzero(length_S)
        self.responses.offer(_unit(hash_S[real]), lambda index: response_rows(gaps, real[index], length_S, d_sum_S))

    def merge(self, other: ScatterSample) -> None:
        self.tokens.merge(other.tokens)
        self.responses.merge(other.responses)

    def result(self) -> dict[str, dict[str, list[float]]]:
        """Columns as lists: `tokens` and `responses`; a top-K TV that was not measured is NaN."""
        return {"tokens": _columns(self.tokens), "responses": _columns(self.responses)}


def _token_hashes(gaps: TokenGaps, hash_S: np.ndarray) -> np.ndarray:
    """splitmix64 at counter `position`, started at the response's hash: one round of mixing per token."""
    position_N = np.arange(gaps.response_offset_S1[-1], dtype=np.uint64) if gaps.kept is None else gaps.kept
    start_N = gaps.per_token(hash_S - gaps.response_offset_S1[:-1].astype(np.uint64))
    return mix(start_N + position_N.astype(np.uint64))


def _unit(hashes: np.ndarray) -> np.ndarray:
    return hashes / 2.0**64


def _columns(kept: SmallestRows) -> dict[str, list[float]]:
    rows = kept.rows()
    return {name: rows[name].tolist() for name in rows.dtype.names or () if name != "key"}
