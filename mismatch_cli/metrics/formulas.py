"""Metrics as functions of sums, evaluated alike on the totals and on what is left without each group of prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatch_cli.metrics.columns import INDEX
from mismatch_cli.metrics.jackknife import ABOVE_1, ABOVE_MINUS_1, CORRELATION, POSITIVE, SAMPLE_SIZE, SHARE, Scale

_ROUNDING = 2e-7  # relative: a variance below it is what float32 squares were rounded by


class Totals:
    """Sums over tokens and responses, by name; each an array over the leading axes of `totals_xM`."""

    def __init__(self, totals_xM: np.ndarray) -> None:
        self._totals_xM = totals_xM

    def __getitem__(self, name: str) -> np.ndarray:
        return self._totals_xM[..., INDEX[name]]

    def mean(self, name: str, count: str = "n") -> np.ndarray:
        return self[name] / self[count]


def _d_sd(t: Totals) -> np.ndarray:
    return np.sqrt(np.maximum(t.mean("d_d", "supported") - t.mean("d", "supported") ** 2, 0))


def _tv_sd(t: Totals) -> np.ndarray:
    return np.sqrt(np.maximum(t.mean("dp_dp") - t.mean("abs_dp") ** 2, 0))


def _kl_reverse_k3(t: Totals) -> np.ndarray:
    """r·d − (r − 1) = (r − 1)·d − φ(d)."""
    return (t["less_1_d"] - t["k3"]) / t["supported"]


def _pearson(t: Totals) -> np.ndarray:
    """With p = q + Δp, so that two nearly equal columns do not cancel; one value of q alone has no correlation."""
    q, dp = t.mean("q"), t.mean("dp")
    var_q, var_dp = t.mean("q_q") - q * q, t.mean("dp_dp") - dp * dp
    var_q = np.where(var_q > _ROUNDING * t.mean("q_q"), var_q, np.nan)
    cov = t.mean("q_dp") - q * dp
    return (var_q + cov) / np.sqrt(var_q * (var_q + 2 * cov + var_dp))


def _ess_token(t: Totals) -> np.ndarray:
    """(Σr)² / (n Σr²), from sums of r − 1."""
    n, less_1 = t["n"], t["less_1"]
    return (n + less_1) ** 2 / (n * (n + 2 * less_1 + t["less_1_less_1"]))


def _sequence_sd(t: Totals) -> np.ndarray:
    variance = t.mean("sequence_d_d", "sequences") - t.mean("sequence_d", "sequences") ** 2
    return np.sqrt(np.maximum(variance, 0))


FORMULAS: dict[str, Callable[[Totals], np.ndarray]] = {
    "abs_d_mean": lambda t: t.mean("abs_d", "supported"),
    "d_mean": lambda t: t.mean("d", "supported"),
    "d_sd": _d_sd,
    "tv_binary_mean": lambda t: t.mean("abs_dp"),
    "tv_binary_sd": _tv_sd,
    "ratio_mean": lambda t: 1 + t.mean("less_1"),
    "ratio_outside_0.8_1.25": lambda t: t.mean("outside_narrow"),
    "ratio_outside_0.8_1.28": lambda t: t.mean("outside_wide"),
    "k1": lambda t: -t.mean("d", "supported"),
    "k2": lambda t: t.mean("d_d", "supported") / 2,
    "k3": lambda t: t.mean("k3", "supported"),
    "kl_reverse_k1": lambda t: (t["less_1_d"] + t["d"]) / t["supported"],
    "kl_reverse_k3": _kl_reverse_k3,
    "kl_binary_mean": lambda t: t.mean("binary_kl", "supported"),
    "tv_topk_mean": lambda t: t.mean("topk_tv", "topk_tv_n"),
    "kl_topk_mean": lambda t: t.mean("topk_kl", "topk_kl_n"),
    "mult_prob_error": lambda t: t.mean("mult_error", "supported"),
    "pearson": _pearson,
    "chi2_token": lambda t: (2 * t["less_1"] + t["less_1_less_1"]) / t["n"],
    "ess_token": _ess_token,
    "sequence_kl": lambda t: -t.mean("sequence_d", "sequences"),
    "sequence_d_sd": _sequence_sd,
    "sequence_slope": lambda t: 1000 * t["sequence_d_n"] / t["sequence_n_n"],
    "entropy_mean": lambda t: t.mean("entropy", "entropy_n"),
    "length_mean": lambda t: t.mean("length", "responses"),
    "truncated_share": lambda t: t.mean("truncated", "responses"),
    "reward_mean": lambda t: t.mean("reward", "reward_n"),
}

# of their intervals; what is not here can lie on both sides of 0, or is close to 1
SCALES: dict[str, Scale] = {
    **dict.fromkeys(
        (
            "abs_d_mean", "d_sd", "tv_binary_mean", "tv_binary_sd", "k2", "k3", "kl_reverse_k3", "kl_binary_mean",
            "tv_topk_mean", "kl_topk_mean", "sequence_d_sd", "entropy_mean", "length_mean",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(("ratio_outside_0.8_1.25", "ratio_outside_0.8_1.28", "truncated_share"), SHARE),
    "ess_token": SAMPLE_SIZE,
    "mult_prob_error": ABOVE_1,
    "chi2_token": ABOVE_MINUS_1,
    "pearson": CORRELATION,
}  # fmt: skip


def evaluate(totals_xM: np.ndarray) -> dict[str, np.ndarray]:
    """Every metric on totals of any leading shape; NaN where its count is zero."""
    totals = Totals(totals_xM)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {name: formula(totals) for name, formula in FORMULAS.items()}
