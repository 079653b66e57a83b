"""miles: slime's metrics with finite values for every token, k3 of the gap, and the sample size
of the update.
"""

from __future__ import annotations

import numpy as np

from mismatch_cli.frameworks.dialects._metric import (
    ABS_D,
    ABS_RATIO_LESS_1,
    BLOCKED,
    BOUND,
    CAPPED_K3,
    ENGINE_GAP,
    MINUS_D,
    RATIO,
    UPDATE,
    ZEROED_RATIO,
    FrameworkMetric,
    ResponseMeans,
    ResponseSums,
    Tokens,
    blocked,
    included,
    ratio_above,
    zeroed,
)
from mismatch_cli.frameworks.dialects._mis import mis_lines, opsm_line
from mismatch_cli.metrics.gaps import TokenGaps

WHEN = (
    "The first five are always logged; opsm_clipfrac needs --use-opsm, ois and tis* need --use-tis "
    "or --get-mismatch-metrics, mis_* also need "
    "examples/infra_features/train_infer_mismatch_helper/mis.py as the TIS function: here with "
    "the settings of its mis.yaml. With --use-rollout-logprobs the first two compare the rollout "
    "with itself and are 0. Every number is a mean over responses of means over their tokens; "
    "with --calculate-per-token-loss miles averages over tokens instead."
)
_LOSS = "miles/backends/training_utils/loss_hub/losses.py"
_MATH = "miles/backends/training_utils/loss_hub/math_utils.py"
_TIS = "miles/backends/training_utils/loss_hub/corrections.py"
_MIS = "examples/infra_features/train_infer_mismatch_helper/mis.py"
_ZEROED = "an infinite d counts as 0"
_OF_UPDATE = "change by the update, not the engine gap"


def _blocked_in_support(gaps: TokenGaps) -> np.ndarray:
    """Whether PPO blocks a token; a token that π excludes has d = 0 here, so there is no change
    to block.
    """
    blocked_N = blocked("ppo").column(gaps)
    if gaps.out_of_support_N is None:
        return blocked_N
    return blocked_N & ~gaps.out_of_support_N


_WEIGHT = Tokens(
    lambda gaps: np.exp(np.clip(gaps.d_N, -BOUND, BOUND).astype(np.float64)), logs=False
)
_WEIGHT_2 = Tokens(lambda gaps: np.square(_WEIGHT.column(gaps)), logs=False)


def _effective_share(gaps: TokenGaps) -> np.ndarray:
    """(Σw)² / (|y| Σw²) for each response; 0 without tokens."""
    length_S = np.maximum(gaps.responses.length_S[included(gaps)], 1)
    squares_S = np.maximum(ResponseSums(_WEIGHT_2)(gaps), 1e-8)
    share_S: np.ndarray = np.square(ResponseSums(_WEIGHT)(gaps)) / (length_S * squares_S)
    return share_S


LINES = (
    FrameworkMetric(
        "train/train_rollout_logprob_abs_diff",
        ENGINE_GAP,
        "E_y mean |d|",
        _LOSS,
        ResponseMeans(zeroed(ABS_D)),
        word="gap",
        note=f"a short response weighs as much as a long one; {_ZEROED}",
    ),
    FrameworkMetric(
        "train/train_rollout_kl",
        ENGINE_GAP,
        "E_y mean (r − 1 − d)",
        _LOSS,
        ResponseMeans(CAPPED_K3),
        word="KL",
        note="d clamped to ±20, then each term at ±10",
    ),
    FrameworkMetric(
        "train/ppo_kl",
        UPDATE,
        "E_y mean (−d)",
        _LOSS,
        ResponseMeans(zeroed(MINUS_D)),
        word="KL",
        note=f"{_OF_UPDATE}; {_ZEROED}",
    ),
    FrameworkMetric(
        "train/pg_clipfrac",
        UPDATE,
        f"E_y share {BLOCKED}",
        _MATH,
        ResponseMeans(Tokens(_blocked_in_support, logs=False)),
        note="eps_clip and eps_clip_high 0.2",
        needs=("advantage_T",),
    ),
    FrameworkMetric(
        "train/ess_ratio",
        UPDATE,
        "E_y (Σw)² / (|y| Σw²)",
        _MATH,
        _effective_share,
        word="ESS",
        note=f"w = r with log r clamped to ±20, over the tokens of one response; {_OF_UPDATE}",
    ),
    opsm_line(_MATH),
    FrameworkMetric(
        "train/ois",
        UPDATE,
        "E_y mean r",
        _LOSS,
        ResponseMeans(ZEROED_RATIO),
        word="importance ratio",
        note=f"{_OF_UPDATE}; {_ZEROED}",
    ),
    FrameworkMetric(
        "train/tis",
        ENGINE_GAP,
        "E_y mean r",
        _TIS,
        ResponseMeans(RATIO),
        word="importance ratio",
        note="before truncation",
    ),
    FrameworkMetric(
        "train/tis_abs", ENGINE_GAP, "E_y mean |r − 1|", _TIS, ResponseMeans(ABS_RATIO_LESS_1)
    ),
    FrameworkMetric(
        "train/tis_clipfrac",
        ENGINE_GAP,
        "E_y share with r > 2",
        _TIS,
        ResponseMeans(ratio_above(2.0)),
        note="tis_clip_low 0, tis_clip 2",
    ),
    *mis_lines(_MIS),
)
