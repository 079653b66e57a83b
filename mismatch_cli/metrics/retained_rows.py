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

NO_ID = -1  # of a token without an id, in a row; None in results
_ALMOST_1 = 1 - 2.0**-53  # of 2^64, which itself does not fit a uint64
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
        self.limit = np.inf  # no row with a larger key can still belong to the smallest
        self._chunks = [np.zeros(0, dtype=dtype)]

    def offer(
        self, candidates: np.ndarray, key_C: np.ndarray, rows_of: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Consider candidates by index; `rows_of(index)` builds the rows that may stay, without
        their key.
        """
        near = np.flatnonzero(key_C <= self.limit)
        # Building rows is costly: of many candidates, only those that may stay are built.
        if len(near) > 2 * self.capacity:
            self._lower_limit(key_C[near])
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
        # Few hashes are low enough, so the others are compared as whole numbers, not made floats.
        highest_hash = np.uint64(min(self.limit, _ALMOST_1) * 2.0**64)
        low = np.flatnonzero(hash_N <= highest_hash)
        if counts is not None:
            low = low[counts(low)]
        self.offer(low, hash_N[low] / 2.0**64, rows_of)

    def merge(self, other: SmallestRows) -> None:
        for rows in other._chunks:
            self._add(rows)

    def rows(self) -> np.ndarray:
        """The kept rows, in order."""
        rows = np.concatenate(self._chunks)
        names = rows.dtype.names or ()
        order = np.lexsort([rows[name] for name in reversed(names)])  # by its last key first
        self._chunks = [rows[order][: self.capacity]]
        return self._chunks[0]

    def _add(self, rows: np.ndarray) -> None:
        self._chunks.append(rows)
        if sum(map(len, self._chunks)) > 2 * self.capacity:
            self._shrink()

    def _shrink(self) -> None:
        """Drop rows beyond the N-th key; sort everything only if too many rows share that key."""
        rows = np.concatenate(self._chunks)
        self._lower_limit(rows["key"])
        rows = rows[rows["key"] <= self.limit]
        self._chunks = [rows]
        if len(rows) > 3 * self.capacity // 2:
            self.rows()

    def _lower_limit(self, keys: np.ndarray) -> None:
        """Lower the limit to the N-th smallest of at least N keys."""
        self.limit = float(np.partition(keys, self.capacity - 1)[self.capacity - 1])


def token_rows(gaps: TokenGaps, index: np.ndarray, *, with_topk: bool = True) -> np.ndarray:
    """`TOKEN_ROW`s of the counted tokens at `index`; positions count every token of the response,
    from 0.

    Top-K TV is computed for the whole slice, so it is left out unless requested.
    """
    rows = np.zeros(len(index), dtype=TOKEN_ROW)
    response, rows["position"] = gaps.place_of(index)
    _identify(rows, gaps, response)
    ids = gaps.token_ids_at(index)
    rows["token_id"] = NO_ID if ids is None else ids
    rows["logp_reference"] = gaps.logq_N[index]
    rows["logp_current"] = gaps.logp_N[index]
    rows["tv_topk"] = np.nan
    topk = gaps.topk if with_topk else None
    if topk is not None:
        rows["tv_topk"] = topk.tv_N[index]
        if topk.tv_counts_N is not None:
            rows["tv_topk"][~topk.tv_counts_N[index]] = np.nan
    return rows


def response_rows(gaps: TokenGaps, response: np.ndarray) -> np.ndarray:
    """`RESPONSE_ROW`s of some responses of the slice, with the number of counted tokens in
    support and their Σd.
    """
    rows = np.zeros(len(response), dtype=RESPONSE_ROW)
    _identify(rows, gaps, response)
    length_S, d_sum_S = gaps.length_and_d_sum
    rows["length"] = length_S[response]
    rows["d_sum"] = d_sum_S[response]
    return rows


def _identify(rows: np.ndarray, gaps: TokenGaps, response: np.ndarray) -> None:
    """Fill the fields of `_IDENTITY`."""
    for name, _ in _IDENTITY:
        rows[name] = getattr(gaps.batch, f"{name}_S")[gaps.first + response]


class WorstTokens(Accumulator):
    """The N tokens with the largest |d|, the N with the largest |Δp|, and the N responses with the
    largest |Σd|.

    Equal values are ordered by step, prompt, sample and position. A gap of exactly 0 is never among
    them; a token out of support can be only under |Δp|.
    """

    def __init__(self, count: int = 50) -> None:
        self.abs_d = SmallestRows(TOKEN_ROW, count)
        self.abs_dp = SmallestRows(TOKEN_ROW, count)
        self.responses = SmallestRows(RESPONSE_ROW, count)

    def update(self, gaps: TokenGaps) -> None:
        self.abs_d.offer_largest(gaps.abs_d_N, partial(token_rows, gaps))
        self.abs_dp.offer_largest(gaps.abs_dp_N, partial(token_rows, gaps))
        _, d_sum_S = gaps.length_and_d_sum
        with_gap = np.flatnonzero(d_sum_S)
        self.responses.offer(with_gap, -np.abs(d_sum_S[with_gap]), partial(response_rows, gaps))

    def result(self, trace: int = 0) -> WorstRows:
        """The rows, worst first; `trace` is the number of the trace that they are from."""
        return WorstRows(
            abs_d=[RetainedToken(**row, trace=trace) for row in _records(self.abs_d)],
            abs_dp=[RetainedToken(**row, trace=trace) for row in _records(self.abs_dp)],
            responses=[RetainedResponse(**row, trace=trace) for row in _records(self.responses)],
        )


def _records(smallest: SmallestRows) -> Iterator[dict[str, Any]]:
    """Each row as a dict by column; a number that is not finite is None."""
    columns = _columns(smallest)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, map(finite_or_none, row), strict=True))


class ScatterSample(Accumulator):
    """Nearly the same tokens and responses for every pair of policies, independent of order and
    sharding.

    A token is chosen by hash(prompt_id, sample_index, step, position), a response by the first
    three. Each sampled response has the number of its tokens in support, and Σd over them.
    """

    def __init__(self, tokens: int = 20_000, responses: int = 5_000) -> None:
        self.tokens = SmallestRows(TOKEN_ROW, tokens)
        self.responses = SmallestRows(RESPONSE_ROW, responses)

    def update(self, gaps: TokenGaps) -> None:
        self.tokens.offer_hashed(gaps.token_hash_N, partial(token_rows, gaps))
        length_S, _ = gaps.length_and_d_sum
        self.responses.offer_hashed(
            gaps.response_hash_S, partial(response_rows, gaps), lambda index: length_S[index] > 0
        )

    def result(self) -> dict[str, dict[str, list[Any]]]:
        """Columns as lists, `tokens` and `responses`; top-K TV is NaN if it was not measured."""
        return {"tokens": _columns(self.tokens), "responses": _columns(self.responses)}


def _columns(smallest: SmallestRows) -> dict[str, list[Any]]:
    """The rows' columns as lists, without the key."""
    rows = smallest.rows()
    columns = {name: rows[name].tolist() for name in rows.dtype.names or ()}
    del columns["key"]
    if "token_id" in columns:
        columns["token_id"] = [None if id_ == NO_ID else id_ for id_ in columns["token_id"]]
    return columns
