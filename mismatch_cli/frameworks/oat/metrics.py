"""oat: `kl_sample_train_v1` and `_v2`, and extremes of signed differences, in which masked
positions count as 0.
"""

from mismatch_cli.frameworks.dialects._metric import (
    ENGINE_GAP,
    MINUS_DP,
    UPDATE,
    D,
    FrameworkMetric,
    Moments,
)

WHEN = (
    "Logged unless reinforce_update is on. Prompts and padding enter the extremes as 0, so no "
    "maximum is below 0 and no minimum above."
)
_PPO = "oat/algorithms/ppo.py"
_OF_UPDATE = "change by the update, not the engine gap"
_SIGN = "signed, μ − π: the opposite of π − μ"


def _at_least_0(moments: Moments) -> float:
    return max(moments.largest, 0.0)


def _at_most_0(moments: Moments) -> float:
    return min(moments.least, 0.0)


LINES = (
    FrameworkMetric("kl_sample_train_v1", ENGINE_GAP, "E (−d)", _PPO, metric="k1", word="KL"),
    FrameworkMetric("kl_sample_train_v2", ENGINE_GAP, "E d²/2", _PPO, metric="k2", word="KL"),
    FrameworkMetric(
        "sampler_learner_prob_diff_max",
        ENGINE_GAP,
        "max (μ − π)",
        _PPO,
        MINUS_DP,
        _at_least_0,
        word="gap",
        note=_SIGN,
    ),
    FrameworkMetric(
        "sampler_learner_prob_diff_min",
        ENGINE_GAP,
        "min (μ − π)",
        _PPO,
        MINUS_DP,
        _at_most_0,
        word="gap",
        note=_SIGN,
    ),
    FrameworkMetric("logprobs_diff_max", UPDATE, "max d", _PPO, D, _at_least_0, note=_OF_UPDATE),
    FrameworkMetric("logprobs_diff_min", UPDATE, "min d", _PPO, D, _at_most_0, note=_OF_UPDATE),
)
