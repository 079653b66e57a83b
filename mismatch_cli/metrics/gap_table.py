"""The one table of metrics: a row per number, read by terminal, page, JSON, guide, limits and
dialects.

Notation of `METRICS`: μ is the reference (the rollout, in the pairs "mismatch" and "total"), π the
current policy, both for the sampled token; d = log π − log μ; r = π/μ; E is the mean over counted
tokens, E_y over responses y, Σd the sum over a response. Other tables explain their notation on the
pages that show them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np

from mismatch_cli import DPPO
from mismatch_cli.metrics.estimate import (
    ABOVE_1,
    ABOVE_MINUS_1,
    CANCELLING,
    CORRELATION,
    POSITIVE,
    SAMPLE_SIZE,
    SHARE,
    SIGNED,
    Scale,
    standard_deviation,
    times_floor,
)


class Sums(dict[str, np.ndarray]):
    """Sums over tokens and responses by name, of the totals or without each group of prompts."""

    def mean(self, name: str, count: str = "supported") -> np.ndarray:
        return self[name] / self[count]


@dataclass(frozen=True)
class Metric:
    """One number of a report.

    `agreement` is its value if the two policies are equal, None if it describes responses instead
    of a gap. A `signed` metric can be near that value by chance, so a multiple of the noise would
    be meaningless. `value` computes it from sums, or is None if it has its own accumulator; its
    interval is computed on `scale`. On the page it appears in `group`, lower `rank` first.
    """

    key: str
    label: str
    formula: str
    unit: str
    source: str
    group: str = ""
    value: Callable[[Sums], np.ndarray] | None = None
    scale: Scale = SIGNED  # for values on both sides of 0, or close to 1
    agreement: float | None = 0.0
    signed: bool = False
    rank: int = 1

    def times_floor(self, value: float | None, floor: float | None) -> float | str | None:
        """The value's distance from agreement, in multiples of the trainer's distance from
        itself.
        """
        if value is None or floor is None or self.agreement is None or self.signed:
            return None
        return times_floor(abs(value - self.agreement), abs(floor - self.agreement))


Table = Mapping[str, Metric]


def table(*rows: Metric) -> Table:
    """Rows by key; keys must be unique."""
    by_key = {row.key: row for row in rows}
    assert len(by_key) == len(rows)
    return by_key


# A smaller variance, relative to the mean square, is the rounding of float32 squares.
_ROUNDING = 2e-7


def _mean(name: str, count: str = "supported") -> Callable[[Sums], np.ndarray]:
    return lambda t: t.mean(name, count)


def _spread(square: str, name: str, count: str) -> Callable[[Sums], np.ndarray]:
    """The standard deviation; NaN for a single value."""

    def spread(t: Sums) -> np.ndarray:
        deviation = standard_deviation(t[name], t[square], t[count])
        return np.where(t[count] > 1, deviation, np.nan)

    return spread


def _kl_reverse_k3(t: Sums) -> np.ndarray:
    """r·d − (r − 1) = (r − 1)·d − φ(d)."""
    return (t["less_1_d"] - t["k3"]) / t["supported"]


def _pearson(t: Sums) -> np.ndarray:
    """Computed with p = q + Δp, so that nearly equal columns do not cancel; a constant q has no
    correlation.
    """
    q, dp, q_q = t.mean("q", "n"), t.mean("dp", "n"), t.mean("q_q", "n")
    var_q = q_q - q * q
    var_q = np.where(var_q > _ROUNDING * q_q, var_q, np.nan)
    var_dp = t.mean("dp_dp", "n") - dp * dp
    cov = t.mean("q_dp", "n") - q * dp
    return (var_q + cov) / np.sqrt(var_q * (var_q + 2 * cov + var_dp))


def _ess_token(t: Sums) -> np.ndarray:
    """(Σr)² / (n Σr²), from sums of r − 1."""
    n, less_1 = t["n"], t["less_1"]
    squares = n + 2 * less_1 + t["less_1_less_1"]
    return (n + less_1) ** 2 / (n * squares)


_FP16 = "FP16 mismatch paper (Precision-RL)"
_SCHULMAN = "Schulman, Approximating KL divergence (2020)"
_ROLLOUT_CORR = "verl rollout_corr"
_REWEIGHTED = "importance weighting by r"
_COMMON = "elementary"

GAP_GROUPS = (
    "Log-probabilities", "Probabilities (binary TV)", "Probabilities (top-K TV)", "Ratio π/μ",
    "KL divergence",
    "Agreement and weights",
)  # fmt: skip
_LOGS, _TV, _TOPK, _RATIO, _KL, _WEIGHTS = GAP_GROUPS
SEQUENCE, RESPONSES = "Responses as a whole", "Responses"

_ratio = partial(Metric, unit="1", group=_RATIO, agreement=1.0)
_response = partial(Metric, group=RESPONSES, agreement=None)

# fmt: off
METRICS = table(
    Metric("abs_d_mean", "mean |Δlog p|", "E |d|", "nats", "TRL, SkyRL, open-instruct", _LOGS,
           _mean("abs_d"), POSITIVE),
    Metric("abs_d_p50", "median of |Δlog p|", "50 % quantile of |d|", "nats", _COMMON, _LOGS),
    Metric("abs_d_p95", "p95 of |Δlog p|", "95 % quantile of |d|", "nats", _COMMON, _LOGS),
    Metric("abs_d_p99", "p99 of |Δlog p|", "99 % quantile of |d|", "nats", _COMMON, _LOGS),
    Metric("abs_d_max", "largest |Δlog p|", "max |d|", "nats", "TRL, SkyRL, open-instruct", _LOGS),
    Metric("d_mean", "mean Δlog p", "E d", "nats", "AReaL behave_approx_kl", _LOGS, _mean("d"),
           CANCELLING, signed=True),
    Metric("d_sd", "SD of Δlog p", "√(E d² − (E d)²)", "nats", _COMMON, _LOGS,
           _spread("d_d", "d", "supported"), POSITIVE),
    Metric("tv_binary_mean", "mean |π − μ|", "E |π − μ|", "probability",
           f"{DPPO}, App. F.2; verl rollout_probs_diff_mean", _TV, _mean("abs_dp", "n"), POSITIVE),
    Metric("tv_binary_sd", "SD of |π − μ|", "√(E (π − μ)² − (E |π − μ|)²)", "probability",
           "verl rollout_probs_diff_std", _TV, _spread("dp_dp", "abs_dp", "n"), POSITIVE),
    Metric("tv_binary_max", "largest |π − μ|", "max |π − μ|", "probability",
           "verl rollout_probs_diff_max", _TV),
    Metric("tv_signed_max", "largest π − μ", "max (π − μ)", "probability", f"{DPPO}, Fig. 3", _TV),
    Metric("tv_signed_min", "smallest π − μ", "min (π − μ)", "probability", f"{DPPO}, Fig. 3", _TV),
    _ratio("ratio_mean", "mean ratio", "E r", source="NeMo-RL sampling_importance_ratio",
           value=lambda t: 1 + t.mean("less_1", "n"), rank=0),
    _ratio("ratio_p01", "p1 of the ratio", "1 % quantile of r", source=_COMMON),
    _ratio("ratio_p50", "median ratio", "50 % quantile of r", source=_COMMON),
    _ratio("ratio_p99", "p99 of the ratio", "99 % quantile of r", source=_COMMON),
    _ratio("ratio_min", "smallest ratio", "min r", source=_COMMON, rank=0),
    _ratio("ratio_max", "largest ratio", "max r", source=_COMMON),
    Metric("ratio_outside_0.8_1.25", "ratio outside 0.8–1.25", "share with r < 0.8 or r > 1.25",
           "share", _COMMON,
           _RATIO, _mean("outside_narrow", "n"), SHARE),
    Metric("ratio_outside_0.8_1.28", "ratio outside 0.8–1.28", "share with r < 0.8 or r > 1.28",
           "share",
           f"{DPPO}, Clip-Higher", _RATIO, _mean("outside_wide", "n"), SHARE),
    Metric("k1", "KL(μ‖π), k1", "E (−d)", "nats/token", f"{_SCHULMAN}; {_ROLLOUT_CORR} kl", _KL,
           lambda t: -t.mean("d"), CANCELLING, signed=True),
    Metric("k2", "KL(μ‖π), k2", "E d²/2", "nats/token", _SCHULMAN, _KL, lambda t: t.mean("d_d") / 2,
           POSITIVE),
    Metric("k3", "KL(μ‖π), k3", "E (r − 1 − d)", "nats/token",
           f"{_SCHULMAN}; prime-rl mismatch_kl, NeMo-RL gen_kl_error", _KL, _mean("k3"), POSITIVE),
    Metric("kl_reverse_k1", "KL(π‖μ), weighted", "E r·d", "nats/token", _REWEIGHTED, _KL,
           lambda t: (t["less_1_d"] + t["d"]) / t["supported"], CANCELLING, signed=True),
    Metric("kl_reverse_k3", "KL(π‖μ), weighted, ≥ 0", "E (r·d − (r − 1))", "nats/token",
           _REWEIGHTED, _KL,
           _kl_reverse_k3, POSITIVE),
    Metric("kl_binary_mean", "mean binary KL", "E [μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π))]",
           "nats",
           f"{DPPO}, eq. 14", _KL, _mean("binary_kl"), POSITIVE),
    Metric("kl_binary_max", "largest binary KL", "max of the binary KL", "nats", f"{DPPO}, eq. 14",
           _KL),
    Metric("tv_topk_mean", "mean top-K TV", "E ½ Σ |π − μ| over top-K ∪ sampled ∪ others",
           "probability",
           f"{DPPO}, eq. 15", _TOPK, _mean("topk_tv", "topk_tv_n"), POSITIVE),
    Metric("tv_topk_max", "largest top-K TV", "max of the top-K TV", "probability",
           f"{DPPO}, eq. 15", _TOPK),
    *(Metric(f"topk_mass_{policy}", f"mass of the top K, {symbol}",
             f"E Σ {symbol} over the K that μ ranks highest",
             "share", f"{DPPO}, Fig. 12", _TOPK,
             _mean(f"topk_mass_{policy}", f"topk_mass_{policy}_n"), SHARE,
             agreement=None)
      for policy, symbol in (("reference", "μ"), ("current", "π"))),
    Metric("kl_topk_mean", "mean top-K KL", "E Σ μ log(μ/π) over top-K ∪ sampled ∪ others", "nats",
           f"{DPPO}, eq. 16",
           _KL, _mean("topk_kl", "topk_kl_n"), POSITIVE),
    Metric("kl_topk_max", "largest top-K KL", "max of the top-K KL", "nats", f"{DPPO}, eq. 16",
           _KL),
    _ratio("mult_prob_error", "mean exp |Δlog p|", "E exp |d|",
           source="NeMo-RL token_mult_prob_error",
           value=_mean("mult_error"), scale=ABOVE_1),
    Metric("pearson", "correlation of probabilities", "Pearson of (μ, π)", "1",
           "verl rollout_actor_probs_pearson_corr",
           _WEIGHTS, _pearson, CORRELATION, agreement=1.0),
    Metric("spearman", "rank correlation",
           "Spearman of (μ, π), mid-ranks, on at most 32,768 tokens", "1", _COMMON,
           _WEIGHTS, agreement=1.0),
    Metric("chi2_token", "χ², token", "E r² − 1", "1", f"{_ROLLOUT_CORR} chi2_token", _WEIGHTS,
           lambda t: (2 * t["less_1"] + t["less_1_less_1"]) / t["n"], ABOVE_MINUS_1, signed=True),
    Metric("chi2_sequence", "χ², sequence", "E_y exp(2 Σd) − 1", "1",
           f"{_ROLLOUT_CORR} chi2_seq (without its clamp)",
           SEQUENCE, signed=True, rank=2),
    Metric("ess_token", "effective sample size, token", "1 / E[(r / E r)²]", "share",
           f"{_ROLLOUT_CORR} eff_sample_size (not truncated)", _WEIGHTS, _ess_token, SAMPLE_SIZE,
           agreement=1.0),
    Metric("ess_sequence", "effective sample size, sequence", "1 / E_y[(w / E w)²], w = exp(Σd)",
           "share",
           "Kong (1992)", SEQUENCE, agreement=1.0, rank=2),
    Metric("sequence_kl", "KL(μ‖π) of a response", "E_y (−Σd)", "nats/response", f"{_FP16}, Fig. 5",
           SEQUENCE,
           lambda t: -t.mean("sequence_d", "sequences"), CANCELLING, signed=True),
    Metric("sequence_d_sd", "SD of Σd per response", "standard deviation of Σd over responses",
           "nats", _COMMON,
           SEQUENCE, _spread("sequence_d_d", "sequence_d", "sequences"), POSITIVE),
    Metric("sequence_slope", "Σd per 1000 tokens",
           "1000 · E_y[T Σd] / E_y[T²], a line through the origin",
           "nats/1000 tokens", f"{_FP16}, Fig. 5", SEQUENCE,
           lambda t: 1000 * t["sequence_d_n"] / t["sequence_n_n"], CANCELLING, signed=True, rank=0),
    Metric("abs_d_response_mean", "mean |Δlog p| by response", "E_y mean |d|", "nats",
           _COMMON, SEQUENCE,
           _mean("sequence_abs_d", "sequences"), POSITIVE),
    _response("entropy_mean", "mean entropy of π", "E −Σ π log π over the vocabulary", "nats",
              f"{DPPO}, Fig. 7",
              value=_mean("entropy", "entropy_n"), scale=POSITIVE, rank=2),
    _response("length_mean", "mean response length", "E_y T", "tokens", _COMMON,
              value=_mean("length", "responses"), scale=POSITIVE),
    _response("truncated_share", "truncated responses", "share that ran into the length limit",
              "share", _COMMON,
              value=_mean("truncated", "responses"), scale=SHARE),
    _response("reward_mean", "mean reward", "E_y R", "reward", _COMMON,
              value=_mean("reward", "reward_n"), rank=0),
    _response("equal_rewards_share", "groups without signal",
              "share of groups of ≥ 2 with all rewards equal", "share",
              "GRPO", rank=0),
)

# fmt: on


def _scatter(quantity: str, unit: str, subject: str, symbol: str, largest: str) -> list[Metric]:
    """The statistics of a quantity in a bin of μ."""
    statistics = (
        ("sd", f"SD of {subject}", f"standard deviation of {symbol}"),
        ("p01", f"p1 of {subject}", f"1 % quantile of {symbol}"),
        ("p99", f"p99 of {subject}", f"99 % quantile of {symbol}"),
        ("max", f"largest {subject.removeprefix('the ')}", largest),
    )
    return [
        Metric(f"{quantity}_{key}", label, f"{formula} in the bin of μ", unit, f"{DPPO}, Fig. 2")
        for key, label, formula in statistics
    ]


VOLATILITY = table(
    *_scatter("ratio", "1", "the ratio", "r", "max r"),
    *_scatter("tv_binary", "probability", "|π − μ|", "|π − μ|", "max |π − μ|"),
    *_scatter("tv_topk", "probability", "top-K TV", "top-K TV", "max of top-K TV"),
)
SCALES = {key: metric.scale for key, metric in METRICS.items()}  # for their intervals


def metrics_in_group(group: str) -> tuple[Metric, ...]:
    """The metrics of one group of `METRICS`, in page order."""
    members = [metric for metric in METRICS.values() if metric.group == group]
    return tuple(sorted(members, key=attrgetter("rank")))
