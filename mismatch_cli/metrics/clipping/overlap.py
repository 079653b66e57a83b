"""Which algorithms block the same tokens: counts for every pair, and examples of tokens on which they differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.clipping.judged import Judged
from mismatch_cli.metrics.estimate import Estimate, clamped, finite_or_none, jackknife_interval
from mismatch_cli.metrics.hashing import GROUPS, mix
from mismatch_cli.metrics.histograms import without_each_group
from mismatch_cli.metrics.keep import TOKEN_ROW, token_rows

MOST_ALGORITHMS = 64  # the bits of a pattern
_EXAMPLES, _PATTERNS = 3, 1024
_ROW = np.dtype(
    [
        ("pattern", np.uint64),
        ("hash", np.uint64),
        ("trace", np.int32),  # 0 until somebody who reads several traces says which
        ("token", TOKEN_ROW),
        ("positive", np.bool_),
    ]
)


class Overlap:
    """|blocked by i and j| for all pairs in each prompt group (exact), and 3 tokens of each pattern of who blocks them.

    A pattern is one bit per algorithm. Of more than 1,024 patterns those with the smallest hashes keep their examples.
    """

    def __init__(self, algorithms: int) -> None:
        self.both = np.zeros((GROUPS, algorithms, algorithms), dtype=np.int64)
        self.examples = np.zeros(0, dtype=_ROW)

    def update(self, judged: Judged) -> None:
        of_any_U = _union(judged)
        if not len(of_any_U):
            return
        blocks_AU = _membership(judged, of_any_U)
        group_U = judged.group_N[of_any_U]
        for group in np.unique(group_U):
            inside = blocks_AU[:, group_U == group].astype(np.float32)  # counts below 2^24 are exact
            self.both[group] += (inside @ inside.T).astype(np.int64)
        self._keep_examples(judged, of_any_U, patterns(blocks_AU))

    def _keep_examples(self, judged: Judged, index_U: np.ndarray, pattern_U: np.ndarray) -> None:
        hash_U = judged.gaps.token_hash_N[index_U]
        chosen = _first_of_each(pattern_U, hash_U)
        rows = np.zeros(len(chosen), dtype=_ROW)
        rows["pattern"], rows["hash"] = pattern_U[chosen], hash_U[chosen]
        rows["token"] = token_rows(judged.gaps, index_U[chosen])
        rows["positive"] = judged.positive_N[index_U[chosen]]
        self._add(rows)

    def _add(self, rows: np.ndarray) -> None:
        rows = np.concatenate([self.examples, rows])
        rows = rows[_first_of_each(rows["pattern"], rows["hash"])]
        kinds = np.unique(rows["pattern"])
        if len(kinds) > _PATTERNS:
            limit = np.partition(mix(kinds), _PATTERNS - 1)[_PATTERNS - 1]
            rows = rows[mix(rows["pattern"]) <= limit]
        self.examples = rows

    def merge(self, other: Overlap) -> None:
        self.both += other.both
        self._add(other.examples)

    def result(self, names: list[str], prompts: int) -> dict[str, Any]:
        both = self.both.sum(axis=0)
        jaccard, without_G = _jaccard(both), _jaccard(without_each_group(self.both))
        pairs = range(len(names))
        return {
            "names": names,
            "jaccard": [[_share(jaccard[i, j], without_G[:, i, j], prompts).to_dict() for j in pairs] for i in pairs],
            "both": both.tolist(),
            "only_row": (both.diagonal()[:, None] - both).tolist(),
            "examples": self._examples(names),
        }

    def _examples(self, names: list[str]) -> list[dict[str, Any]]:
        """For every ordered pair up to three tokens that the first one blocks and the second does not."""
        rows = self.examples[np.argsort(self.examples["hash"], kind="stable")]
        blocks_AU = (rows["pattern"] >> np.arange(len(names), dtype=np.uint64)[:, None]) & np.uint64(1) == 1
        found = []
        for i, first in enumerate(names):
            for j, second in enumerate(names):
                for row in rows[blocks_AU[i] & ~blocks_AU[j]][:_EXAMPLES]:
                    found.append(
                        {"only": first, "not": second, "advantage": "+" if row["positive"] else "−"} | _key(row)
                    )
        return found


def _share(value: float, without_G: np.ndarray, prompts: int) -> Estimate:
    return clamped(jackknife_interval(value, without_G, prompts), 0.0, 1.0)


def _key(row: np.ndarray) -> dict[str, Any]:
    token = row["token"]
    names = [name for name in TOKEN_ROW.names or () if name not in ("key", "tv_topk")]
    return {"trace": row["trace"].item()} | {name: finite_or_none(token[name].item()) for name in names}


def _union(judged: Judged) -> np.ndarray:
    flags_N = np.zeros(len(judged.advantage_N), dtype=bool)
    for index_U in judged.blocked:
        flags_N[index_U] = True
    return np.flatnonzero(flags_N)


def _membership(judged: Judged, of_any_U: np.ndarray) -> np.ndarray:
    """Whether each algorithm blocks each of these tokens: bool [A, U]."""
    blocks_AU = np.zeros((len(judged.blocked), len(of_any_U)), dtype=bool)
    for row, index_U in zip(blocks_AU, judged.blocked, strict=True):
        row[np.searchsorted(of_any_U, index_U)] = True
    return blocks_AU


def patterns(blocks_AU: np.ndarray) -> np.ndarray:
    """One bit per algorithm: uint64."""
    bits_A = np.uint64(1) << np.arange(len(blocks_AU), dtype=np.uint64)
    return (blocks_AU * bits_A[:, None]).sum(axis=0, dtype=np.uint64)


def _first_of_each(pattern_U: np.ndarray, hash_U: np.ndarray) -> np.ndarray:
    """The indices with the three smallest hashes of each pattern."""
    order = np.lexsort([hash_U, pattern_U])
    sorted_U = pattern_U[order]
    new_U = np.concatenate([[True], sorted_U[1:] != sorted_U[:-1]]) if len(order) else np.zeros(0, dtype=bool)
    start_U = np.maximum.accumulate(np.where(new_U, np.arange(len(order)), 0))
    return order[np.arange(len(order)) - start_U < _EXAMPLES]


def _jaccard(both_xAA: np.ndarray) -> np.ndarray:
    """|i ∩ j| / |i ∪ j|; NaN where neither blocks anything."""
    alone_xA = np.diagonal(both_xAA, axis1=-2, axis2=-1)
    union = alone_xA[..., :, None] + alone_xA[..., None, :] - both_xAA
    with np.errstate(invalid="ignore", divide="ignore"):
        return both_xAA / union
