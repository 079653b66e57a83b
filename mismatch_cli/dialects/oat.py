"""oat, and the same estimators in tinker-cookbook: `kl_sample_train_v1` and `_v2`."""

from mismatch_cli.dialects._line import ENGINE_GAP, MINUS_DP, UPDATE, D, Line, largest, least

WHEN = "Always logged. tinker-cookbook logs the first two as optim/kl_sample_train_v1 and _v2 (rl/metrics.py)."
_PPO = "oat/algorithms/ppo.py"
_SIGN = "signed, μ − π: the other way round than a gap of π over μ"

LINES = (
    Line("kl_sample_train_v1", ENGINE_GAP, "E (−d)", _PPO, metric="k1", word="KL"),
    Line("kl_sample_train_v2", ENGINE_GAP, "E d²/2", _PPO, metric="k2", word="KL"),
    Line("sampler_learner_prob_diff_max", ENGINE_GAP, "max (μ − π)", _PPO, MINUS_DP, largest, word="gap", note=_SIGN),
    Line("sampler_learner_prob_diff_min", ENGINE_GAP, "min (μ − π)", _PPO, MINUS_DP, least, word="gap", note=_SIGN),
    Line("logprobs_diff_max", UPDATE, "max d", _PPO, D, largest, note="what the update changed, not the engine gap"),
    Line("logprobs_diff_min", UPDATE, "min d", _PPO, D, least, note="what the update changed, not the engine gap"),
)  # fmt: skip
