"""verl: `training/rollout_probs_diff_*`, `rollout_corr/*`, and the two that PPO has of its own update."""

from mismatch_cli.dialects._line import (
    ABS_DP,
    ENGINE_GAP,
    PRODUCT_LESS_1,
    SQUARED_RATIO_LESS_1,
    UPDATE,
    Line,
    blocked,
    effective_share,
    largest,
    least,
    mean,
    perplexity_lines,
    population_sd,
    ratio_above,
    ratio_below,
    sample_sd,
    weight,
)

WHEN = (
    "Logged when log-probs are recomputed before the update and the rollout's are kept "
    "(actor_rollout_ref.rollout.calculate_log_probs=True); bypass mode logs none of them. rollout_is_* need "
    "algorithm.rollout_correction.rollout_is: here its level token with the default threshold, 2.0 (TIS)."
)
_DEBUG = "verl/utils/debug/metrics.py"
_CORR = "verl/trainer/ppo/rollout_corr_helper.py"
_LOSS = "verl/trainer/ppo/core_algos.py"
_CAP = 2.0
_BOUND = "log r, and Σ log r of a response, held at ±20"
_TIS = "w = min(r, 2), log r held at ±20"
_IS = "rollout_corr/rollout_is_"

LINES = (
    Line("training/rollout_probs_diff_mean", ENGINE_GAP, "E |π − μ|", _DEBUG, metric="tv_binary_mean", word="gap",
         note="of probabilities, though the docstring in verl says log-probs"),
    Line("training/rollout_probs_diff_max", ENGINE_GAP, "max |π − μ|", _DEBUG, ABS_DP, largest),
    Line("training/rollout_probs_diff_std", ENGINE_GAP, "standard deviation of |π − μ|, ÷ (n − 1)", _DEBUG, ABS_DP,
         sample_sd),
    Line("training/rollout_actor_probs_pearson_corr", ENGINE_GAP, "Pearson of (π, μ)", _DEBUG, metric="pearson",
         note="of probabilities: it stays near 1 where tokens are nearly certain"),
    Line("rollout_corr/kl", ENGINE_GAP, "E (−d)", _CORR, metric="k1", word="KL"),
    Line("rollout_corr/k3_kl", ENGINE_GAP, "E (r − 1 − d)", _CORR, metric="k3", word="KL"),
    *perplexity_lines("rollout_corr/", _CORR),
    Line("rollout_corr/chi2_token", ENGINE_GAP, "E r² − 1", _CORR, SQUARED_RATIO_LESS_1, word="χ²", note=_BOUND),
    Line("rollout_corr/chi2_seq", ENGINE_GAP, "E_y exp(2 Σd) − 1", _CORR, PRODUCT_LESS_1, word="χ²", note=_BOUND),
    Line(f"{_IS}mean", ENGINE_GAP, "E w", _CORR, weight(_CAP), word="importance ratio",
         note=f"{_TIS}; older versions show mean, max and min before truncation"),
    Line(f"{_IS}max", ENGINE_GAP, "max w", _CORR, weight(_CAP), largest, note=_TIS),
    Line(f"{_IS}min", ENGINE_GAP, "min w", _CORR, weight(_CAP), least, note=_TIS),
    Line(f"{_IS}std", ENGINE_GAP, "√(E w² − (E w)²)", _CORR, weight(_CAP), population_sd, note=_TIS),
    Line(f"{_IS}eff_sample_size", ENGINE_GAP, "1 / E[(w / E w)²]", _CORR, weight(_CAP), effective_share, word="ESS",
         note=f"{_TIS}; the truncation hides the tail; older versions also hold w at 1/2 or above"),
    Line(f"{_IS}ratio_fraction_high", ENGINE_GAP, "share with r > 2", _CORR, ratio_above(_CAP), mean),
    Line(f"{_IS}ratio_fraction_low", ENGINE_GAP, "share with r < 1/2", _CORR, ratio_below(1 / _CAP), mean),
    Line("actor/ppo_kl", UPDATE, "E (−d)", _LOSS, metric="k1", word="KL",
         note="what the update changed, not the engine gap; in bypass mode the reference is the rollout instead"),
    Line("actor/pg_clipfrac", UPDATE, "share blocked: A > 0 and r > 1.2, or A < 0 and r < 0.8", _LOSS, blocked("ppo"),
         note="clip_ratio 0.2", needs=("advantage_T",)),
)  # fmt: skip
