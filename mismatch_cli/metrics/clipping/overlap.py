"""Which algorithms block the same tokens: counts for every pair, and example tokens on which
they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mismatch_cli.base.hashing import GROUPS, mix
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.estimate import SHARE, Estimate, finite_or_none, interval
from mismatch_cli.metrics.histograms import without_each_group
from mismatch_cli.metrics.retained_rows import NO_ID, TOKEN_ROW, token_rows

MOST_ALGORITHMS = 64  # the bits of a pattern
PATTERNS = 1024  # that have examples
_EXAMPLES = 3  # of each
_MOST_CELLS = 2**22
_ROW = np.dtype(
    [
        ("pattern", np.uint64),
        ("hash", np.uint64),
        ("trace", np.int32),  # 0 until a reader of several traces sets it
        ("token", TOKEN_ROW),
        ("positive", np.bool_),
    ]
)


@dataclass(frozen=True)
class DisputedToken:
    """A token that one algorithm blocks and another keeps; log-probabilities in nats, None if not
    finite.
    """

    only: str  # the algorithm that blocks it
    not_: str
    advantage: str  # its sign, + or −
    trace: int  # its number among those read
    step: int
    prompt_id: int
    sample_index: int
    position: int
    token_id: int | None
    logp_reference: float
    logp_current: float | None


@dataclass(frozen=True)
class PairOverlap:
    """The tokens that two algorithms both block, and that only one of them does."""

    first: str
    second: str
    both: int
    only_first: int
    only_second: int
    jaccard: Estimate


@dataclass(frozen=True)
class OverlapCounts:
    """Pairs of algorithms as matrices: a row and a column for each name."""

    names: Sequence[str]
    jaccard: Sequence[Sequence[Estimate]]
    both: Sequence[Sequence[int]]  # tokens that both block
    only_row: Sequence[Sequence[int]]  # tokens that the row's blocks and the column's keeps
    examples: Sequence[DisputedToken]

    def pair(self, first: str, second: str) -> PairOverlap:
        i, j = self.names.index(first), self.names.index(second)
        return PairOverlap(
            first,
            second,
            both=self.both[i][j],
            only_first=self.only_row[i][j],
            only_second=self.only_row[j][i],
            jaccard=self.jaccard[i][j],
        )


class Overlap(Accumulator):
    """|blocked by i and j| for all pairs in each prompt group (exact), and 3 example tokens of each
    blocking pattern.

    A pattern has one bit per algorithm. Beyond 1,024 patterns, those with the smallest hashes keep
    their examples.
    """

    def __init__(self, algorithms: int) -> None:
        self.both = np.zeros((GROUPS, algorithms, algorithms), dtype=np.int64)
        self.examples = np.zeros(0, dtype=_ROW)

    def update(self, judged: MaskedSlice) -> None:
        index_U = np.flatnonzero(judged.blocked_by_N)
        if not len(index_U):
            return
        pattern_P, kind_U = distinct_patterns(judged.blocked_by_N[index_U])
        cell_U = judged.group_N[index_U] * len(pattern_P) + kind_U
        tokens_GP = np.bincount(cell_U, minlength=GROUPS * len(pattern_P)).reshape(GROUPS, -1)
        # numpy multiplies matrices of floats many times faster, and counts below 2^53 are exact
        blocks_AP = _bits(pattern_P, self.both.shape[1]).astype(np.float64)
        for group in np.flatnonzero(tokens_GP.any(axis=1)):
            self.both[group] += ((blocks_AP * tokens_GP[group]) @ blocks_AP.T).astype(np.int64)
        self._add(self._candidates(judged, index_U, pattern_P, kind_U))

    def _candidates(
        self, judged: MaskedSlice, index_U: np.ndarray, pattern_P: np.ndarray, kind_U: np.ndarray
    ) -> np.ndarray:
        """The tokens of a slice that may become examples: those with the smallest hashes of each
        pattern.
        """
        hash_U = judged.gaps.token_hash_N[index_U]
        near = np.flatnonzero(hash_U < self._limits(pattern_P)[kind_U])
        chosen = near[_first_of_each(kind_U[near], hash_U[near])]
        rows = np.zeros(len(chosen), dtype=_ROW)
        rows["pattern"] = pattern_P[kind_U[chosen]]
        rows["hash"] = hash_U[chosen]
        rows["token"] = token_rows(judged.gaps, index_U[chosen], with_topk=False)
        rows["positive"] = judged.positive_N[index_U[chosen]]
        return rows

    def _limits(self, pattern_P: np.ndarray) -> np.ndarray:
        """The hash below which a token becomes an example of its pattern."""
        # Examples are in the order of their patterns, and of their hashes within each
        begin_P = np.searchsorted(self.examples["pattern"], pattern_P, "left")
        end_P = np.searchsorted(self.examples["pattern"], pattern_P, "right")
        limit_P = np.full(len(pattern_P), np.iinfo(np.uint64).max)
        full_P = end_P - begin_P == _EXAMPLES
        limit_P[full_P] = self.examples["hash"][end_P[full_P] - 1]
        return limit_P

    def _add(self, rows: np.ndarray) -> None:
        rows = np.concatenate([self.examples, rows])
        rows = rows[_first_of_each(rows["pattern"], rows["hash"])]
        kinds = np.unique(rows["pattern"])
        if len(kinds) > PATTERNS:
            limit = np.partition(mix(kinds), PATTERNS - 1)[PATTERNS - 1]
            rows = rows[mix(rows["pattern"]) <= limit]
        self.examples = rows

    def merge(self, other: Overlap) -> None:
        self.both += other.both
        self._add(other.examples)

    def result(self, names: list[str], prompts: int) -> OverlapCounts:
        shared = self.both.sum(axis=0)
        jaccard_AA = _jaccard(shared)
        without_GAA = _jaccard(without_each_group(self.both))
        jaccard = []
        for i in range(len(names)):
            pairs = zip(jaccard_AA[i], without_GAA[:, i].T, strict=True)
            jaccard.append([interval(value, value_G, prompts, SHARE) for value, value_G in pairs])
        return OverlapCounts(
            names=names,
            jaccard=jaccard,
            both=shared.tolist(),
            only_row=(shared.diagonal()[:, None] - shared).tolist(),
            examples=self._examples(names),
        )

    def alike(self, names: list[str]) -> list[list[str]]:
        """The algorithms, grouped if they block the same tokens: |i ∩ j| = |i| = |j|, counted,
        not estimated.
        """
        shared = self.both.sum(axis=0)
        count = shared.diagonal()
        alike_AA = (shared == count) & (shared == count[:, None])
        # Each one goes to the first algorithm that is like it, at the latest to itself
        groups: dict[int, list[str]] = {}
        for name, alike_A in zip(names, alike_AA, strict=True):
            groups.setdefault(int(alike_A.argmax()), []).append(name)
        return list(groups.values())

    def _examples(self, names: list[str]) -> list[DisputedToken]:
        """For every ordered pair, up to three tokens that the first blocks and the second does
        not.
        """
        rows = self.examples[np.argsort(self.examples["hash"], kind="stable")]
        blocks = dict(zip(names, _bits(rows["pattern"], len(names)), strict=True))
        examples = []
        for only, other in product(names, names):
            disputed = rows[blocks[only] & ~blocks[other]]
            examples += [_disputed_token(only, other, row) for row in disputed[:_EXAMPLES]]
        return examples


def _disputed_token(only: str, other: str, row: np.ndarray) -> DisputedToken:
    token = row["token"]
    token_id = int(token["token_id"])
    return DisputedToken(
        only,
        other,
        "+" if row["positive"] else "−",
        trace=int(row["trace"]),
        step=int(token["step"]),
        prompt_id=int(token["prompt_id"]),
        sample_index=int(token["sample_index"]),
        position=int(token["position"]),
        token_id=None if token_id == NO_ID else token_id,
        logp_reference=float(token["logp_reference"]),
        logp_current=finite_or_none(float(token["logp_current"])),
    )


def distinct_patterns(pattern_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique` with the inverse, sixteen bits at a time without sorting, as there are few
    patterns.
    """
    kind_U = np.zeros(len(pattern_U), dtype=np.int64)
    kinds = 1
    # From the upper bits down: kinds of the bits so far × kinds of the next sixteen, renumbered
    for shift in (48, 32, 16, 0):
        bits_U = (pattern_U >> np.uint64(shift)).astype(np.uint16)
        if bits_U.any():
            distinct, bits_kind_U = _numbered(bits_U, 2**16)
            if kinds * len(distinct) > _MOST_CELLS:
                return np.unique(pattern_U, return_inverse=True)
            kind_U *= len(distinct)
            kind_U += bits_kind_U
            distinct, kind_U = _numbered(kind_U, kinds * len(distinct))
            kinds = len(distinct)
    pattern_P = np.zeros(kinds, dtype=np.uint64)
    pattern_P[kind_U] = pattern_U
    return pattern_P, kind_U


