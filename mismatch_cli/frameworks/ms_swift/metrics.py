"""ms-swift: `rollout_correction/*`, verl's metrics with a geometric ratio per response, and TRL's
`clip_ratio/*`.
"""

from __future__ import annotations

from mismatch_cli.frameworks.dialects._clips import cispo_line, clip_means
from mismatch_cli.frameworks.dialects._metric import (
    CAPPED_K3,
    ENGINE_GAP,
    GEOMETRIC_LESS_1,
    SQUARED_RATIO_LESS_1,
    UPDATE,
    FrameworkMetric,
    effective_share,
    perplexity_lines,
    ratio_above,
    weight,
)

WHEN = (
    "rollout_correction/* is logged with --log_rollout_offpolicy_metrics true; is_weight_mean, ess "
    "and clipped_frac need rollout_importance_sampling_mode: here token_truncate with the default "
    "rollout_importance_sampling_threshold, 2.0. clip_ratio/* is logged with the losses that "
    "clip, grpo (the default), bnpo, dr_grpo, dapo and fipo; cispo_clip_ratio with cispo."
)
_FILE = "swift/rlhf_trainers/grpo_trainer.py"
_CAP = 2.0
_PREFIX = "rollout_correction/"
_RANKS = "which responses were in each rank's micro-batch"
_BOUND = "log r, or its mean over a response, clamped to ±20"


LINES = (
    FrameworkMetric(f"{_PREFIX}kl", ENGINE_GAP, "E (−d)", _FILE, metric="k1", word="KL"),
    FrameworkMetric(
        f"{_PREFIX}k3_kl",
        ENGINE_GAP,
        "E (r − 1 − d)",
        _FILE,
        CAPPED_K3,
        word="KL",
        note="d clamped to ±20, then each term at ±10",
    ),
    *perplexity_lines(_PREFIX, _FILE),
    FrameworkMetric(
        f"{_PREFIX}chi2_token",
        ENGINE_GAP,
        "E r² − 1",
        _FILE,
        SQUARED_RATIO_LESS_1,
        word="χ²",
        note=_BOUND,
    ),
    FrameworkMetric(
        f"{_PREFIX}chi2_seq",
        ENGINE_GAP,
        "E_y exp(2 mean d) − 1",
        _FILE,
        GEOMETRIC_LESS_1,
        word="χ²",
        note=f"a geometric mean instead of verl's product; {_BOUND}",
    ),
    FrameworkMetric(
        f"{_PREFIX}is_weight_mean",
        ENGINE_GAP,
        "E min(r, 2)",
        _FILE,
        weight(_CAP),
        word="importance ratio",
    ),
    FrameworkMetric(
        f"{_PREFIX}ess",
        ENGINE_GAP,
        "1 / E[(w / E w)²]",
        _FILE,
        weight(_CAP, 1 / _CAP),
        effective_share,
        word="ESS",
        note="w = r clamped to [1/2, 2]",
    ),
    FrameworkMetric(
        f"{_PREFIX}clipped_frac", ENGINE_GAP, "share with r > 2", _FILE, ratio_above(_CAP)
    ),
    *clip_means(_FILE),
    FrameworkMetric(
        "clip_ratio/low_min", UPDATE, "min of low_mean over ranks", _FILE, lacks=_RANKS
    ),
    FrameworkMetric(
        "clip_ratio/high_max", UPDATE, "max of high_mean over ranks", _FILE, lacks=_RANKS
    ),
    cispo_line(_FILE, "epsilon_high 5; it is the cap itself, not 1 + epsilon"),
)
