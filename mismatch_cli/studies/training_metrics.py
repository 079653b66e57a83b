"""The words for every number of a training report."""

from __future__ import annotations

from mismatch_cli.metrics.catalog import Metric
from mismatch_cli.papers import DPPO

LAST, FIRST = 10, 5  # steps over which the end and the beginning of a run are averaged
NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s, A the advantage. At equal weights π is "
    "taken before the first update of the step; the weights of an update are those that it changes. A blocked token is "
    "one that the algorithm’s mask keeps out of the update. [low, high] after a mean over several seeds are the lowest "
    "and the highest of them."
)

_COMMON = "elementary"


def _metric(key: str, label: str, formula: str, unit: str, source: str) -> Metric:
    return Metric(key, label, formula, unit, source, agreement=None)


REWARD = _metric("reward", "final reward", f"mean reward of the batch, over the last {LAST} steps", "reward", _COMMON)
BEST = _metric("best", "best reward", f"the highest mean reward of {LAST} successive steps", "reward", _COMMON)
ACCURACY = _metric(
    "eval_accuracy", "final accuracy", "mean reward of the last evaluation (share of right answers by math-verify)",
    "share", _COMMON,
)  # fmt: skip
DP_FIRST = _metric(
    "abs_dp_first", f"mean |π − μ|, first {FIRST} steps",
    f"mean over tokens of |π − μ| at equal weights, over the first {FIRST} steps", "probability", f"{DPPO}, Fig. 3",
)  # fmt: skip
DP_LAST = _metric(
    "abs_dp_last", f"mean |π − μ|, last {LAST} steps",
    f"mean over tokens of |π − μ| at equal weights, over the last {LAST} steps", "probability", f"{DPPO}, Fig. 3",
)  # fmt: skip
BAD_OF_NEGATIVE = _metric(
    "bad_over_negative", "bad updates among tokens with A < 0",
    "number with A < 0 and μ − π ≥ 0.5 / number with A < 0, at the weights of each update, mean over steps", "share",
    f"{DPPO}, Fig. 5; its denominator is not stated",
)  # fmt: skip
BAD_OF_TOKENS = _metric(
    "bad_over_tokens", "bad updates among tokens with A ≠ 0",
    "number with A < 0 and μ − π ≥ 0.5 / number with A ≠ 0, at the weights of each update, mean over steps", "share",
    f"{DPPO}, Fig. 5; its denominator is not stated",
)  # fmt: skip
BLOCKED = _metric(
    "blocked", "blocked tokens", "blocked tokens / tokens with A ≠ 0, mean over steps", "share", f"{DPPO}, eq. 12"
)
BLOCKED_POSITIVE = _metric(
    "blocked_positive", "blocked where A > 0", "blocked tokens with A > 0 / tokens with A > 0, mean over steps",
    "share", f"{DPPO}, eq. 12",
)  # fmt: skip
BLOCKED_NEGATIVE = _metric(
    "blocked_negative", "blocked where A < 0", "blocked tokens with A < 0 / tokens with A < 0, mean over steps",
    "share", f"{DPPO}, eq. 12",
)  # fmt: skip
MU_BLOCKED = _metric(
    "mu_blocked", "mean μ of blocked tokens", "mean μ of blocked tokens, mean over steps", "probability",
    f"{DPPO}, Fig. 6",
)  # fmt: skip
ENTROPY_BLOCKED = _metric(
    "entropy_blocked", "mean entropy at blocked tokens",
    "mean of −Σ π log π over the vocabulary at blocked tokens, mean over steps", "nats", f"{DPPO}, Fig. 6",
)  # fmt: skip
ENTROPY = _metric(
    "entropy", "mean entropy", "mean of −Σ π log π over the vocabulary, over the last steps", "nats", f"{DPPO}, Fig. 7"
)
K3 = _metric(
    "k3", "KL(μ‖π) at the updates", f"mean of π/μ − 1 − log(π/μ) at the weights of each update, last {LAST} steps",
    "nats", "Schulman, Approximating KL divergence (2020)",
)  # fmt: skip
RATIO = _metric(
    "ratio", "π/μ, 1 % to 99 %", f"quantiles of π/μ over tokens, at the weights of each update, last {LAST} steps", "1",
    _COMMON,
)  # fmt: skip
GRAD_NORM = _metric(
    "grad_norm", "gradient norm", "norm of the gradient of an update, median over steps", "1", _COMMON
)  # fmt: skip
LENGTH = _metric("length", "response length", f"mean tokens of a response, last {LAST} steps", "tokens", _COMMON)
TRUNCATED = _metric(
    "truncated", "truncated", f"share of responses cut at the longest length, last {LAST} steps", "share", _COMMON
)
BACK_OFFS = _metric(
    "back_offs", "loss-scale back-offs", "how often the loss scale was lowered because a gradient overflowed", "1",
    _COMMON,
)  # fmt: skip
SYNC = _metric(
    "sync", "weight sync", "steps at which the engine was shown to sample with the new weights / steps", "1", _COMMON
)
SECONDS = _metric("seconds", "time of a step", "sum over its phases, mean over steps", "s", _COMMON)

CATALOG = (
    REWARD, BEST, ACCURACY, DP_FIRST, DP_LAST, BAD_OF_NEGATIVE, BAD_OF_TOKENS, BLOCKED, BLOCKED_POSITIVE,
    BLOCKED_NEGATIVE, MU_BLOCKED, ENTROPY_BLOCKED, ENTROPY, K3, RATIO, GRAD_NORM, LENGTH, TRUNCATED, BACK_OFFS, SYNC,
    SECONDS,
)  # fmt: skip
