"""The table of metrics of updates: what masks block and remove, and how a training run went.

A number for one sign or step uses the text of the number over all of them; whatever shows it says
which it is. The pages of `clipstats` and `train` explain the notation.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mismatch_cli import DPPO
from mismatch_cli.metrics.clipping.blocked_rows import ClippingNumbers
from mismatch_cli.metrics.gap_table import Metric, table

LAST, FIRST = 10, 5  # steps over which the end and the beginning of a run are averaged
_COMMON = "elementary"
_row = partial(Metric, agreement=None)

# fmt: off
THEORY = table(
    _row("surrogate", "surrogate L′", "mean over responses of R Σ (r − 1)", "reward",
         f"{DPPO}, eq. 5"),
    _row("correction", "correction Δ", "mean of R Σ (r_t − 1)(1 − Π_{j>t} r_j)", "reward",
         f"{DPPO}, eq. 6"),
    _row("difference", "difference L′ − Δ", "mean of R (Π r − 1)", "reward", f"{DPPO}, eq. 6"),
    _row("quadratic_bound", "quadratic bound",
         "L′ − 2 ξ T(T − 1) D_max²",
         "reward", f"{DPPO}, eq. 7"),
    _row("linear_bound", "linear bound", "L′ − 2 ξ · mean of Σ |r − 1|", "reward",
         f"{DPPO}, eq. 8"),
    _row("composite_bound", "composite bound",
         "L′ − min(2 ξ T(T − 1) D_max², 2 ξ · mean of Σ |r − 1|): the higher of both",
         "reward", f"{DPPO}, App. B.3"),
    _row("pinsker_bound", "quadratic bound by KL",
         "L′ − 2 ξ T(T − 1) min(1, KL_max / 2), as D_max² ≤ KL_max / 2",
         "reward", f"{DPPO}, eq. 7, with Pinsker’s inequality"),
    _row("xi", "ξ", "max |R|", "reward", f"{DPPO}, eq. 7"),
    _row("longest", "longest response T", "max T", "tokens", f"{DPPO}, eq. 7"),
    _row("tv_max", "largest TV",
         "D_max: of the full TV if the trace has it, else of |π − μ|, which is smaller",
         "probability", f"{DPPO}, eq. 7"),
    _row("kl_max", "largest KL",
         "KL_max: of the full KL(μ‖π) if the trace has it, else of the binary KL, which is smaller",
         "nats", f"{DPPO}, eq. 14"),
    _row("tv_of_kl", "largest TV by KL",
         "min(1, √(KL_max / 2)), the largest TV that this KL allows",
         "probability", "Pinsker’s inequality, Csiszár (1967)"),
    _row("tv_sum", "mean summed TV", "mean over responses of Σ |r − 1| / 2", "probability",
         f"{DPPO}, eq. 11"),
    _row("ess", "effective sample size", "1 / mean of (w / mean w)², w = Π r", "share",
         "Kong (1992)"),
    _row("weight_max", "largest weight", "max Π r", "1", _COMMON),
)

CLIPPING = table(
    _row("blocked", "blocked tokens", "Σ (1 − keep) / Σ 1", "share",
         f"{DPPO}, eq. 12; verl pg_clipfrac, with A = 0 left out"),
    _row("lost", "lost update",
         "1 − Σ keep·weight·|A| / Σ r·|A|; † where the weight is not r: Σ (1 − keep)·|A| / Σ |A|",
         "share",
         f"weights of {DPPO}, eq. 23; not the norm of a gradient"),
    _row("masked", "lost update, by the mask",
         "Σ (1 − keep)·r·|A| / Σ r·|A|; † Σ (1 − keep)·|A| / Σ |A|", "share",
         f"{DPPO}, eq. 23"),
    _row("capped", "lost update, by the cap", "Σ keep·(r − weight)·|A| / Σ r·|A|", "share",
         f"{DPPO}, eq. 23"),
    _row("blocked_rare", "blocked where A > 0, μ < 0.1",
         "blocked tokens with A > 0 and μ < 0.1 / tokens with A > 0 and μ < 0.1", "share",
         f"{DPPO}, Fig. 6, where α = 0.1"),
    _row("responses_touched", "responses hit",
         "share of responses with a judged token that have a blocked one",
         "share", _COMMON),
    _row("mu_blocked", "mean μ of blocked tokens", "mean μ where keep = 0", "probability",
         f"{DPPO}, Fig. 6"),
    _row("mu_kept", "mean μ of kept tokens", "mean μ where keep = 1", "probability",
         f"cf. {DPPO}, Fig. 6"),
    _row("entropy_blocked", "mean entropy at blocked tokens",
         "mean of −Σ π log π over the vocabulary, where keep = 0",
         "nats", f"{DPPO}, Fig. 6"),
    _row("entropy_kept", "mean entropy at kept tokens",
         "mean of −Σ π log π over the vocabulary, where keep = 1",
         "nats", f"cf. {DPPO}, Fig. 6"),
    _row("jaccard", "Jaccard index", "tokens that both block / tokens that at least one blocks",
         "1",
         "Jaccard (1901)"),
    _row("both", "blocked by both", "number of tokens that both block", "tokens", _COMMON),
    _row("only_row", "blocked by one only", "number of tokens that one blocks and the other keeps",
         "tokens", _COMMON),
    _row("blocked_tokens", "times blocked", "how often the token is blocked with that sign of A",
         "tokens",
         f"{DPPO}, App. D"),
    _row("rate", "blocked rate", "times blocked / occurrences with that sign of A", "share",
         _COMMON),
    _row("lift", "× over-represented",
         "its blocked rate / the blocked rate of all tokens with that sign of A", "1",
         _COMMON),
    _row("mu", "mean μ", "mean μ over its blocked occurrences", "probability", _COMMON),
    _row("pi", "mean π", "mean π over its blocked occurrences", "probability", _COMMON),
    _row("ratio", "mean ratio", "mean r over its blocked occurrences", "1", _COMMON),
    _row("bad", "bad updates", "number of tokens with A < 0 and μ − π ≥ δ", "tokens",
         f"{DPPO}, Fig. 5"),
    _row("over_tokens", "bad updates among tokens with A ≠ 0",
         "number with A < 0 and μ − π ≥ δ / number with A ≠ 0",
         "share",
         f"{DPPO}, Fig. 5; its denominator is not stated; "
         "Stable-RL's clip fractions use this one"),
    _row("over_negative", "bad updates among tokens with A < 0",
         "number with A < 0 and μ − π ≥ δ / number with A < 0",
         "share", f"{DPPO}, Fig. 5; its denominator is not stated"),
    _row("reward", "mean reward", "mean R over the responses of the step", "reward", _COMMON),
    _row("reward_change", "change of the reward", "mean reward minus that of the previous step",
         "reward", _COMMON),
    _row("correlations", "correlation over steps",
         "Pearson’s r of two values per step; interval by Fisher’s z with the number of "
         "independent steps", "1",
         "Pearson (1895), Bartlett (1935)"),
    _row("equivalents", "equal threshold",
         "the threshold of the other family that blocks as many tokens", "1",
         _COMMON),
    _row("share", "tokens above the cap", "share of tokens with r > C", "share",
         f"{DPPO}, App. C.1"),
    _row("mean", "mean divergence",
         "mean of the binary or top-K divergence of μ and π over all tokens, including A = 0; if "
         "the trace has full divergences, over the tokens with one",
         "probability or nats", f"{DPPO}, eq. 13 to 16"),
    _row("bias", "bias",
         "mean of (approximation − full-vocabulary divergence) over the tokens with both",
         "probability or nats", _COMMON),
    _row("rank_correlation", "rank correlation",
         "Spearman’s ρ of approximation and full divergence over the tokens with both", "1",
         "Spearman (1904)"),
    _row("wrong_mask", "wrong mask",
         "share of tokens on which the mask decides differently from the full divergence", "share",
         _COMMON),
    _row("low", "mean TV, at least",
         "mean over all tokens of the TV over the buckets of the approximation",
         "probability", f"{DPPO}, App. B.1: merging tokens into buckets never adds to TV"),
    _row("high", "mean TV, at most",
         "mean over all tokens of (that TV + min(μ, π) of the bucket of other tokens)",
         "probability", "triangle inequality within the bucket"),
    _row("decided", "decided",
         "share of all tokens whose full TV is certainly on one side of the threshold", "share",
         _COMMON),
    *THEORY.values(),
)

TRAINING = table(
    _row("reward", "final reward",
         f"mean reward of the last {LAST} steps that the runs share", "reward",
         _COMMON),
    _row("area", "area under the reward",
         "mean reward over the steps that the runs share", "reward", _COMMON),
    _row("steps_to_reward", "steps to a reward",
         "the first step with a reward of R or more, linear between steps; R is half-way "
         "from the mean of the algorithms at the first shared step to the highest mean of any", "1",
         _COMMON),
    _row("seconds_to_reward", "seconds to a reward",
         "seconds of sampling, grading, recomputing, updating and sync before that step", "s",
         _COMMON),
    _row("best", "best reward", f"the highest mean reward of {LAST} successive steps", "reward",
         _COMMON),
    _row("eval_accuracy", "final accuracy",
         "mean reward of the last evaluation",
         "share", _COMMON),
    _row("abs_dp_first", f"mean |π − μ|, first {FIRST} steps",
         f"mean over tokens of |π − μ| at equal weights, first {FIRST} steps",
         "probability",
         f"{DPPO}, Fig. 3"),
    _row("abs_dp_last", f"mean |π − μ|, last {LAST} steps",
         f"mean over tokens of |π − μ| at equal weights, last {LAST} steps", "probability",
         f"{DPPO}, Fig. 3"),
    replace(CLIPPING["over_negative"], key="bad_over_negative",
            formula=(
                "number with A < 0 and μ − π ≥ 0.5 / number with A < 0, at the weights of each "
                "update, mean over steps"
            )),
    replace(CLIPPING["over_tokens"], key="bad_over_tokens",
            formula=(
                "number with A < 0 and μ − π ≥ 0.5 / number with A ≠ 0, at the weights of each "
                "update, mean over steps"
            ), source=f"{DPPO}, Fig. 5; its denominator is not stated"),
    replace(CLIPPING["blocked"], formula="blocked tokens / tokens with A ≠ 0, mean over steps",
            source=f"{DPPO}, eq. 12"),
    _row("blocked_positive", "blocked where A > 0",
         "blocked tokens with A > 0 / tokens with A > 0, mean over steps",
         "share", f"{DPPO}, eq. 12"),
    replace(CLIPPING["blocked_rare"],
            formula="blocked tokens with A > 0 and μ < 0.1 / tokens with A > 0 and μ < 0.1, mean "
            "over steps"),
    _row("blocked_negative", "blocked where A < 0",
         "blocked tokens with A < 0 / tokens with A < 0, mean over steps",
         "share", f"{DPPO}, eq. 12"),
    replace(CLIPPING["mu_blocked"], formula="mean μ of blocked tokens, mean over steps"),
    replace(CLIPPING["entropy_blocked"],
            formula="mean of −Σ π log π over the vocabulary at blocked tokens, mean over steps"),
    _row("entropy", "mean entropy", "mean of −Σ π log π over the vocabulary, over the last steps",
         "nats",
         f"{DPPO}, Fig. 7"),
    _row("k3", "KL(μ‖π) at the updates",
         f"mean of π/μ − 1 − log(π/μ) at the weights of each update, last {LAST} steps",
         "nats", "Schulman, Approximating KL divergence (2020)"),
    _row("ratio", "π/μ, 1 % to 99 %",
         f"quantiles of π/μ over tokens, at the weights of each update, last {LAST} steps",
         "1", _COMMON),
    _row("grad_norm", "gradient norm", "norm of the gradient of an update, median over steps", "1",
         _COMMON),
    _row("length", "response length",
         f"mean tokens of the model in a response, last {LAST} steps",
         "tokens", _COMMON),
    _row("turns", "turns", f"mean turns of the model in an episode, last {LAST} steps", "1",
         _COMMON),
    _row("truncated", "truncated", f"share of responses ended by a limit, last {LAST} steps",
         "share", _COMMON),
    _row("back_offs", "loss-scale back-offs",
         "how often the loss scale was lowered because a gradient overflowed", "1",
         _COMMON),
    _row("sync", "weight sync",
         "steps at which the engine was shown to sample with the new weights / steps", "1",
         _COMMON),
    _row("weights_changed", "weights changed in the engine",
         "share of the trained weights that change in the engine's dtype in a step, last "
         f"{LAST} checks",
         "share", _COMMON),
    _row("rounding_gap", "|π − μ| by rounding",
         "mean |π − μ| between the trainer that learns and the trainer with the weights sent to "
         f"the engine, last {LAST} checks", "probability", _COMMON),
    _row("seconds", "time of a step", "sum over its phases, mean over steps", "s", _COMMON),
)
# fmt: on

# The names that a line of metrics.jsonl has for pairs, and for the metrics of each.
PAIRS_OF_STEP = {"mismatch": "mismatch", "total": "current"}
OF_STEP = {
    "abs_dp_mean": "tv_binary_mean", "dp_max": "tv_signed_max", "dp_min": "tv_signed_min",
    "k1": "k1", "k3": "k3",
    "ratio_p01": "ratio_p01", "ratio_p50": "ratio_p50", "ratio_p99": "ratio_p99",
    "ratio_outside": "ratio_outside_0.8_1.28",
}  # fmt: skip
_OF_TOP_K = {"topk_mass_rollout": "topk_mass_reference", "topk_mass_trainer": "topk_mass_current"}


def gap_record(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The metrics of a pair, by key, as in a line of metrics.jsonl; masses only if they were
    measured.
    """
    record = {name: values[key] for name, key in OF_STEP.items()}
    for name, key in _OF_TOP_K.items():
        if values[key] is not None:
            record[name] = values[key]
    return record


def update_record(numbers: ClippingNumbers) -> dict[str, float | None]:
    """What an algorithm blocked, and bad updates, as in a line of metrics.jsonl."""
    bad = numbers.bad_updates
    record = {
        "bad_over_tokens": bad.over_tokens.value,
        "bad_over_negative": bad.over_negative.value,
    }
    for row in numbers.algorithms:
        record |= {
            "mu_blocked": row.mu_blocked.value,
            "mu_kept": row.mu_kept.value,
            "entropy_blocked": row.entropy_blocked.value,
            "entropy_kept": row.entropy_kept.value,
            "blocked_positive": row.blocked.positive.value,
            "blocked_negative": row.blocked.negative.value,
            "blocked": row.blocked.all.value,
            "blocked_rare": row.blocked_rare.value,
        }
    return record
