"""TRL: `sampling/sampling_logp_difference/*` and `sampling/importance_sampling_ratio/*` of
GRPOTrainer, and what its losses clip.
"""

from __future__ import annotations

from math import log

import numpy as np

from mismatch_cli.frameworks.dialects._clips import HIGH, LOW, cispo_line, clip_line, clip_means
from mismatch_cli.frameworks.dialects._metric import (
    ABS_D,
    BOUND,
    CURRENT,
    ENGINE_GAP,
    FALLS,
    RISES,
    FrameworkMetric,
    ResponseMeans,
    Tokens,
    advantages,
    included,
    largest,
    least,
    masked_product,
    mean,
)
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.rules.algorithms.table import TABLE

WHEN = (
    "sampling/* is logged if vllm_importance_sampling_correction is on, the default. The ratio is "
    "the factor that multiplies the loss: in the default mode, sequence_mask with cap 3.0, the "
    "ratio of a complete response, and 0 above the cap. clip_ratio/* is logged with the losses "
    "that clip, dapo (the default), grpo, bnpo, dr_grpo and luspo; cispo_clip_ratio with cispo and "
    "vespo/phi_seq_mean with vespo."
)
_FILE = "trl/trainer/grpo_trainer.py"
_CAP = 3.0
_LEAST = log(1e-8)  # vespo's lower clamp of log ratios
_RATIO = masked_product(_CAP)
_MASKED = "w; w = exp(Σd), 0 above 3"
_VESPO = TABLE["vespo"].weight[0].parameters
_LOW_MEAN, _HIGH_MEAN, _REGION_MEAN = clip_means(_FILE)


def _vespo_log_ratio(gaps: TokenGaps) -> np.ndarray:
    """Σ log r′ + Σ log min(ρ, 3) of each response, with TRL's clamps of tokens and of sums."""
    recomputed_N = gaps.column("logp_recomputed_T")
    assert recomputed_N is not None  # the line needs it
    with np.errstate(invalid="ignore"):
        update_N = np.clip(gaps.logp_N - recomputed_N, -BOUND, BOUND)
        gap_N = np.clip(recomputed_N - gaps.logq_N, _LEAST, log(_CAP))
    # NaN is the difference of two infinities: such a token has no ratio, and counts as unmoved.
    log_S = gaps.responses.sum(np.nan_to_num(update_N) + np.nan_to_num(gap_N))
    return np.clip(log_S, _LEAST, BOUND)


def _vespo_weight(gaps: TokenGaps) -> np.ndarray:
    """φ(w) = e^λ w^k e^(−λw) of each response, here exp(k log w − λ (w − 1)); 1 without a trained
    token.
    """
    log_S = _vespo_log_ratio(gaps)
    rises_S = Tokens(advantages, logs=False).response_means(gaps) >= 0
    k_S = np.where(rises_S, _VESPO["k_pos"], _VESPO["k_neg"])
    lambda_S = np.where(rises_S, _VESPO["lambda_pos"], _VESPO["lambda_neg"])
    weight_S: np.ndarray = np.exp(k_S * log_S - lambda_S * np.expm1(log_S))
    return weight_S[included(gaps)]


LINES = (
    FrameworkMetric(
        "sampling/sampling_logp_difference/mean",
        ENGINE_GAP,
        "E |d|",
        _FILE,
        metric="abs_d_mean",
        word="gap",
    ),
    FrameworkMetric(
        "sampling/sampling_logp_difference/max", ENGINE_GAP, "max |d|", _FILE, ABS_D, largest
    ),
    FrameworkMetric(
        "sampling/importance_sampling_ratio/min",
        ENGINE_GAP,
        f"min_y {_MASKED}",
        _FILE,
        _RATIO,
        least,
    ),
    FrameworkMetric(
        "sampling/importance_sampling_ratio/mean",
        ENGINE_GAP,
        f"E_y {_MASKED}",
        _FILE,
        _RATIO,
        mean,
        word="importance ratio",
        note="a product over the response: far from 1 for long ones, even for small gaps",
    ),
    FrameworkMetric(
        "sampling/importance_sampling_ratio/max",
        ENGINE_GAP,
        f"max_y {_MASKED}",
        _FILE,
        _RATIO,
        largest,
    ),
    _LOW_MEAN,
    clip_line(
        "low_min",
        f"min_y share with {FALLS}",
        _FILE,
        ResponseMeans(LOW, include_empty=False),
        least,
    ),
    _HIGH_MEAN,
    clip_line(
        "high_max",
        f"max_y share with {RISES}",
        _FILE,
        ResponseMeans(HIGH, include_empty=False),
        largest,
    ),
    _REGION_MEAN,
    cispo_line(
        _FILE, "epsilon_high 5, as TRL recommends for cispo: it is the cap itself, not 1 + epsilon"
    ),
    FrameworkMetric(
        "vespo/phi_seq_mean",
        CURRENT,
        "E_y φ(w), φ(w) = e^λ w^k e^(−λw), w = Π r′ · Π min(ρ, 3)",
        _FILE,
        _vespo_weight,
        note=(
            "r′ is trainer / recomputed and ρ recomputed / rollout; k = 2 and λ = 3 for A ≥ 0, "
            "k = 3 and λ = 2 otherwise; vllm_importance_sampling_mode token_truncate, cap 3"
        ),
        needs=("logp_recomputed_T", "advantage_T"),
    ),
)
