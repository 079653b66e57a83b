"""NeMo-RL: `train/token_mult_prob_error`, the KL errors, and what truncation and masks remove."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatch_cli.frameworks.dialects._metric import (
    ENGINE_GAP,
    FINITE_RATIO,
    JENSEN_SHANNON,
    MULT_ERROR,
    RATIO,
    REVERSED_K3,
    UPDATE,
    D,
    FrameworkMetric,
    Moments,
    OfResponses,
    ResponseMeans,
    Tokens,
    largest,
    least,
    mean,
    ratio_outside,
    total,
    weight,
    zeroed,
)
from mismatch_cli.metrics.gaps import TokenGaps

WHEN = (
    "Always logged, except is_oob_ratio, which needs truncated_importance_sampling_type: here "
    "each type in brackets, with the bounds of NVIDIA's configurations. The two KL errors follow "
    "reference_policy_kl_type: here its default, k3. *_after_mask and masked_* use "
    "seq_logprob_error_threshold 2, as in NVIDIA's recipes; it is off by default, and then "
    "nothing is masked."
)
_LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
_GRPO = "nemo_rl/algorithms/grpo.py"
_BY_RESPONSE = ResponseMeans(MULT_ERROR, include_empty=False)
_THRESHOLD = 2.0
_OOB = "train/is_oob_ratio"
_FINITE = "an infinite r counts as 0"
_CLAMPED = weight(1.2, 0.8)
_CLIP = "ratio_clip_min and ratio_clip_max 0.2"
_ABOVE = Tokens(lambda gaps: FINITE_RATIO.column(gaps) > 2, logs=False)
_NOTHING = "0 if all are masked"


def _error(gaps: TokenGaps) -> np.ndarray:
    """The mean of exp |d| over each response with tokens; infinite if π excludes one of them."""
    error_S = _BY_RESPONSE(gaps)
    supported_S, _ = gaps.length_and_d_sum
    length_S = gaps.responses.length_S
    # exp |d| has no value where π excludes a token, so the mean above left that token out.
    error_S[(supported_S < length_S)[length_S > 0]] = np.inf
    return error_S


def _error_up_to_threshold(gaps: TokenGaps) -> np.ndarray:
    error_S = _error(gaps)
    return error_S[error_S <= _THRESHOLD]


def _is_masked(gaps: TokenGaps) -> np.ndarray:
    return _error(gaps) > _THRESHOLD


def _masked_is_correct(gaps: TokenGaps) -> np.ndarray:
    assert gaps.batch.reward_S is not None  # the line needs it
    reward_S = gaps.batch.reward_S[gaps.first : gaps.last][gaps.responses.length_S > 0]
    masked_M = reward_S[_is_masked(gaps)]
    is_correct_M: np.ndarray = masked_M[~np.isnan(masked_M)] == 1  # a trace may lack rewards
    return is_correct_M


def _mean_is_outside(d_S: np.ndarray) -> np.ndarray:
    return (np.exp(d_S) < 0.999) | (np.exp(d_S) > 1.002)


def _after_mask_line(
    statistic: str, symbol: str, reduce: Callable[[Moments], float]
) -> FrameworkMetric:
    return FrameworkMetric(
        f"train/{statistic}_seq_mult_prob_error_after_mask",
        ENGINE_GAP,
        f"{symbol} mean exp |d|, of those up to 2",
        _GRPO,
        _error_up_to_threshold,
        reduce,
        note=_NOTHING,
        of_nothing=0.0,
    )


LINES = (
    FrameworkMetric(
        "train/token_mult_prob_error",
        ENGINE_GAP,
        "E exp |d|",
        _LOSS,
        metric="mult_prob_error",
        word="gap",
    ),
    FrameworkMetric(
        "train/gen_kl_error", ENGINE_GAP, "E (r − 1 − d)", _LOSS, metric="k3", word="KL"
    ),
    FrameworkMetric(
        "train/policy_kl_error",
        ENGINE_GAP,
        "E (1/r − 1 + d)",
        _LOSS,
        REVERSED_K3,
        word="KL",
        note=(
            "the reverse form, but on tokens that the rollout sampled: not an estimate of KL(π‖μ)"
        ),
    ),
    FrameworkMetric(
        "train/js_divergence_error",
        ENGINE_GAP,
        "E ½ [k(π/m) + k(μ/m)], k(x) = x − 1 − log x",
        _LOSS,
        JENSEN_SHANNON,
        word="KL",
        note="m = (π + μ)/2, of the sampled token only: an estimate, not a divergence",
    ),
    FrameworkMetric(
        "train/sampling_importance_ratio",
        ENGINE_GAP,
        "E r",
        _LOSS,
        FINITE_RATIO,
        word="importance ratio",
        note=(
            "as it enters the loss: if truncated_importance_sampling_ratio is set, truncated, "
            f"or 0 if filtered; here unset, the default; {_FINITE}"
        ),
    ),
    FrameworkMetric(f"{_OOB} (tis)", ENGINE_GAP, "share with r > 2", _LOSS, _ABOVE, note=_FINITE),
    FrameworkMetric(
        f"{_OOB} (icepop)",
        ENGINE_GAP,
        "share with r outside [0.5, 5]",
        _LOSS,
        ratio_outside(0.5, 5),
    ),
    FrameworkMetric(
        f"{_OOB} (seq-mask-tis)",
        ENGINE_GAP,
        "share of y, exp(mean d) not in [0.999, 1.002]",
        _LOSS,
        OfResponses(_mean_is_outside, ResponseMeans(zeroed(D), include_empty=False)),
        note="an infinite d counts as 0; the only is_oob_ratio over responses, here those with a "
        "trained token; NeMo-RL also counts one without, if its sample_mask is 1",
    ),
    FrameworkMetric(
        "train/max_seq_mult_prob_error",
        ENGINE_GAP,
        "max_y mean exp |d|",
        _GRPO,
        _BY_RESPONSE,
        largest,
    ),
    FrameworkMetric(
        "train/mean_seq_mult_prob_error", ENGINE_GAP, "E_y mean exp |d|", _GRPO, _BY_RESPONSE, mean
    ),
    FrameworkMetric(
        "train/min_seq_mult_prob_error",
        ENGINE_GAP,
        "min_y mean exp |d|",
        _GRPO,
        _error,
        least,
        note="infinite if π excludes a token",
    ),
    _after_mask_line("max", "max_y", largest),
    _after_mask_line("mean", "E_y", mean),
    _after_mask_line("min", "min_y", least),
    FrameworkMetric(
        "train/num_masked_seqs_by_logprob_error",
        ENGINE_GAP,
        "number of y with mean exp |d| > 2",
        _GRPO,
        _is_masked,
        total,
        note="over all responses of the traces; a step logs those of its batch",
    ),
    FrameworkMetric(
        "train/masked_correct_pct",
        ENGINE_GAP,
        "share with reward 1 of y, mean exp |d| > 2",
        _GRPO,
        _masked_is_correct,
        note="a fraction, not a percentage; 0 if none is masked",
        needs=("reward_S",),
        of_nothing=0.0,
    ),
    FrameworkMetric(
        "train/probs_ratio",
        UPDATE,
        "E r",
        _LOSS,
        metric="ratio_mean",
        word="importance ratio",
        note="change by the update, not the engine gap",
    ),
    FrameworkMetric("train/probs_ratio_min", UPDATE, "min r", _LOSS, RATIO, least),
    FrameworkMetric("train/probs_ratio_max", UPDATE, "max r", _LOSS, RATIO, largest),
    FrameworkMetric(
        "train/probs_ratio_clamped",
        UPDATE,
        "E min(max(r, 0.8), 1.2)",
        _LOSS,
        _CLAMPED,
        word="importance ratio",
        note=f"change by the update, not the engine gap; {_CLIP}",
    ),
    FrameworkMetric(
        "train/probs_ratio_clamped_min",
        UPDATE,
        "min of min(max(r, 0.8), 1.2)",
        _LOSS,
        _CLAMPED,
        least,
        note=_CLIP,
    ),
    FrameworkMetric(
        "train/probs_ratio_clamped_max",
        UPDATE,
        "max of min(max(r, 0.8), 1.2)",
        _LOSS,
        _CLAMPED,
        largest,
        note=_CLIP,
    ),
)
