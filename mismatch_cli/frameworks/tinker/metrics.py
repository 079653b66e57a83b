"""tinker-cookbook: `optim/kl_sample_train_v1` and `_v2`, and the same for the change by an
update.
"""

from mismatch_cli.frameworks.dialects._metric import CURRENT, MINUS_LOG_Q, FrameworkMetric

WHEN = (
    "The first three are always logged, against the log-probs that the training step returns, at "
    "the weights it starts from. kl_pre_post_* need compute_post_kl."
)
_METRICS = "tinker_cookbook/rl/metrics.py"
_RESAMPLED = "the sampler's log-probs of the same tokens after the update"

LINES = (
    FrameworkMetric(
        "optim/kl_sample_train_v1", CURRENT, "E (−d)", _METRICS, metric="k1", word="KL"
    ),
    FrameworkMetric(
        "optim/kl_sample_train_v2", CURRENT, "E d²/2", _METRICS, metric="k2", word="KL"
    ),
    FrameworkMetric(
        "optim/entropy",
        CURRENT,
        "E (−log μ)",
        _METRICS,
        MINUS_LOG_Q,
        note="of the rollout, on its sampled tokens; not the trainer's entropy",
    ),
    FrameworkMetric(
        "kl_pre_post_v1",
        CURRENT,
        "E (log μ − log μ after the update)",
        _METRICS,
        lacks=_RESAMPLED,
        word="KL",
    ),
    FrameworkMetric(
        "kl_pre_post_v2",
        CURRENT,
        "E (log μ − log μ after the update)²/2",
        _METRICS,
        lacks=_RESAMPLED,
        word="KL",
    ),
)
