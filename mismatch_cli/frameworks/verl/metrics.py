"""verl: `training/rollout_probs_diff_*`, `rollout_corr/*`, and three metrics of the PPO update
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf, log

import numpy as np

from mismatch_cli.frameworks.dialects._metric import (
    ABS_DP,
    BLOCKED,
    CLAMPED_K3,
    ENGINE_GAP,
    PRODUCT_LESS_1,
    SQUARED_RATIO_LESS_1,
    UPDATE,
    AtTokens,
    FrameworkMetric,
    OfResponses,
    Quantity,
    Reduce,
    ResponseMeans,
    ResponseSums,
    Tokens,
    blocked,
    clamped_d,
    effective_share,
    largest,
    least,
    mean,
    perplexity_lines,
    population_sd,
    ratio_above,
    ratio_below,
    ratio_outside,
    sample_sd,
    sample_sd_or_0,
    weight,
    where_advantage,
)

WHEN = (
    "Logged if log-probs are recomputed before the update and the rollout's are kept "
    "(actor_rollout_ref.rollout.calculate_log_probs=True); bypass mode logs none of them. "
    "rollout_is_* need algorithm.rollout_correction.rollout_is: here its level token with the "
    "default threshold, 2.0 (TIS), and for rollout_is_oob_ratio the threshold of the preset "
    "decoupled_token_icepop. rollout_rs_* need rollout_rs: here the three options of verl's "
    "presets, each alone with its preset threshold; the other eight have no default."
)
_DEBUG = "verl/utils/debug/metrics.py"
_CORR = "verl/trainer/ppo/rollout_corr_helper.py"
_LOSS = "verl/trainer/ppo/core_algos.py"
_CAP = 2.0
_BOUND = "log r, and Σ log r of a response, clamped to ±20"
_TIS = "w = min(r, 2), log r clamped to ±20"
_IS = "rollout_corr/rollout_is_"
_RS = "rollout_corr/rollout_rs_"
_CLAMPED = "log r clamped to ±20"


def _weight_lines() -> Iterator[FrameworkMetric]:
    """What verl logs as rollout_is_seq_*: a response without a trained token enters with weight
    0.
    """

    def line(
        name: str, formula: str, measured: Quantity, reduce: Reduce = mean, note: str = _TIS
    ) -> FrameworkMetric:
        return FrameworkMetric(
            f"{_IS}seq_{name}", ENGINE_GAP, formula, _CORR, measured, reduce, note=note
        )

    means = ResponseMeans(weight(_CAP))
    raw = ResponseMeans(weight())
    yield line("mean", "E_y mean w", means)
    yield line("std", "standard deviation of mean w, ÷ (n − 1)", means, sample_sd_or_0)
    yield line("max", "max_y mean w", means, largest)
    yield line("min", "min_y mean w", means, least)
    yield line(
        "max_deviation",
        "max_y |mean w − 1|",
        OfResponses(lambda w_S: np.abs(w_S - 1), means),
        largest,
    )
    yield line(
        "fraction_high",
        "share of y with mean r > 2",
        OfResponses(lambda r_S: r_S > _CAP, raw),
        note=f"before truncation; {_CLAMPED}",
    )
    yield line(
        "fraction_low",
        "share of y with mean r < 1/2",
        OfResponses(lambda r_S: r_S < 1 / _CAP, raw),
        note=f"before truncation; {_CLAMPED}; includes fully masked responses",
    )


def _rejection_line(
    option: str, note: str, name: str, formula: str, measured: Quantity, reduce: Reduce = mean
) -> FrameworkMetric:
    return FrameworkMetric(
        f"{_RS}{option}_{name}",
        ENGINE_GAP,
        formula,
        _CORR,
        measured,
        reduce,
        note=note,
        topic="rollout_rs",
    )


def _rejection_lines(
    option: str, k: str, values: Quantity, low: float, high: float, note: str
) -> Iterator[FrameworkMetric]:
    """What verl logs for one option: k is its statistic of a response, which is rejected outside
    [low, high].
    """
    line = partial(_rejection_line, option, f"k = {k}, at each token of its response; {note}")
    above = OfResponses(lambda k_S: k_S > high, values)
    below = OfResponses(lambda k_S: k_S < low, values)
    rejected = OfResponses(lambda k_S: (k_S > high) | (k_S < low), values)
    clamped = AtTokens(OfResponses(lambda k_S: np.clip(k_S, low, high), values))
    yield line("mean", "E k", AtTokens(values))
    yield line("std", "√(E k² − (E k)²), k clamped to its thresholds", clamped, population_sd)
    yield line("masked_fraction", "share of tokens in rejected responses", AtTokens(rejected))
    yield line("seq_masked_fraction", "share of rejected responses", rejected)
    # verl logs these under both names, although each is over responses.
    for prefix in ("", "seq_"):
        yield line(f"{prefix}max", "max_y k", values, largest)
        yield line(f"{prefix}min", "min_y k", values, least)
        yield line(f"{prefix}fraction_high", f"share of responses with k > {high:.4g}", above)
        if low > -inf:
            yield line(f"{prefix}fraction_low", f"share of responses with k < {low:.4g}", below)
    yield line("seq_mean", "E_y k", values)
    yield line("seq_std", "standard deviation of k over y, ÷ (n − 1)", values, sample_sd_or_0)
    yield line("seq_max_deviation", "max_y |k|", OfResponses(np.abs, values), largest)


_MINUS_D = Tokens(lambda gaps: -clamped_d().column(gaps), logs=False)
_SUM_K1 = ResponseSums(_MINUS_D, include_empty=False)
_MEAN_K1 = ResponseMeans(_MINUS_D, include_empty=False)
_MEAN_K3 = ResponseMeans(CLAMPED_K3, include_empty=False)
_ALONE = "by any option; here only seq_mean_k1, as in decoupled_geo_rs"


def _geo_rejected(k_S: np.ndarray) -> np.ndarray:
    return (k_S < log(0.999)) | (k_S > log(1.001))


LINES = (
    FrameworkMetric(
        "training/rollout_probs_diff_mean",
        ENGINE_GAP,
        "E |π − μ|",
        _DEBUG,
        metric="tv_binary_mean",
        word="gap",
        note="compares probabilities, although verl's docstring says log-probs",
    ),
    FrameworkMetric(
        "training/rollout_probs_diff_max", ENGINE_GAP, "max |π − μ|", _DEBUG, ABS_DP, largest
    ),
    FrameworkMetric(
        "training/rollout_probs_diff_std",
        ENGINE_GAP,
        "standard deviation of |π − μ|, ÷ (n − 1)",
        _DEBUG,
        ABS_DP,
        sample_sd,
    ),
    FrameworkMetric(
        "training/rollout_actor_probs_pearson_corr",
        ENGINE_GAP,
        "Pearson of (π, μ)",
        _DEBUG,
        metric="pearson",
        note="of probabilities: it stays near 1 if tokens are nearly certain",
    ),
    FrameworkMetric("rollout_corr/kl", ENGINE_GAP, "E (−d)", _CORR, metric="k1", word="KL"),
    FrameworkMetric(
        "rollout_corr/k3_kl", ENGINE_GAP, "E (r − 1 − d)", _CORR, metric="k3", word="KL"
    ),
    *perplexity_lines("rollout_corr/", _CORR),
    FrameworkMetric(
        "rollout_corr/chi2_token",
        ENGINE_GAP,
        "E r² − 1",
        _CORR,
        SQUARED_RATIO_LESS_1,
        word="χ²",
        note=_BOUND,
    ),
    FrameworkMetric(
        "rollout_corr/chi2_seq",
        ENGINE_GAP,
        "E_y exp(2 Σd) − 1",
        _CORR,
        PRODUCT_LESS_1,
        word="χ²",
        note=_BOUND,
    ),
    FrameworkMetric(
        f"{_IS}mean",
        ENGINE_GAP,
        "E w",
        _CORR,
        weight(_CAP),
        word="importance ratio",
        note=f"{_TIS}; older versions show mean, max and min before truncation",
    ),
    FrameworkMetric(f"{_IS}max", ENGINE_GAP, "max w", _CORR, weight(_CAP), largest, note=_TIS),
    FrameworkMetric(f"{_IS}min", ENGINE_GAP, "min w", _CORR, weight(_CAP), least, note=_TIS),
    FrameworkMetric(
        f"{_IS}std", ENGINE_GAP, "√(E w² − (E w)²)", _CORR, weight(_CAP), population_sd, note=_TIS
    ),
    FrameworkMetric(
        f"{_IS}eff_sample_size",
        ENGINE_GAP,
        "1 / E[(w / E w)²]",
        _CORR,
        weight(_CAP),
        effective_share,
        word="ESS",
        note=f"{_TIS}; the truncation hides the tail; older versions also keep w at 1/2 or above",
    ),
    FrameworkMetric(
        f"{_IS}ratio_fraction_high", ENGINE_GAP, "share with r > 2", _CORR, ratio_above(_CAP), mean
    ),
    FrameworkMetric(
        f"{_IS}ratio_fraction_low",
        ENGINE_GAP,
        "share with r < 1/2",
        _CORR,
        ratio_below(1 / _CAP),
        mean,
    ),
    *_weight_lines(),
    FrameworkMetric(
        f"{_IS}batch_norm_factor",
        ENGINE_GAP,
        "E w",
        _CORR,
        weight(_CAP),
        note=f"{_TIS}; with rollout_is_batch_normalize, the divisor of the weights",
    ),
    FrameworkMetric(
        f"{_IS}oob_ratio",
        ENGINE_GAP,
        "share with r outside [0.5, 5]",
        _CORR,
        ratio_outside(0.5, 5),
        note="rollout_is_threshold 0.5_5.0, as in decoupled_token_icepop",
    ),
    *_rejection_lines(
        "seq_sum_k1", "Σ(−d)", _SUM_K1, log(0.5), log(2), f"as in decoupled_seq_is_rs; {_CLAMPED}"
    ),
    *_rejection_lines(
        "seq_mean_k1",
        "mean (−d)",
        _MEAN_K1,
        log(0.999),
        log(1.001),
        f"as in decoupled_geo_rs; {_CLAMPED}",
    ),
    FrameworkMetric(
        f"{_RS}masked_fraction",
        ENGINE_GAP,
        "share of tokens in rejected responses",
        _CORR,
        AtTokens(OfResponses(_geo_rejected, _MEAN_K1)),
        note=_ALONE,
        topic="rollout_rs",
    ),
    FrameworkMetric(
        f"{_RS}seq_masked_fraction",
        ENGINE_GAP,
        "share of rejected responses",
        _CORR,
        OfResponses(_geo_rejected, ResponseMeans(_MINUS_D)),
        note=f"{_ALONE}; a fully masked response counts as kept",
        topic="rollout_rs",
    ),
    *_rejection_lines(
        "seq_mean_k3",
        "mean (r − 1 − d)",
        _MEAN_K3,
        -inf,
        0.01,
        f"as in decoupled_k3_rs; {_CLAMPED}",
    ),
    FrameworkMetric(
        "actor/ppo_kl",
        UPDATE,
        "E (−d)",
        _LOSS,
        _MINUS_D,
        word="KL",
        note=(
            "d clamped to ±20; change by the update, not the engine gap; in bypass mode the "
            "reference is the rollout instead"
        ),
    ),
    FrameworkMetric(
        "actor/pg_clipfrac",
        UPDATE,
        f"share {BLOCKED}",
        _LOSS,
        blocked("ppo"),
        note="clip_ratio 0.2",
        needs=("advantage_T",),
    ),
    FrameworkMetric(
        "actor/pg_clipfrac_lower",
        UPDATE,
        "share with A < 0 and r > 3",
        _LOSS,
        where_advantage(ratio_above(3.0), -1),
        note="clip_ratio_c 3",
        needs=("advantage_T",),
    ),
)
