"""What is summed over each response, in float64, and the metrics that are functions of these sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.gaps import TokenGaps

NARROW_BAND = (np.float32(0.8), np.float32(1.25))
WIDE_BAND = (np.float32(0.8), np.float32(1.28))


def _outside(ratio_N: np.ndarray, band: tuple[np.float32, np.float32]) -> np.ndarray:
    return (ratio_N < band[0]) | (ratio_N > band[1])


def _larger_of_ratio_and_inverse(gaps: TokenGaps) -> np.ndarray:
    if gaps.out_of_support_N is None:
        return np.maximum(gaps.ratio_N, 1 / gaps.ratio_N)
    return np.where(gaps.out_of_support_N, np.float32(0), np.exp(gaps.abs_d_N))


TOKEN_SUMS: dict[str, Callable[[TokenGaps], np.ndarray]] = {
    "abs_d": lambda g: g.abs_d_N,
    "d_d": lambda g: g.d_N * g.d_N,
    "k3": lambda g: g.k3_N,
    "less_1": lambda g: g.ratio_less_1_N,
    "less_1_less_1": lambda g: np.square(g.ratio_less_1_N, dtype=np.float64),  # float32 ends at r = 1.8e19
    "less_1_d": lambda g: g.ratio_less_1_N * g.d_N,
    "mult_error": _larger_of_ratio_and_inverse,
    "outside_narrow": lambda g: _outside(g.ratio_N, NARROW_BAND),
    "outside_wide": lambda g: _outside(g.ratio_N, WIDE_BAND),
    "q": lambda g: g.q_N,
    "q_q": lambda g: g.q_N * g.q_N,
    "q_dp": lambda g: g.q_N * g.dp_N,
    "dp": lambda g: g.dp_N,
    "dp_dp": lambda g: g.dp_N * g.dp_N,
    "abs_dp": lambda g: g.abs_dp_N,
    "binary_kl": lambda g: g.binary_kl_N,
}
MEASURED_SUMS = ("topk_tv", "topk_kl", "entropy")  # each with a count "…_n" of the tokens that have a value
RESPONSE_SUMS = ("responses", "length", "truncated", "reward", "reward_n")
SEQUENCE_SUMS = ("sequences", "sequence_d", "sequence_d_d", "sequence_d_n", "sequence_n_n")
COLUMNS = (
    "n",
    "supported",
    "d",
    *TOKEN_SUMS,
    *(name for measured in MEASURED_SUMS for name in (measured, f"{measured}_n")),
    *RESPONSE_SUMS,
    *SEQUENCE_SUMS,
)
INDEX = {name: column for column, name in enumerate(COLUMNS)}


def token_sums(gaps: TokenGaps) -> np.ndarray:
    """[S, M]: the token columns of `COLUMNS`, summed over each response; the others are still 0."""
    responses = gaps.responses
    sums_SM = np.zeros((len(responses.length_S), len(COLUMNS)))
    sums_SM[:, INDEX["n"]] = responses.length_S
    sums_SM[:, INDEX["supported"]], sums_SM[:, INDEX["d"]] = gaps.length_and_d_sum
    with np.errstate(over="ignore", divide="ignore"):  # a broken recording may hold |d| > 88: infinity is the answer
        for name, column in TOKEN_SUMS.items():
            sums_SM[:, INDEX[name]] = responses.sum(column(gaps))
    for name, values_N, counts_N in _measured(gaps):
        sums_SM[:, INDEX[name]] = responses.sum(values_N)
        sums_SM[:, INDEX[f"{name}_n"]] = responses.length_S if counts_N is None else responses.sum(counts_N)
    return sums_SM


def add_response_sums(sums_SM: np.ndarray, batch: TokenBatch) -> None:
    """Fill the response and sequence columns of a whole batch, in place.

    A sequence is a response with at least one token in support; its log-ratio is Σd over those tokens.
    """
    columns = {name: sums_SM[:, column] for name, column in INDEX.items()}
    columns["responses"][:] = 1
    columns["length"][:] = np.diff(batch.offset_S1.numpy())
    columns["truncated"][:] = batch.truncated_S.numpy()
    if batch.reward_S is not None:
        reward_S = batch.reward_S.numpy()
        columns["reward"][:] = np.nan_to_num(reward_S, nan=0.0)
        columns["reward_n"][:] = ~np.isnan(reward_S)
    d_S, n_S = columns["d"], columns["supported"]
    columns["sequences"][:] = n_S > 0
    columns["sequence_d"][:] = d_S
    columns["sequence_d_d"][:] = d_S * d_S
    columns["sequence_d_n"][:] = d_S * n_S
    columns["sequence_n_n"][:] = n_S * n_S


def _measured(gaps: TokenGaps) -> list[tuple[str, np.ndarray, np.ndarray | None]]:
    columns: list[tuple[str, np.ndarray, np.ndarray | None]] = []
    if (topk := gaps.topk) is not None:
        columns.append(("topk_tv", topk.tv_N, topk.tv_counts_N))
        columns.append(("topk_kl", topk.kl_N, topk.kl_counts_N))
    if (entropy_N := gaps.column("entropy_trainer_T")) is not None:
        missing_N = np.isnan(entropy_N)
        known_N = ~missing_N if missing_N.any() else None
        columns.append(("entropy", entropy_N if known_N is None else np.nan_to_num(entropy_N, nan=0.0), known_N))
    return columns


class Totals:
    """Sums over tokens and responses, by name; each an array over the leading axes of `totals_xM`."""

    def __init__(self, totals_xM: np.ndarray) -> None:
        self._totals_xM = totals_xM

    def __getitem__(self, name: str) -> np.ndarray:
        return self._totals_xM[..., INDEX[name]]

    def mean(self, name: str, count: str = "supported") -> np.ndarray:
        return self[name] / self[count]


def evaluate(totals_xM: np.ndarray) -> dict[str, np.ndarray]:
    """Every metric on totals of any leading shape; NaN where its count is zero."""
    totals = Totals(totals_xM)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {metric.key: metric.value(totals) for metric in METRICS.values() if metric.value}
