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
        cell_N = ids_N + judged.negative_N * np.int32(self.judged.shape[1])
        if not judged.judged_N.all():
            cell_N = cell_N[judged.judged_N]
        count_into(self.judged, cell_N)
        for table, index_U in zip(self.blocked, judged.blocked, strict=True):
            if len(index_U):
                key_U = (judged.sign(index_U) << _SIGN_BIT) + ids_N[index_U]
                ones_U = np.ones(len(index_U))
                mu_U = judged.gaps.q_N[index_U]
                pi_U = np.exp(judged.gaps.logp_N[index_U])
                table.add(key_U, np.stack([ones_U, mu_U, pi_U, judged.ratio_N[index_U]]))

    def _make_room(self, ids: int) -> None:
        more = ids - self.judged.shape[1]
        if more > 0:
            self.judged = np.pad(self.judged, ((0, 0), (0, more)))

    def merge(self, other: TokenTable) -> None:
        self._make_room(other.judged.shape[1])
        self.judged[:, : other.judged.shape[1]] += other.judged
        for table, other_table in zip(self.blocked, other.blocked, strict=True):
            table.merge(other_table)

    def result(self, algorithm: int, sign: int, count: int) -> list[BlockedToken]:
        """The `count` ids that the algorithm blocks most often for one sign; ties in order of
        id.
        """
        key_U, sums_4U = self.blocked[algorithm].totals()
        of_sign = key_U >> _SIGN_BIT == sign
        ids_U = key_U[of_sign] - (sign << _SIGN_BIT)
        sums_4U = sums_4U[:, of_sign]
        tokens_U = self.judged[sign, ids_U]
        overall = float(sums_4U[0].sum() / max(self.judged[sign].sum(), 1))
        # Any id could come out by chance, so all that occur share the 5 % (Bonferroni)
        chance = _CHANCE / max(int(np.count_nonzero(self.judged[sign])), 1)
        rows = []
        for i in np.lexsort([ids_U, -sums_4U[0]])[:count]:
            row = _blocked_token(int(ids_U[i]), int(tokens_U[i]), sums_4U[:, i])
            if _chance_of(row.rate, overall, row.tokens) < chance:
                row = replace(row, lift=row.rate / overall)
            rows.append(row)
        return rows


def _blocked_token(token_id: int, tokens: int, sums_4: np.ndarray) -> BlockedToken:
    """How often one id is blocked, and its means over these occurrences; not yet its lift."""
    blocked, mu, pi, ratio = map(float, sums_4)
    return BlockedToken(
        token_id,
        blocked=int(blocked),
        tokens=tokens,
        rate=blocked / tokens,
        mu=mu / blocked,
        pi=pi / blocked,
        ratio=finite_or_none(ratio / blocked),
        lift=None,
    )


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
            keys, values = zip((self._key, self._sums_4), *self._waiting, strict=True)
            self._key, index_U = np.unique(np.concatenate(keys), return_inverse=True)
            values_4U = np.concatenate(values, axis=-1)
            self._sums_4 = np.stack(
                [
                    np.bincount(index_U, weights=value_U, minlength=len(self._key))
                    for value_U in values_4U
                ]
            )
            self._waiting = []
            self.size = 0
        return self._key, self._sums_4
