"""A bounded sample of tokens and of responses for plots: those whose keys have the smallest hashes."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.keep import RESPONSE_ROW, TOKEN_ROW, SmallestRows, response_rows, token_rows


class ScatterSample:
    """About the same tokens and responses for every pair of policies, whatever the order and the sharding.

    A token is chosen by hash(prompt_id, sample_index, step, position), a response by the first three. Each response of
    the sample has the number of its tokens in support and Σd over them.
    """

    def __init__(self, tokens: int = 20_000, responses: int = 5_000) -> None:
        self.tokens, self.responses = SmallestRows(TOKEN_ROW, tokens), SmallestRows(RESPONSE_ROW, responses)

    def update(self, gaps: TokenGaps) -> None:
        self.tokens.offer_hashed(gaps.token_hash_N, lambda index: token_rows(gaps, index))
        length_S, d_sum_S = gaps.length_and_d_sum
        real = np.flatnonzero(length_S)
        self.responses.offer_hashed(
            gaps.response_hash_S[real], lambda index: response_rows(gaps, real[index], length_S, d_sum_S)
        )

    def merge(self, other: ScatterSample) -> None:
        self.tokens.merge(other.tokens)
        self.responses.merge(other.responses)

    def result(self) -> dict[str, dict[str, list[float]]]:
        """Columns as lists: `tokens` and `responses`; a top-K TV that was not measured is NaN."""
        return {"tokens": _columns(self.tokens), "responses": _columns(self.responses)}


def _columns(kept: SmallestRows) -> dict[str, list[float]]:
    rows = kept.rows()
    return {name: rows[name].tolist() for name in rows.dtype.names or () if name != "key"}
