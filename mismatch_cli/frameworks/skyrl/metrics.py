"""SkyRL: `policy/rollout_train_logprobs_abs_diff_*`, before the update and in each of its
minibatches.
"""

from mismatch_cli.frameworks.dialects._line import (
    ABS_D,
    CURRENT,
    ENGINE_GAP,
    Line,
    largest,
    least,
    population_sd,
    sample_sd,
    weight,
)

WHEN = (
    "The first four are logged if log-probs are recomputed before the update; minibatch_* "
    "compare with the trainer in that minibatch; is_ratio_* need off_policy_correction."
)
_TRAINER = "skyrl/train/trainer.py"
_WORKER = "skyrl/backends/skyrl_train/workers/worker_utils.py"
_CORRECTION = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
_HELD = "log r clamped to ±20"
_PADDING = "the amount of padding, which it counts as zeros"
_BEFORE, _WITHIN = (
    "policy/rollout_train_logprobs_abs_diff",
    "policy/minibatch_rollout_logprobs_abs_diff",
)

LINES = (
    Line(f"{_BEFORE}_mean", ENGINE_GAP, "E |d|", _TRAINER, metric="abs_d_mean", word="gap"),
    Line(
        f"{_BEFORE}_std",
        ENGINE_GAP,
        "standard deviation of |d|, ÷ (n − 1)",
        _TRAINER,
        ABS_D,
        sample_sd,
    ),
    Line(f"{_BEFORE}_max", ENGINE_GAP, "max |d|", _TRAINER, ABS_D, largest),
    Line(f"{_BEFORE}_min", ENGINE_GAP, "min |d|", _TRAINER, ABS_D, least),
    Line(f"{_WITHIN}_mean", CURRENT, "E |d|", _WORKER, metric="abs_d_mean", word="gap"),
    Line(f"{_WITHIN}_std", CURRENT, "√(E d² − (E |d|)²)", _WORKER, ABS_D, population_sd),
    Line(f"{_WITHIN}_max", CURRENT, "max |d|", _WORKER, ABS_D, largest),
    Line(f"{_WITHIN}_min", CURRENT, "min |d|, or 0 if anything is masked", _WORKER, lacks=_PADDING),
    Line(
        "policy/is_ratio_mean",
        ENGINE_GAP,
        "E r",
        _CORRECTION,
        weight(),
        word="importance ratio",
        note=f"before truncation; {_HELD}",
    ),
    Line("policy/is_ratio_max", ENGINE_GAP, "max r", _CORRECTION, weight(), largest, note=_HELD),
    Line(
        "policy/is_ratio_std",
        ENGINE_GAP,
        "standard deviation of r and zeros",
        _CORRECTION,
        lacks=_PADDING,
    ),
    Line(
        "policy/is_ratio_min",
        ENGINE_GAP,
        "min r, or 0 if anything is masked",
        _CORRECTION,
        lacks=_PADDING,
    ),
)
