"""The one table of what is measured: the words that terminal, HTML report and JSON documentation share.

Notation: μ the reference (the rollout, in the pairs "mismatch" and "total"), π the current policy, both of the sampled
token; d = log π − log μ; r = π/μ; E the mean over counted tokens, E_y over responses y, Σd the sum over a response.
"""

from __future__ import annotations

from dataclasses import dataclass

from mismatch_cli.metrics.estimate import times_floor
from mismatch_cli.papers import DPPO


@dataclass(frozen=True)
class Metric:
    """One number of a summary.

    `agreement` is its value where the two policies are equal, None where it describes the responses and not a gap. A
    `signed` metric can be near that value by chance, so a factor over the noise floor would mean nothing.
    """

    key: str
    label: str
    formula: str
    unit: str
    source: str
    agreement: float | None = 0.0
    signed: bool = False

    def times_floor(self, value: float | None, floor: float | None) -> float | str | None:
        """How far the value is from agreement, in multiples of how far the trainer is from itself."""
        if value is None or floor is None or self.agreement is None or self.signed:
            return None
        return times_floor(abs(value - self.agreement), abs(floor - self.agreement))


_FP16 = "FP16 mismatch paper (Precision-RL)"
_SCHULMAN = "Schulman, Approximating KL divergence (2020)"
_VERL = "verl rollout_corr"
_COMMON = "elementary"

CATALOG: tuple[Metric, ...] = (
    Metric("abs_d_mean", "mean |Δlog p|", "E |d|", "nats", "TRL, SkyRL, open-instruct"),
    Metric("abs_d_p50", "median of |Δlog p|", "50 % quantile of |d|", "nats", _COMMON),
    Metric("abs_d_p95", "p95 of |Δlog p|", "95 % quantile of |d|", "nats", _COMMON),
    Metric("abs_d_p99", "p99 of |Δlog p|", "99 % quantile of |d|", "nats", _COMMON),
    Metric("abs_d_max", "largest |Δlog p|", "max |d|", "nats", "TRL, SkyRL, open-instruct"),
    Metric("d_mean", "mean signed Δlog p", "E d", "nats", "AReaL behave_approx_kl", signed=True),
    Metric("d_sd", "spread of Δlog p", "√(E d² − (E d)²)", "nats", _COMMON),
    Metric(
        "tv_binary_mean", "mean |π − μ|", "E |π − μ|", "probability", f"{DPPO}, App. F.2; verl rollout_probs_diff_mean"
    ),
    Metric(
        "tv_binary_sd",
        "spread of |π − μ|",
        "√(E (π − μ)² − (E |π − μ|)²)",
        "probability",
        "verl rollout_probs_diff_std",
    ),
    Metric("tv_binary_max", "largest |π − μ|", "max |π − μ|", "probability", "verl rollout_probs_diff_max"),
    Metric("tv_signed_max", "largest π − μ", "max (π − μ)", "probability", f"{DPPO}, Fig. 3"),
    Metric("tv_signed_min", "smallest π − μ", "min (π − μ)", "probability", f"{DPPO}, Fig. 3"),
    Metric("ratio_mean", "mean ratio", "E r", "1", "NeMo-RL sampling_importance_ratio", agreement=1.0),
    Metric("ratio_p01", "p1 of the ratio", "1 % quantile of r", "1", _COMMON, agreement=1.0),
    Metric("ratio_p50", "median ratio", "50 % quantile of r", "1", _COMMON, agreement=1.0),
    Metric("ratio_p99", "p99 of the ratio", "99 % quantile of r", "1", _COMMON, agreement=1.0),
    Metric("ratio_min", "smallest ratio", "min r", "1", _COMMON, agreement=1.0),
    Metric("ratio_max", "largest ratio", "max r", "1", _COMMON, agreement=1.0),
    Metric("ratio_outside_0.8_1.25", "outside [0.8, 1.25]", "share with r < 0.8 or r > 1.25", "share", _COMMON),
    Metric(
        "ratio_outside_0.8_1.28",
        "outside [0.8, 1.28]",
        "share with r < 0.8 or r > 1.28",
        "share",
        f"{DPPO}, Clip-Higher",
    ),
    Metric("k1", "KL(μ‖π), k1", "E (−d)", "nats/token", f"{_SCHULMAN}; {_VERL} kl", signed=True),
    Metric("k2", "KL(μ‖π), k2", "E d²/2", "nats/token", _SCHULMAN),
    Metric(
        "k3", "KL(μ‖π), k3", "E (r − 1 − d)", "nats/token", f"{_SCHULMAN}; prime-rl mismatch_kl, NeMo-RL gen_kl_error"
    ),
    Metric("kl_reverse_k1", "KL(π‖μ), weighted", "E r·d", "nats/token", "importance weighting by r", signed=True),
    Metric("kl_reverse_k3", "KL(π‖μ), weighted, ≥ 0", "E (r·d − (r − 1))", "nats/token", "importance weighting by r"),
    Metric(
        "kl_binary_mean", "mean binary KL", "E [μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π))]", "nats", f"{DPPO}, eq. 14"
    ),
    Metric("kl_binary_max", "largest binary KL", "max of the binary KL", "nats", f"{DPPO}, eq. 14"),
    Metric(
        "tv_topk_mean",
        "mean top-K TV",
        "E ½ Σ |π − μ| over top-K ∪ sampled ∪ others",
        "probability",
        f"{DPPO}, eq. 15",
    ),
    Metric("tv_topk_max", "largest top-K TV", "max of the top-K TV", "probability", f"{DPPO}, eq. 15"),
    Metric("kl_topk_mean", "mean top-K KL", "E Σ μ log(μ/π) over top-K ∪ sampled ∪ others", "nats", f"{DPPO}, eq. 16"),
    Metric("kl_topk_max", "largest top-K KL", "max of the top-K KL", "nats", f"{DPPO}, eq. 16"),
    Metric("mult_prob_error", "mean exp |Δlog p|", "E exp |d|", "1", "NeMo-RL token_mult_prob_error", agreement=1.0),
    Metric(
        "pearson",
        "correlation of probabilities",
        "Pearson of (μ, π)",
        "1",
        "verl rollout_actor_probs_pearson_corr",
        agreement=1.0,
    ),
    Metric(
        "spearman",
        "rank correlation",
        "Spearman of (μ, π), mid-ranks, on at most 32,768 tokens",
        "1",
        _COMMON,
        agreement=1.0,
    ),
    Metric("chi2_token", "χ², token", "E r² − 1", "1", f"{_VERL} chi2_token", signed=True),
    Metric(
        "chi2_sequence", "χ², sequence", "E_y exp(2 Σd) − 1", "1", f"{_VERL} chi2_seq (without its clamp)", signed=True
    ),
    Metric(
        "ess_token",
        "effective sample size, token",
        "1 / E[(r / E r)²]",
        "share",
        f"{_VERL} eff_sample_size (not truncated)",
        agreement=1.0,
    ),
    Metric(
        "ess_sequence",
        "effective sample size, sequence",
        "1 / E_y[(w / E w)²], w = exp(Σd)",
        "share",
        "Kong (1992)",
        agreement=1.0,
    ),
    Metric("sequence_kl", "KL(μ‖π) of a response", "E_y (−Σd)", "nats/response", f"{_FP16}, Fig. 5", signed=True),
    Metric("sequence_d_sd", "spread of Σd", "standard deviation of Σd over responses", "nats", _COMMON),
    Metric(
        "sequence_slope",
        "Σd per 1000 tokens",
        "1000 · E_y[T Σd] / E_y[T²], a line through the origin",
        "nats/1000 tokens",
        f"{_FP16}, Fig. 5",
        signed=True,
    ),
    Metric(
        "entropy_mean",
        "mean entropy of π",
        "E −Σ π log π over the vocabulary",
        "nats",
        f"{DPPO}, Fig. 7",
        agreement=None,
    ),
    Metric("length_mean", "mean response length", "E_y T", "tokens", _COMMON, agreement=None),
    Metric(
        "truncated_share",
        "truncated responses",
        "share that ran into the length limit",
        "share",
        _COMMON,
        agreement=None,
    ),
    Metric("reward_mean", "mean reward", "E_y R", "reward", _COMMON, agreement=None),
    Metric(
        "equal_rewards_share",
        "groups without signal",
        "share of groups of ≥ 2 with all rewards equal",
        "share",
        "GRPO",
        agreement=None,
    ),
)
METRICS = {metric.key: metric for metric in CATALOG}

