"""NeMo-RL: `train/token_mult_prob_error` and the KL errors."""

from mismatch_cli.dialects._line import (
    ENGINE_GAP,
    JENSEN_SHANNON,
    MULT_ERROR,
    RATIO,
    REVERSED_K3,
    UPDATE,
    Line,
    ResponseMeans,
    largest,
    least,
    mean,
)

WHEN = "Always logged. The two KL errors follow reference_policy_kl_type: here its default, k3."
_LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
_GRPO = "nemo_rl/algorithms/grpo.py"
_BY_RESPONSE = ResponseMeans(MULT_ERROR, empty_stand=False)

LINES = (
    Line("train/token_mult_prob_error", ENGINE_GAP, "E exp |d|", _LOSS, metric="mult_prob_error", word="gap"),
    Line("train/gen_kl_error", ENGINE_GAP, "E (r − 1 − d)", _LOSS, metric="k3", word="KL"),
    Line("train/policy_kl_error", ENGINE_GAP, "E (1/r − 1 + d)", _LOSS, REVERSED_K3, word="KL",
         note="the other direction by its form, but still on tokens that the rollout sampled: no estimate of KL(π‖μ)"),
    Line("train/js_divergence_error", ENGINE_GAP, "E ½ [k(π/m) + k(μ/m)], k(x) = x − 1 − log x", _LOSS,
         JENSEN_SHANNON, word="KL", note="m = (π + μ)/2, of the sampled token alone: an estimate, not a divergence"),
    Line("train/sampling_importance_ratio", ENGINE_GAP, "E r", _LOSS, metric="ratio_mean", word="importance ratio",
         note="before any truncation"),
    Line("train/max_seq_mult_prob_error", ENGINE_GAP, "max_y mean exp |d|", _GRPO, _BY_RESPONSE, largest),
    Line("train/mean_seq_mult_prob_error", ENGINE_GAP, "E_y mean exp |d|", _GRPO, _BY_RESPONSE, mean),
    Line("train/min_seq_mult_prob_error", ENGINE_GAP, "min_y mean exp |d|", _GRPO, _BY_RESPONSE, least),
    Line("train/probs_ratio", UPDATE, "E r", _LOSS, metric="ratio_mean", word="importance ratio",
         note="what the update changed, not the engine gap"),
    Line("train/probs_ratio_min", UPDATE, "min r", _LOSS, RATIO, least),
    Line("train/probs_ratio_max", UPDATE, "max r", _LOSS, RATIO, largest),
)  # fmt: skip
