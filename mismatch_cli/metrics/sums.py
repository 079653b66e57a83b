"""Sums over responses by prompt group, behind every mean, share and ratio and its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import numpy as np

from mismatch_cli.base.hashing import GROUPS, sum_by_group
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import (
    LARGEST_WEIGHTS,
    SIGNED,
    Estimate,
    Jackknife,
    Scale,
    jackknife_values,
    without_groups,
)
from mismatch_cli.metrics.gap_table import METRICS, Sums
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.rules.batch import TokenBatch

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
    # (r − 1)² leaves float32 from r = 1.8e19 on.
    "less_1_less_1": lambda g: np.square(g.ratio_less_1_N, dtype=np.float64),
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
TOPK_MASSES = ("topk_mass_reference", "topk_mass_current")
# Not every token has a value of these, so each has a count "…_n" of those that do.
MEASURED_SUMS = ("topk_tv", "topk_kl", *TOPK_MASSES, "entropy")
RESPONSE_SUMS = ("responses", "length", "truncated", "reward", "reward_n")
_OF_SEQUENCE = ("d", "d_d", "d_n", "n_n", "abs_d")
SEQUENCE_SUMS = ("sequences", *(f"sequence_{name}" for name in _OF_SEQUENCE))
COLUMNS = (
    "n",
    "supported",
    "d",
    *TOKEN_SUMS,
    *chain.from_iterable((name, f"{name}_n") for name in MEASURED_SUMS),
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
    # A broken recording may hold |d| > 88, whose ratio is infinite in float32: so is its sum.
    with np.errstate(over="ignore", divide="ignore"):
        for name, column in TOKEN_SUMS.items():
            sums_SM[:, INDEX[name]] = responses.sum(column(gaps))
    for name, values_N, counts_N in _measured(gaps):
        count_S = responses.length_S if counts_N is None else responses.sum(counts_N)
        sums_SM[:, INDEX[name]] = responses.sum(values_N)
        sums_SM[:, INDEX[f"{name}_n"]] = count_S
    return sums_SM


def add_response_sums(sums_SM: np.ndarray, batch: TokenBatch) -> None:
    """Fill the response and sequence columns of a whole batch, in place.

    A sequence is a response with at least one token in support; its log-ratio is Σd over those
    tokens.
    """
    columns = {name: sums_SM[:, column] for name, column in INDEX.items()}
    columns["responses"][:] = 1
    columns["length"][:] = np.diff(batch.offset_S1)
    columns["truncated"][:] = batch.truncated_S
    if batch.reward_S is not None:
        reward_S = batch.reward_S
        columns["reward"][:] = np.nan_to_num(reward_S, nan=0.0)
        columns["reward_n"][:] = ~np.isnan(reward_S)
    d_S, n_S = columns["d"], columns["supported"]
    columns["sequences"][:] = n_S > 0
    columns["sequence_d"][:] = d_S
    columns["sequence_d_d"][:] = d_S * d_S
    columns["sequence_d_n"][:] = d_S * n_S
    columns["sequence_n_n"][:] = n_S * n_S
    columns["sequence_abs_d"][:] = columns["abs_d"] / np.maximum(n_S, 1)


def _measured(gaps: TokenGaps) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """The measured columns of `MEASURED_SUMS`: the name, the values (0 where one is missing), and
    which tokens have one (None: all).
    """
    topk = gaps.topk
    if topk is not None:
        yield "topk_tv", topk.tv_N, topk.tv_counts_N
        yield "topk_kl", topk.kl_N, topk.kl_counts_N
        yield TOPK_MASSES[0], topk.mass_reference_N, topk.tv_counts_N
        yield TOPK_MASSES[1], topk.mass_current_N, topk.tv_counts_N
    entropy_N = gaps.column("entropy_trainer_T")
    if entropy_N is not None:
        missing_N = np.isnan(entropy_N)
        if missing_N.any():
            yield "entropy", np.nan_to_num(entropy_N, nan=0.0), ~missing_N
        else:
            yield "entropy", entropy_N, None


def evaluate(totals_xM: np.ndarray) -> dict[str, np.ndarray]:
    """Every metric on totals of any leading shape; NaN if its count is zero."""
    totals = Sums({name: totals_xM[..., column] for name, column in INDEX.items()})
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {metric.key: metric.value(totals) for metric in METRICS.values() if metric.value}


Evaluate = Callable[[np.ndarray], Mapping[str, np.ndarray]]


class GroupSums(Accumulator):
    """Totals of M per-response sums in each group of prompts."""

    def __init__(self, width: int) -> None:
        self.sums_GM = np.zeros((GROUPS, width))

    def update(self, group_S: np.ndarray, sums_SM: np.ndarray) -> None:
        self.sums_GM += sum_by_group(group_S, sums_SM)

    def result(
        self, evaluate: Evaluate, prompts: int, scales: Mapping[str, Scale]
    ) -> dict[str, Estimate]:
        """The result of `evaluate` on sums [..., M], with its interval over prompts."""
        jackknife = self.jackknife(evaluate, scales)
        return {name: metric.estimate(prompts) for name, metric in jackknife.items()}

    def jackknife(self, evaluate: Evaluate, scales: Mapping[str, Scale]) -> dict[str, Jackknife]:
        """The result of `evaluate` with the values behind each interval; anything without a scale
        is `SIGNED`.
        """
        values, without = without_groups(evaluate, self.sums_GM)
        occupied_G = np.any(self.sums_GM, axis=1)
        results = {}
        for name, value in values.items():
            without_G = jackknife_values(without[name], occupied_G)
            results[name] = Jackknife(float(value), without_G, scales.get(name, SIGNED))
        return results


class SequenceWeights(Accumulator):
    """χ² and effective sample size of complete responses, whose weights w = exp(Σd) may overflow
    any float.

    The sums hold w / e^shift, where shift is the largest Σd so far; a response with a token out of
    support weighs 0. Columns: Σ1, Σw, Σw².
    """

    def __init__(self) -> None:
        self.shift = -np.inf
        self.sums_G3 = np.zeros((GROUPS, 3))

    def update(self, group_S: np.ndarray, log_weight_S: np.ndarray) -> None:
        """`log_weight_S` is Σd of each sequence, −inf out of support; NaN for a response that is
        not a sequence.
        """
        sequence_S = ~np.isnan(log_weight_S)
        shift = float(np.max(log_weight_S, where=sequence_S, initial=-np.inf))
        weight_S = np.zeros(len(log_weight_S))
        positive = np.flatnonzero(log_weight_S > -np.inf)
        weight_S[positive] = np.exp(log_weight_S[positive] - shift)
        sums_S3 = np.stack([sequence_S, weight_S, weight_S * weight_S], axis=1).astype(np.float64)
        self._add(shift, sum_by_group(group_S, sums_S3))

    def merge(self, other: SequenceWeights) -> None:
        self._add(other.shift, other.sums_G3)

    def _add(self, shift: float, sums_G3: np.ndarray) -> None:
        largest = max(self.shift, shift)
        own_G3 = self.sums_G3 * _rescale(self.shift, largest)
        self.sums_G3 = own_G3 + sums_G3 * _rescale(shift, largest)
        self.shift = largest

    def result(self, prompts: int) -> dict[str, Estimate]:
        """Both without an interval: lab/interval_coverage.py found no valid one."""
        return {name: metric.estimate(prompts) for name, metric in self.jackknife().items()}

    def jackknife(self) -> dict[str, Jackknife]:
        """χ² = E w² − 1; ESS = 1 / E[(w / mean w)²], a fraction of the responses.

        Neither has an interval: a few responses of large weight decide, most of which are not in
        the trace.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            values = self._evaluate(self.sums_G3.sum(axis=0))
        unknown_G = np.full(len(self.sums_G3), np.nan)
        return {
            name: Jackknife(float(value), unknown_G, why_no_interval=LARGEST_WEIGHTS)
            for name, value in values.items()
        }

    def _evaluate(self, sums_3: np.ndarray) -> dict[str, np.ndarray]:
        count, w, w2 = sums_3
        chi2 = np.expm1(np.log(w2 / count) + 2 * self.shift)
        return {"chi2_sequence": chi2, "ess_sequence": w * w / (count * w2)}


def _rescale(shift: float, largest: float) -> np.ndarray:
    """The factors of Σ1, Σw and Σw² from one shift to a larger one; no weights yet: 0."""
    factor = np.exp(shift - largest) if shift > -np.inf else 0.0
    return np.array([1.0, factor, factor * factor])
