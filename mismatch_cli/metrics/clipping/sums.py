"""What is summed over each response: of all judged tokens, and of those that each algorithm blocks or caps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.metrics.clipping.judged import Judged

SHARED = (
    "positive", "negative", "update_positive", "update_negative", "advantage_positive", "advantage_negative",
    "responses", "mu", "entropy", "entropy_n",
)  # fmt: skip
PER_ALGORITHM = (
    "positive", "negative", "lost_positive", "lost_negative", "capped_positive", "capped_negative",
    "touched", "mu", "entropy", "entropy_n",
)  # fmt: skip


class Totals:
    """Sums by name, over the leading axes of `totals_xM`: `shared("bad")`, `of(3, "touched")`."""

    def __init__(self, totals_xM: np.ndarray) -> None:
        self._totals_xM = totals_xM

    def shared(self, name: str) -> np.ndarray:
        return self._totals_xM[..., SHARED.index(name)]

    def of(self, algorithm: int, name: str) -> np.ndarray:
        return self._totals_xM[..., len(SHARED) + algorithm * len(PER_ALGORITHM) + PER_ALGORITHM.index(name)]


def width(algorithms: Sequence[Algorithm]) -> int:
    """M, the number of columns."""
    return len(SHARED) + len(algorithms) * len(PER_ALGORITHM)


def response_sums(judged: Judged) -> np.ndarray:
    """[S, M] in float64, in the order of `Totals`."""
    sums_SM = np.zeros((judged.num_responses, width(judged.algorithms)))
    sums_SM[:, : len(SHARED)] = _shared(judged)
    for number, (algorithm, blocked_U) in enumerate(zip(judged.algorithms, judged.blocked, strict=True)):
        first = len(SHARED) + number * len(PER_ALGORITHM)
        sums_SM[:, first : first + len(PER_ALGORITHM)] = _of_algorithm(judged, algorithm, blocked_U)
    return sums_SM


def _shared(judged: Judged) -> np.ndarray:
    total = judged.gaps.responses.sum
    mu_N, known_N, entropy_N = judged.gaps.q_N, *_known_entropy(judged)
    signs = (judged.positive_N, judged.negative_N)
    counts = [total(sign_N) for sign_N in signs]
    updates = [total(np.where(sign_N, judged.update_N, 0)) for sign_N in signs]
    advantages = [total(judged.abs_advantage_N * sign_N) for sign_N in signs]
    rest = [counts[0] + counts[1] > 0, total(mu_N * judged.judged_N), total(entropy_N), total(known_N)]
    return np.stack([*counts, *updates, *advantages, *rest], axis=1)


def _known_entropy(judged: Judged) -> tuple[np.ndarray, np.ndarray]:
    """Which judged tokens have an entropy, and the entropy there; 0 elsewhere."""
    if judged.entropy_N is None:
        nothing_N = np.zeros(len(judged.advantage_N), dtype=np.float32)
        return nothing_N, nothing_N
    known_N = judged.judged_N & ~np.isnan(judged.entropy_N)
    return known_N, np.where(known_N, judged.entropy_N, 0)


def _of_algorithm(judged: Judged, algorithm: Algorithm, blocked_U: np.ndarray) -> np.ndarray:
    sums = np.zeros((judged.num_responses, len(PER_ALGORITHM)))
    _add_blocked(sums, judged, blocked_U, judged.update_N if algorithm.weighs_by_ratio else judged.abs_advantage_N)
    if algorithm.weighs_by_ratio:
        _add_capped(sums, judged, algorithm, blocked_U)
    return sums


def _add_blocked(sums: np.ndarray, judged: Judged, blocked_U: np.ndarray, weight_N: np.ndarray) -> None:
    response_U, negative_U = judged.response_N[blocked_U], judged.negative_N[blocked_U]

    def count(weights_U: np.ndarray | None = None, where: np.ndarray | None = None) -> np.ndarray:
        chosen_U = response_U if where is None else response_U[where]
        weights = weights_U if where is None or weights_U is None else weights_U[where]
        return np.bincount(chosen_U, weights=weights, minlength=len(sums))

    for column, where in ((0, ~negative_U), (1, negative_U)):
        sums[:, column] = count(where=where)
        sums[:, column + 2] = count(weight_N[blocked_U], where)
    sums[:, 6] = sums[:, 0] + sums[:, 1] > 0
    sums[:, 7] = count(judged.gaps.q_N[blocked_U])
    if judged.entropy_N is not None:
        known_U = ~np.isnan(judged.entropy_N[blocked_U])
        sums[:, 8], sums[:, 9] = count(judged.entropy_N[blocked_U], known_U), count(where=known_U)


def _add_capped(sums: np.ndarray, judged: Judged, algorithm: Algorithm, blocked_U: np.ndarray) -> None:
    """What the bounds of the weight take from tokens that are kept: (r − weight)·|A|."""
    (factor,) = algorithm.weight
    if not factor.bounded:
        return
    low, high = np.float32(factor.floor), np.float32(factor.cap)
    bounded_N = judged.judged_N & ((judged.ratio_N > high) | (judged.ratio_N < low))
    bounded_N[blocked_U] = False
    index_U = np.flatnonzero(bounded_N)
    ratio_U = judged.ratio_N[index_U].astype(np.float64)
    lost_U = (ratio_U - np.clip(ratio_U, low, high)) * judged.abs_advantage_N[index_U]
    for column, where in ((4, judged.positive_N[index_U]), (5, judged.negative_N[index_U])):
        sums[:, column] = np.bincount(judged.response_N[index_U[where]], weights=lost_U[where], minlength=len(sums))
