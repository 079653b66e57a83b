"""OpenRLHF: `vllm_kl`, what its correction filters, and `ppo_kl` and `ppo_clip_ratio`."""

from mismatch_cli.frameworks.dialects._metric import (
    BLOCKED,
    ENGINE_GAP,
    UPDATE,
    FrameworkMetric,
    blocked,
    ratio_outside,
)

WHEN = (
    "vllm_kl and is_filter_ratio need the ppo loss and --algo.advantage.is_correction_level: here "
    "token, with the defaults of is_correction_gating, ratio, and of its threshold, 0.5 and 5. "
    "Until September 2026 the flag was is_correction_enable."
)
_LOSS = "openrlhf/models/loss.py"
_OF_UPDATE = "change by the update, not the engine gap"

LINES = (
    FrameworkMetric("vllm_kl", ENGINE_GAP, "E (−d)", _LOSS, metric="k1", word="KL"),
    FrameworkMetric(
        "is_filter_ratio",
        ENGINE_GAP,
        "share with r outside [0.5, 5]",
        _LOSS,
        ratio_outside(0.5, 5.0),
        note="dropped with is_correction_mode mask, the default, or clamped with clip",
    ),
    FrameworkMetric("ppo_kl", UPDATE, "E (−d)", _LOSS, metric="k1", word="KL", note=_OF_UPDATE),
    FrameworkMetric(
        "ppo_clip_ratio",
        UPDATE,
        f"share {BLOCKED}",
        _LOSS,
        blocked("ppo"),
        note="eps_clip 0.2",
        needs=("advantage_T",),
    ),
)