def _numbered(values_U: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values among 0 … end − 1 in ascending order, and each value's index among
    them.
    """
    occurs = np.zeros(end, dtype=bool)
    occurs[values_U] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1).take(values_U)


def _bits(pattern_P: np.ndarray, algorithms: int) -> np.ndarray:
    """Whether each algorithm blocks the tokens of each pattern: bool [A, P]."""
    return (pattern_P >> np.arange(algorithms, dtype=np.uint64)[:, None]) & np.uint64(1) == 1


def _first_of_each(pattern_U: np.ndarray, hash_U: np.ndarray) -> np.ndarray:
    """The indices with the three smallest hashes of each pattern."""
    order = np.lexsort([hash_U, pattern_U])
    if not len(order):
        return order
    sorted_U = pattern_U[order]
    is_first_U = np.concatenate([[True], sorted_U[1:] != sorted_U[:-1]])
    index_U = np.arange(len(order))
    first_U = np.maximum.accumulate(np.where(is_first_U, index_U, 0))
    return order[index_U - first_U < _EXAMPLES]


def _jaccard(shared_xAA: np.ndarray) -> np.ndarray:
    """|i ∩ j| / |i ∪ j|; NaN if neither blocks anything."""
    count_xA = np.diagonal(shared_xAA, axis1=-2, axis2=-1)
    union = count_xA[..., :, None] + count_xA[..., None, :] - shared_xAA
    with np.errstate(invalid="ignore", divide="ignore"):
        return shared_xAA / union
