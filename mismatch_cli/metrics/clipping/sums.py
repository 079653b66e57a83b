"""What is summed over each response: of all judged tokens, and of those that each algorithm blocks or caps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.metrics.clipping.masked import Masked

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


def response_sums(judged: Masked) -> np.ndarray:
    """[S, M] in float64, in the order of `Totals`."""
    sums_SM = np.zeros((judged.num_responses, width(judged.algorithms)))
    sums_SM[:, : len(SHARED)] = _shared(judged)
    for number, (algorithm, blocked_U) in enumerate(zip(judged.algorithms, judged.blocked, strict=True)):
        first = len(SHARED) + number * len(PER_ALGORITHM)
        sums_SM[:, first : first + len(PER_ALGORITHM)] = _of_algorithm(judged, algorithm, blocked_U)
    return sums_SM


def _shared(judged: Masked) -> np.ndarray:
    total, (known_N, entropy_N) = judged.gaps.responses.sum, _known_entropy(judged)
    sums = {
        "responses": total(judged.judged_N) > 0,
        "mu": total(judged.gaps.q_N * judged.judged_N),
        "entropy": total(entropy_N),
        "entropy_n": total(known_N),
    }
    for sign, sign_N in (("positive", judged.positive_N), ("negative", judged.negative_N)):
        sums[sign] = total(sign_N)
        sums[f"update_{sign}"] = total(np.where(sign_N, judged.update_N, 0))
        sums[f"advantage_{sign}"] = total(judged.abs_advantage_N * sign_N)
    return np.stack([sums[name] for name in SHARED], axis=1)


def _known_entropy(judged: Masked) -> tuple[np.ndarray, np.ndarray]:
    """Which judged tokens have an entropy, and the entropy there; 0 elsewhere."""
    if judged.entropy_N is None:
        nothing_N = np.zeros(len(judged.advantage_N), dtype=np.float32)
        return nothing_N, nothing_N
    known_N = judged.judged_N & ~np.isnan(judged.entropy_N)
    return known_N, np.where(known_N, judged.entropy_N, 0)


def _of_algorithm(judged: Masked, algorithm: Algorithm, blocked_U: np.ndarray) -> np.ndarray:
    sums = _blocked(judged, blocked_U, judged.update_N if algorithm.weighs_by_ratio else judged.abs_advantage_N)
    if algorithm.weighs_by_ratio:
        sums |= _capped(judged, algorithm, blocked_U)
    nothing_S = np.zeros(judged.num_responses)
    return np.stack([sums.get(name, nothing_S) for name in PER_ALGORITHM], axis=1)


def _blocked(judged: Masked, blocked_U: np.ndarray, weight_N: np.ndarray) -> dict[str, np.ndarray]:
    def total(index_U: np.ndarray, values_N: np.ndarray | None = None) -> np.ndarray:
        weights_U = None if values_N is None else values_N[index_U]
        return np.bincount(judged.response_N[index_U], weights=weights_U, minlength=judged.num_responses)

    negative_U = judged.negative_N[blocked_U]
    sums = {"mu": total(blocked_U, judged.gaps.q_N)}
    for sign, sign_U in (("positive", blocked_U[~negative_U]), ("negative", blocked_U[negative_U])):
        sums[sign], sums[f"lost_{sign}"] = total(sign_U), total(sign_U, weight_N)
    sums["touched"] = sums["positive"] + sums["negative"] > 0
    if judged.entropy_N is not None:
        known_U = blocked_U[~np.isnan(judged.entropy_N[blocked_U])]
        sums["entropy"], sums["entropy_n"] = total(known_U, judged.entropy_N), total(known_U)
    return sums


def _capped(judged: Masked, algorithm: Algorithm, blocked_U: np.ndarray) -> dict[str, np.ndarray]:
    """What the bounds of the weight take from tokens that are kept: (r − weight)·|A|."""
    (factor,) = algorithm.weight
    if not factor.bounded:
        return {}
    low, high = np.float32(factor.floor), np.float32(factor.cap)
    bounded_N = judged.judged_N & ((judged.ratio_N > high) | (judged.ratio_N < low))
    bounded_N[blocked_U] = False
    index_U = np.flatnonzero(bounded_N)
    ratio_U = judged.ratio_N[index_U].astype(np.float64)
    lost_U = (ratio_U - np.clip(ratio_U, low, high)) * judged.abs_advantage_N[index_U]
    return {
        f"capped_{sign}": np.bincount(
            judged.response_N[index_U[sign_U]], weights=lost_U[sign_U], minlength=judged.num_responses
        )
        for sign, sign_U in (("positive", judged.positive_N[index_U]), ("negative", judged.negative_N[index_U]))
    }
