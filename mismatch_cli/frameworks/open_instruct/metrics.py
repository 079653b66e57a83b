"""open-instruct: `debug/vllm_vs_local_logprob_diff_*`, `debug/vllm_local_reverse_kl` and
`val/rho_*`; `val/ratio` and `policy/clipfrac_avg` of the update.
"""

from mismatch_cli.frameworks.dialects._metric import (
    ABS_D,
    CURRENT,
    ENGINE_GAP,
    TWICE_WEIGHTED,
    UPDATE,
    FrameworkMetric,
    blocked,
    largest,
    ratio_above,
    sample_sd_or_0,
    weight,
)

WHEN = (
    "debug/*, val/ratio and policy/clipfrac_avg are always logged: debug/* compares the rollout "
    "with the policy being trained in that minibatch; val/rho_*, with use_rho_correction, the "
    "default, with the trainer before the update: here with rho_clamp_upper_bound 2."
)
_FILE = "open_instruct/grpo_utils.py"
_DROPS = "rho_mask_lower_bound or rho_mask_upper_bound, off by default: the dashboard then shows 0"
_DIFF = "debug/vllm_vs_local_logprob_diff"

LINES = (
    FrameworkMetric(f"{_DIFF}_mean", CURRENT, "E |d|", _FILE, metric="abs_d_mean", word="gap"),
    FrameworkMetric(f"{_DIFF}_max", CURRENT, "max |d|", _FILE, ABS_D, largest),
    FrameworkMetric(
        f"{_DIFF}_std",
        CURRENT,
        "standard deviation of |d|, ÷ (n − 1)",
        _FILE,
        ABS_D,
        sample_sd_or_0,
    ),
    FrameworkMetric(
        "debug/vllm_local_reverse_kl",
        CURRENT,
        "E μ·(−d)",
        _FILE,
        TWICE_WEIGHTED,
        word="KL",
        note=(
            "already sampled by μ, so μ counts twice: not a KL estimate; versions without the "
            "weight show E (−d)"
        ),
    ),
    FrameworkMetric(
        "val/rho_weight",
        ENGINE_GAP,
        "E min(r, 2)",
        _FILE,
        weight(2.0, bound=10.0),
        word="importance ratio",
        note="after truncation; log r clamped to ±10",
    ),
    FrameworkMetric("val/rho_clipfrac", ENGINE_GAP, "share with r > 2", _FILE, ratio_above(2.0)),
    *(
        FrameworkMetric(
            f"val/rho_{which}_frac",
            ENGINE_GAP,
            "share with r outside the mask's bounds",
            _FILE,
            lacks=_DROPS,
        )
        for which in ("drop", "drop_low", "drop_high")
    ),
    FrameworkMetric(
        "val/ratio",
        UPDATE,
        "E r",
        _FILE,
        metric="ratio_mean",
        word="importance ratio",
        note="change by the update, not the engine gap",
    ),
    FrameworkMetric(
        "policy/clipfrac_avg",
        UPDATE,
        "share blocked: A > 0 and r > 1.272, or A < 0 and r < 0.8",
        _FILE,
        blocked("ppo:ratio_low=0.2,ratio_high=0.272"),
        note="loss_fn dapo, clip_lower 0.2, clip_higher 0.272",
        needs=("advantage_T",),
    ),
)
