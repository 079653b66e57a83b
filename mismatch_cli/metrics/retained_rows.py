"""Tokens and responses that are kept individually, independent of the sharding: the worst, and a
sample for plots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import finite_or_none
from mismatch_cli.metrics.gaps import TokenGaps

_NO_ID = -1  # of a token without an id, in a row; None in results
_ALMOST_1 = 1 - 2.0**-53  # 2^64 itself does not fit a uint64
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
_IDENTITY = [("step", np.int32), ("prompt_id", np.int64), ("sample_index", np.int32)]
TOKEN_ROW = np.dtype(
    [
        ("key", np.float64),
        *_IDENTITY,
        ("position", np.int32),
        ("token_id", np.int32),
        ("logp_reference", np.float32),
        ("logp_current", np.float32),
        ("tv_topk", np.float32),
    ]
)
RESPONSE_ROW = np.dtype(
    [("key", np.float64), *_IDENTITY, ("length", np.int32), ("d_sum", np.float64)]
)


@dataclass(frozen=True)
class RetainedToken:
    """A token with its place in its trace; log-probabilities in nats, None if not finite."""

    step: int
    prompt_id: int
    sample_index: int
    position: int
    token_id: int | None
    logp_reference: float
    logp_current: float | None
    tv_topk: float | None
    trace: int  # its number among those read


@dataclass(frozen=True)
class RetainedResponse:
    """A response with its place, its counted tokens and their Σd in nats."""

    step: int
    prompt_id: int
    sample_index: int
    length: int
    d_sum: float
    trace: int


@dataclass(frozen=True)
class WorstRows:
    """Tokens by |d| and by |Δp|, and responses by |Σd|."""

    abs_d: Sequence[RetainedToken]
    abs_dp: Sequence[RetainedToken]
    responses: Sequence[RetainedResponse]


class SmallestRows(Accumulator):
    """The smallest rows of a structured dtype, ordered by `key` and then by every other field to
    break ties.
    """

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        self.capacity = capacity
        self.limit = np.inf  # a larger key can no longer be kept
        self._parts = [np.zeros(0, dtype=dtype)]

    def offer(
        self, candidates: np.ndarray, key_C: np.ndarray, rows_of: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Consider candidates by index; `rows_of(index)` builds the rows that may stay, without
        their key.
        """
        near = np.flatnonzero(key_C <= self.limit)
        if len(near) > 2 * self.capacity:
            self.limit = float(np.partition(key_C[near], self.capacity - 1)[self.capacity - 1])
            near = near[key_C[near] <= self.limit]
        if len(near):
            rows = rows_of(candidates[near])
            rows["key"] = key_C[near]
            self._add(rows)

    def offer_largest(
        self, values_N: np.ndarray, rows_of: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Consider the values above 0: the largest stay."""
        large = np.flatnonzero(values_N >= max(-self.limit, _SMALLEST))
        self.offer(large, -values_N[large], rows_of)

    def offer_hashed(
        self,
        hash_N: np.ndarray,
        rows_of: Callable[[np.ndarray], np.ndarray],
        counts: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """Consider one candidate per uint64 hash, if `counts(index)` allows: the kept rows are a
        random sample.
        """
        low = np.flatnonzero(hash_N <= np.uint64(min(self.limit, _ALMOST_1) * 2.0**64))
        if counts is not None:
            low = low[counts(low)]
        self.offer(low, hash_N[low] / 2.0**64, rows_of)

    def merge(self, other: SmallestRows) -> None:
        for rows in other._parts:
            self._add(rows)

    def rows(self) -> np.ndarray:
        """The kept rows, in order."""
        rows = np.concatenate(self._parts)
        order = np.lexsort([rows[name] for name in reversed(rows.dtype.names or ())])
        self._parts = [rows[order][: self.capacity]]
        return self._parts[0]

    def _add(self, rows: np.ndarray) -> None:
        self._parts.append(rows)
        if sum(map(len, self._parts)) > 2 * self.capacity:
            self._shrink()

    def _shrink(self) -> None:
        """Drop rows beyond the N-th key; sort everything only if too many rows share that key."""
        rows = np.concatenate(self._parts)
        self.limit = float(np.partition(rows["key"], self.capacity - 1)[self.capacity - 1])
        self._parts = [rows[rows["key"] <= self.limit]]
        if len(self._parts[0]) > 3 * self.capacity // 2:
            self.rows()


def token_rows(gaps: TokenGaps, index: np.ndarray, *, with_topk: bool = True) -> np.ndarray:
    """`TOKEN_ROW`s of the counted tokens at `index`; positions count every token of the response,
    from 0.

    Top-K TV is computed for the whole slice, so it is left out unless requested.
    """
    rows = np.zeros(len(index), dtype=TOKEN_ROW)
    response, rows["position"] = gaps.place_of(index)
    _identify(rows, gaps, response)
    ids = gaps.token_ids_at(index)
    rows["token_id"] = _NO_ID if ids is None else ids
    rows["logp_reference"], rows["logp_current"] = gaps.logq_N[index], gaps.logp_N[index]
    rows["tv_topk"] = np.nan
    if with_topk and (topk := gaps.topk) is not None:
        known = True if topk.tv_counts_N is None else topk.tv_counts_N[index]
        rows["tv_topk"] = np.where(known, topk.tv_N[index], np.nan)
    return rows


def response_rows(gaps: TokenGaps, response: np.ndarray) -> np.ndarray:
    """`RESPONSE_ROW`s of some responses of the slice, with the number of counted tokens in
    support and their Σd.
    """
    rows = np.zeros(len(response), dtype=RESPONSE_ROW)
    _identify(rows, gaps, response)
    rows["length"], rows["d_sum"] = (values_S[response] for values_S in gaps.length_and_d_sum)
    return rows


def _identify(rows: np.ndarray, gaps: TokenGaps, response: np.ndarray) -> None:
    for name, column in (
        ("step", "step_S"),
        ("prompt_id", "prompt_id_S"),
        ("sample_index", "sample_index_S"),
    ):
        rows[name] = getattr(gaps.batch, column)[gaps.first + response]


class WorstTokens(Accumulator):
    """The N tokens with the largest |d|, the N with the largest |Δp|, and the N responses with the
    largest |Σd|.

    Equal values are ordered by step, prompt, sample and position. A gap of exactly 0 is never among
    them; a token out of support can be only under |Δp|.
    """

    def __init__(self, count: int = 50) -> None:
        self.abs_d, self.abs_dp = SmallestRows(TOKEN_ROW, count), SmallestRows(TOKEN_ROW, count)
        self.responses = SmallestRows(RESPONSE_ROW, count)

    def update(self, gaps: TokenGaps) -> None:
        for kept, values_N in ((self.abs_d, gaps.abs_d_N), (self.abs_dp, gaps.abs_dp_N)):
            kept.offer_largest(values_N, partial(token_rows, gaps))
        d_sum_S = gaps.length_and_d_sum[1]
        real = np.flatnonzero(d_sum_S)
        self.responses.offer(real, -np.abs(d_sum_S[real]), partial(response_rows, gaps))

    def result(self, trace: int = 0) -> WorstRows:
        """The rows, worst first; `trace` is the number of the trace that they are from."""
        return WorstRows(
            abs_d=[RetainedToken(**row, trace=trace) for row in _records(self.abs_d)],
            abs_dp=[RetainedToken(**row, trace=trace) for row in _records(self.abs_dp)],
            responses=[RetainedResponse(**row, trace=trace) for row in _records(self.responses)],
        )


def _records(kept: SmallestRows) -> Iterator[dict[str, Any]]:
    """The rows by column; a number that is not finite is None."""
    columns = _columns(kept)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, map(finite_or_none, row), strict=True))


class ScatterSample(Accumulator):
    """Nearly the same tokens and responses for every pair of policies, independent of order and
    sharding.

    A token is chosen by hash(prompt_id, sample_index, step, position), a response by the first
    three. Each sampled response has the number of its tokens in support, and Σd over them.
    """

    def __init__(self, tokens: int = 20_000, responses: int = 5_000) -> None:
        self.tokens, self.responses = (
            SmallestRows(TOKEN_ROW, tokens),
            SmallestRows(RESPONSE_ROW, responses),
        )

    def update(self, gaps: TokenGaps) -> None:
        self.tokens.offer_hashed(gaps.token_hash_N, partial(token_rows, gaps))
        length_S, _ = gaps.length_and_d_sum
        self.responses.offer_hashed(
            gaps.response_hash_S, partial(response_rows, gaps), lambda index: length_S[index] > 0
        )

    def result(self) -> dict[str, dict[str, list[Any]]]:
        """Columns as lists, `tokens` and `responses`; top-K TV is NaN if it was not measured."""
        return {"tokens": _columns(self.tokens), "responses": _columns(self.responses)}


def _columns(kept: SmallestRows) -> dict[str, list[Any]]:
    rows = kept.rows()
    columns = {name: rows[name].tolist() for name in rows.dtype.names or () if name != "key"}
    if "token_id" in columns:
        columns["token_id"] = [None if own == _NO_ID else own for own in columns["token_id"]]
    return columns
