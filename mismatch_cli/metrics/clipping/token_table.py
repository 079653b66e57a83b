"""Which tokens are blocked, by id: how often, and what the policies said; memory grows with distinct ids only."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked import Masked

_BUFFERED = 2**16
_SIGN_BIT = 32


class TokenTable(Accumulator):
    """For every token id and sign: judged occurrences, and of each algorithm the blocked ones with Σμ, Σπ and Σr."""

    def __init__(self, algorithms: int) -> None:
        self.judged = np.zeros((2, 0), dtype=np.int64)  # by sign and id
        self.blocked = [_SparseSums() for _ in range(algorithms)]

    def update(self, judged: Masked) -> None:
        ids_N = judged.gaps.column("response_ids_T")
        assert ids_N is not None
        self._make_room(int(ids_N.max(initial=-1)) + 1)
        place_N = ids_N + judged.negative_N * np.int32(self.judged.shape[1])
        np.add.at(self.judged.reshape(-1), place_N if judged.judged_N.all() else place_N[judged.judged_N], 1)
        for table, index_U in zip(self.blocked, judged.blocked, strict=True):
            if len(index_U):
                key_U = (judged.sign(index_U) << _SIGN_BIT) + ids_N[index_U]
                pi_U = np.exp(judged.gaps.logp_N[index_U])
                table.add(key_U, np.stack([judged.gaps.q_N[index_U], pi_U, judged.ratio_N[index_U]]))

    def _make_room(self, ids: int) -> None:
        if ids > self.judged.shape[1]:
            self.judged = np.pad(self.judged, ((0, 0), (0, ids - self.judged.shape[1])))

    def merge(self, other: TokenTable) -> None:
        self._make_room(other.judged.shape[1])
        self.judged[:, : other.judged.shape[1]] += other.judged
        for mine, theirs in zip(self.blocked, other.blocked, strict=True):
            mine.merge(theirs)

    def result(self, algorithm: int, sign: int, count: int) -> list[dict[str, Any]]:
        """The `count` ids that the algorithm blocks most often for one sign; equal counts in order of their id."""
        key, number, sums_3 = self.blocked[algorithm].totals()
        mine = key >> _SIGN_BIT == sign
        ids, number, sums_3 = key[mine] - (sign << _SIGN_BIT), number[mine], sums_3[:, mine]
        overall = number.sum() / max(self.judged[sign].sum(), 1)
        rows: list[dict[str, Any]] = []
        for i in np.lexsort([ids, -number])[:count]:
            rate = number[i] / self.judged[sign, ids[i]]
            mu, pi, ratio = (float(total) / int(number[i]) for total in sums_3[:, i])
            counts = {"token_id": int(ids[i]), "blocked": int(number[i]), "tokens": int(self.judged[sign, ids[i]])}
            rows.append(
                counts | {"rate": float(rate), "lift": float(rate / overall), "mu": mu, "pi": pi}
                | {"ratio": ratio if np.isfinite(ratio) else None}
            )  # fmt: skip
        return rows


class _SparseSums(Accumulator):
    """Count and three sums for each key that occurs; new entries wait in a buffer until it is worth sorting them."""

    def __init__(self) -> None:
        self._key = np.zeros(0, dtype=np.int64)
        self._number = np.zeros(0, dtype=np.int64)
        self._sums_3 = np.zeros((3, 0))
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._size = 0

    def __getstate__(self) -> dict[str, Any]:
        """Sorted before it travels: a worker has the time, and less to send."""
        self.totals()
        return vars(self)

    def add(self, key_U: np.ndarray, values_3U: np.ndarray) -> None:
        self._wait(key_U, np.ones(len(key_U), dtype=np.int64), values_3U)

    def merge(self, other: _SparseSums) -> None:
        self._wait(*other.totals())

    def _wait(self, key: np.ndarray, number: np.ndarray, sums_3: np.ndarray) -> None:
        self._waiting.append((key, number, sums_3))
        self._size += len(key)
        if self._size > _BUFFERED:
            self.totals()

    def totals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys in ascending order, their counts, and their sums."""
        if self._waiting:
            parts = [(self._key, self._number, self._sums_3), *self._waiting]
            key, number, sums_3 = (np.concatenate(columns, axis=-1) for columns in zip(*parts, strict=True))
            self._key, of = np.unique(key, return_inverse=True)
            self._number = np.bincount(of, weights=number, minlength=len(self._key)).astype(np.int64)
            self._sums_3 = np.stack([np.bincount(of, weights=row, minlength=len(self._key)) for row in sums_3])
            self._waiting, self._size = [], 0
        return self._key, self._number, self._sums_3
