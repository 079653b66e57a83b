"""Which tokens are blocked, by id: how often, and at which probabilities; memory grows with
distinct ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from mismatch_cli.base.json_form import left_out_if_none
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.estimate import finite_or_none
from mismatch_cli.metrics.histograms import count_into

BUFFERED = 2**16
_SIGN_BIT = 32
_CHANCE = 0.05  # that a token id is called over-represented, though none is


@dataclass(frozen=True)
class BlockedToken:
    """A token id, how often it is blocked with one sign of A, and means over these occurrences."""

    token_id: int
    blocked: int
    tokens: int  # occurrences with that sign
    rate: float
    mu: float
    pi: float
    ratio: float | None  # None if not finite
    lift: float | None  # times the rate of all tokens; None where chance could make it
    text: str | None = left_out_if_none()  # from the vocabulary
    class_: str | None = left_out_if_none()  # of the text


@dataclass(frozen=True)
class TokensBySign:
    """The most frequently blocked tokens, by the sign of A."""

    positive: Sequence[BlockedToken]
    negative: Sequence[BlockedToken]

    def of(self, sign: str) -> Sequence[BlockedToken]:
        """The tokens by the name of their field."""
        return self.positive if sign == "positive" else self.negative


class TokenTable(Accumulator):
    """For every token id and sign: judged occurrences, and each algorithm's blocked ones with
    Σμ, Σπ and Σr. Empty for a trace without token ids.
    """

    def __init__(self, algorithms: int) -> None:
        self.judged = np.zeros((2, 0), dtype=np.int64)  # by sign and id
        self.blocked = [_SparseSums() for _ in range(algorithms)]

    def update(self, judged: MaskedSlice) -> None:
        ids_N = judged.gaps.column("response_ids_T")
        if ids_N is None:
            return
        self._make_room(int(ids_N.max(initial=-1)) + 1)
        place_N = ids_N + judged.negative_N * np.int32(self.judged.shape[1])
        count_into(self.judged, place_N if judged.judged_N.all() else place_N[judged.judged_N])
        for table, index_U in zip(self.blocked, judged.blocked, strict=True):
            if len(index_U):
                key_U = (judged.sign(index_U) << _SIGN_BIT) + ids_N[index_U]
                values = (
                    np.ones(len(index_U)),
                    judged.gaps.q_N[index_U],
                    np.exp(judged.gaps.logp_N[index_U]),
                )
                table.add(key_U, np.stack([*values, judged.ratio_N[index_U]]))

    def _make_room(self, ids: int) -> None:
        if ids > self.judged.shape[1]:
            self.judged = np.pad(self.judged, ((0, 0), (0, ids - self.judged.shape[1])))

    def merge(self, other: TokenTable) -> None:
        self._make_room(other.judged.shape[1])
        self.judged[:, : other.judged.shape[1]] += other.judged
        for table, other_table in zip(self.blocked, other.blocked, strict=True):
            table.merge(other_table)

    def result(self, algorithm: int, sign: int, count: int) -> list[BlockedToken]:
        """The `count` ids that the algorithm blocks most often for one sign; ties in order of
        id.
        """
        key, sums_4 = self.blocked[algorithm].totals()
        chosen = key >> _SIGN_BIT == sign
        ids, sums_4 = key[chosen] - (sign << _SIGN_BIT), sums_4[:, chosen]
        overall = float(sums_4[0].sum() / max(self.judged[sign].sum(), 1))
        # One of many ids: the 5 % are shared by all that could have come out by chance
        least = _CHANCE / max(int(np.count_nonzero(self.judged[sign])), 1)
        most = np.lexsort([ids, -sums_4[0]])[:count]
        rows = (_row(int(ids[i]), int(self.judged[sign, ids[i]]), sums_4[:, i]) for i in most)
        return [replace(row, lift=_lift(row.rate, overall, row.tokens, least)) for row in rows]


def _row(token_id: int, tokens: int, sums_4: np.ndarray) -> BlockedToken:
    """How often one id is blocked, and its means over these occurrences; not yet its lift."""
    blocked, *sums = map(float, sums_4)
    mu, pi, ratio = (total / blocked for total in sums)
    rate = blocked / tokens
    return BlockedToken(
        token_id, int(blocked), tokens, rate, mu, pi, finite_or_none(ratio), lift=None
    )


def _lift(rate: float, overall: float, tokens: int, least: float) -> float | None:
    """How many times the overall rate a rate is; None where its probability by chance is not below
    `least`.
    """
    return rate / overall if _chance_of(rate, overall, tokens) < least else None


def _chance_of(rate: float, overall: float, tokens: int) -> float:
    """A bound on the probability that `tokens` independent tokens have at least this rate, if each
    is blocked with the overall one: exp(−n · KL(rate‖overall)), Chernoff (1952).
    """
    if rate <= overall or overall == 0:
        return 1.0
    kl = rate * log(rate / overall)
    if rate < 1:
        kl += (1 - rate) * log((1 - rate) / (1 - overall))
    return exp(-tokens * kl)


class _SparseSums(Accumulator):
    """Four sums for each occurring key, Σ1 first; new entries wait in a buffer until sorting
    them pays off.
    """

    def __init__(self) -> None:
        self._key = np.zeros(0, dtype=np.int64)
        self._sums_4 = np.zeros((4, 0))
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self.size = 0

    def __getstate__(self) -> dict[str, Any]:
        """Sort before pickling: the worker has the time, and there is less to send."""
        self.totals()
        return super().__getstate__()

    def add(self, key_U: np.ndarray, values_4U: np.ndarray) -> None:
        self._waiting.append((key_U, values_4U))
        self.size += len(key_U)
        if self.size > max(BUFFERED, len(self._key)):
            self.totals()

    def merge(self, other: _SparseSums) -> None:
        self.add(*other.totals())

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys in ascending order, and their sums."""
        if self._waiting:
            parts = zip((self._key, self._sums_4), *self._waiting, strict=True)
            key, sums_4 = (np.concatenate(column, axis=-1) for column in parts)
            self._key, place = np.unique(key, return_inverse=True)
            self._sums_4 = np.stack(
                [np.bincount(place, weights=row, minlength=len(self._key)) for row in sums_4]
            )
            self._waiting, self.size = [], 0
        return self._key, self._sums_4