VOLATILITY: tuple[Metric, ...] = (
    Metric("ratio_sd", "spread of the ratio", "standard deviation of r in the bin of μ", "1", f"{DPPO}, Fig. 2"),
    Metric("ratio_p01", "p1 of the ratio", "1 % quantile of r in the bin of μ", "1", f"{DPPO}, Fig. 2"),
    Metric("ratio_p99", "p99 of the ratio", "99 % quantile of r in the bin of μ", "1", f"{DPPO}, Fig. 2"),
    Metric("ratio_max", "largest ratio", "max r in the bin of μ", "1", f"{DPPO}, Fig. 2"),
    Metric(
        "tv_binary_sd",
        "spread of |π − μ|",
        "standard deviation of |π − μ| in the bin of μ",
        "probability",
        f"{DPPO}, Fig. 2",
    ),
    Metric(
        "tv_binary_p01",
        "p1 of |π − μ|",
        "1 % quantile of |π − μ| in the bin of μ",
        "probability",
        f"{DPPO}, Fig. 2",
    ),
    Metric(
        "tv_binary_p99",
        "p99 of |π − μ|",
        "99 % quantile of |π − μ| in the bin of μ",
        "probability",
        f"{DPPO}, Fig. 2",
    ),
    Metric("tv_binary_max", "largest |π − μ|", "max |π − μ| in the bin of μ", "probability", f"{DPPO}, Fig. 2"),
    Metric(
        "tv_topk_sd",
        "spread of top-K TV",
        "standard deviation of top-K TV in the bin of μ",
        "probability",
        f"{DPPO}, Fig. 2",
    ),
    Metric(
        "tv_topk_p01",
        "p1 of top-K TV",
        "1 % quantile of top-K TV in the bin of μ",
        "probability",
        f"{DPPO}, Fig. 2",
    ),
    Metric(
        "tv_topk_p99",
        "p99 of top-K TV",
        "99 % quantile of top-K TV in the bin of μ",
        "probability",
        f"{DPPO}, Fig. 2",
    ),
    Metric("tv_topk_max", "largest top-K TV", "max of top-K TV in the bin of μ", "probability", f"{DPPO}, Fig. 2"),
)
