"""The words for every number of the `clipstats` report; the keys are those of docs/clipstats.md.

A number of one sign or one step has the words of the number over all of them, and its table says which it is.
"""

from __future__ import annotations

from mismatch_cli.metrics.catalog import Metric
from mismatch_cli.papers import DPPO

NOTATION = (
    "Where nothing else is said, over judged tokens: those with an advantage A other than 0; without advantages all, "
    "once as if A > 0 and once as if A < 0. μ (q in the formulas of masks) is the rollout’s probability of the sampled "
    "token, π (p) the trainer’s, π′ (p′) that of the trainer at the weights that sampled; r = π/μ, r′ = π/π′, "
    "ρ = π′/μ. Σ runs over judged tokens (in the theory over the T tokens of a response with reward R), keep is 0 "
    "where a mask blocks and 1 elsewhere, weight is the algorithm’s, C its cap. Intervals cover 95 % over prompts."
)

_COMMON = "elementary"


def _metric(key: str, label: str, formula: str, unit: str, source: str) -> Metric:
    return Metric(key, label, formula, unit, source, agreement=None)


BLOCKED = _metric(
    "blocked",
    "blocked tokens",
    "Σ (1 − keep) / Σ 1",
    "share",
    f"{DPPO}, eq. 12; verl pg_clipfrac, with A = 0 left out",
)
LOST = _metric(
    "lost",
    "update weight lost",
    "1 − Σ keep·weight·|A| / Σ r·|A|; † where the weight is not r: Σ (1 − keep)·|A| / Σ |A|",
    "share",
    f"weights of {DPPO}, eq. 23; a weight, not the norm of a gradient",
)
LOST_MASKED = _metric(
    "masked",
    "lost to the mask",
    "Σ (1 − keep)·r·|A| / Σ r·|A|; † Σ (1 − keep)·|A| / Σ |A|",
    "share",
    f"{DPPO}, eq. 23",
)
LOST_CAPPED = _metric("capped", "lost to the cap", "Σ keep·(r − weight)·|A| / Σ r·|A|", "share", f"{DPPO}, eq. 23")
TOUCHED = _metric(
    "responses_touched",
    "responses touched",
    "share of the responses with a judged token that have a blocked one",
    "share",
    _COMMON,
)
MU_BLOCKED = _metric(
    "mu_blocked", "mean μ of blocked tokens", "mean μ where keep = 0", "probability", f"{DPPO}, Fig. 6"
)
MU_KEPT = _metric("mu_kept", "mean μ of kept tokens", "mean μ where keep = 1", "probability", f"beside {DPPO}, Fig. 6")
ENTROPY_BLOCKED = _metric(
    "entropy_blocked", "mean entropy at blocked tokens", "mean of −Σ π log π over the vocabulary, where keep = 0",
    "nats", f"{DPPO}, Fig. 6",
)  # fmt: skip
ENTROPY_KEPT = _metric(
    "entropy_kept", "mean entropy at kept tokens", "mean of −Σ π log π over the vocabulary, where keep = 1",
    "nats", f"beside {DPPO}, Fig. 6",
)  # fmt: skip

JACCARD = _metric(
    "jaccard",
    "Jaccard index",
    "tokens that both block / tokens that at least one of them blocks",
    "1",
    "Jaccard (1901)",
)
BOTH = _metric("both", "blocked by both", "number of tokens that both block", "tokens", _COMMON)
ONLY = _metric(
    "only_row", "blocked by one only", "number of tokens that one blocks and the other keeps", "tokens", _COMMON
)

TIMES_BLOCKED = _metric(
    "blocked_tokens",
    "times blocked",
    "how often the token is blocked with that sign of A",
    "tokens",
    f"{DPPO}, App. D",
)
RATE = _metric("rate", "blocked rate", "times blocked / occurrences with that sign of A", "share", _COMMON)
LIFT = _metric("lift", "lift", "its blocked rate / the blocked rate of all tokens with that sign of A", "1", _COMMON)
MEAN_MU = _metric("mu", "mean μ", "mean μ over its blocked occurrences", "probability", _COMMON)
MEAN_PI = _metric("pi", "mean π", "mean π over its blocked occurrences", "probability", _COMMON)
MEAN_RATIO = _metric("ratio", "mean ratio", "mean r over its blocked occurrences", "1", _COMMON)

BAD = _metric("bad", "bad updates", "number of tokens with A < 0 and μ − π ≥ δ", "tokens", f"{DPPO}, Fig. 5")
BAD_OF_TOKENS = _metric(
    "over_tokens", "bad updates among tokens with A ≠ 0", "number with A < 0 and μ − π ≥ δ / number with A ≠ 0",
    "share", f"{DPPO}, Fig. 5; its denominator is not stated, Stable-RL's clip fractions use this one",
)  # fmt: skip
BAD_OF_NEGATIVE = _metric(
    "over_negative", "bad updates among tokens with A < 0", "number with A < 0 and μ − π ≥ δ / number with A < 0",
    "share", f"{DPPO}, Fig. 5; its denominator is not stated",
)  # fmt: skip
REWARD = _metric("reward", "mean reward", "mean R over the responses of the step", "reward", _COMMON)
REWARD_CHANGE = _metric(
    "reward_change", "change of the reward", "mean reward minus that of the step before", "reward", _COMMON
)
CORRELATION = _metric(
    "correlations", "correlation over steps",
    "Pearson’s, of two values for each step; interval by Fisher’s z, for as many steps as are independent", "1",
    "Pearson (1895), Bartlett (1935)",
)  # fmt: skip

THRESHOLD = _metric(
    "equivalents", "equal threshold", "the threshold of the other family that blocks as many tokens", "1", _COMMON
)
CAPPED_TOKENS = _metric("share", "tokens above the cap", "share of tokens with r > C", "share", f"{DPPO}, App. C.1")

MEAN_DIVERGENCE = _metric(
    "mean", "mean divergence",
    "mean of the binary or top-K divergence of μ and π over all tokens, A = 0 too; where the trace holds full "
    "divergences, over the tokens that have one",
    "probability or nats", f"{DPPO}, eq. 13 to 16",
)  # fmt: skip
BIAS = _metric(
    "bias",
    "bias",
    "mean of (approximation − divergence over the whole vocabulary) over the tokens that have both",
    "probability or nats",
    _COMMON,
)
RANK_CORRELATION = _metric(
    "rank_correlation",
    "rank correlation",
    "Spearman’s, of approximation and full divergence over the tokens that have both",
    "1",
    "Spearman (1904)",
)
WRONG_MASK = _metric(
    "wrong_mask", "wrong mask",
    "share of tokens on which the mask decides otherwise than with the full divergence", "share",
    _COMMON,
)  # fmt: skip
TV_AT_LEAST = _metric(
    "low", "mean TV, at least", "mean over all tokens of the TV over the buckets of the approximation", "probability",
    f"{DPPO}, App. B.1: merging tokens into buckets never adds to TV",
)  # fmt: skip
TV_AT_MOST = _metric(
    "high", "mean TV, at most", "mean over all tokens of (that TV + min(μ, π) of the bucket of other tokens)",
    "probability", "triangle inequality within the bucket",
)  # fmt: skip
DECIDED = _metric(
    "decided",
    "decided",
    "share of all tokens whose full TV is certainly on one side of the threshold",
    "share",
    _COMMON,
)

THEORY = (
    _metric("surrogate", "surrogate L′", "mean over responses of R Σ (r − 1)", "reward", f"{DPPO}, eq. 5"),
    _metric("correction", "correction Δ", "mean of R Σ (r_t − 1)(1 − Π_{j>t} r_j)", "reward", f"{DPPO}, eq. 6"),
    _metric("difference", "difference L′ − Δ", "mean of R (Π r − 1)", "reward", f"{DPPO}, eq. 6"),
    _metric(
        "quadratic_bound", "quadratic bound", "L′ − 2 ξ T(T − 1) D_max²; all three the largest of the sample", "reward",
        f"{DPPO}, eq. 7",
    ),
    _metric("linear_bound", "linear bound", "L′ − 2 ξ · mean of Σ |r − 1|", "reward", f"{DPPO}, eq. 8"),
    _metric("xi", "ξ", "max |R|", "reward", f"{DPPO}, eq. 7"),
    _metric("longest", "longest response T", "max T", "tokens", f"{DPPO}, eq. 7"),
    _metric(
        "tv_max", "largest TV",
        "D_max, the largest of the sample: of the full TV where the trace holds it, else of |π − μ|, which is smaller",
        "probability", f"{DPPO}, eq. 7",
    ),
    _metric("tv_sum", "mean summed TV", "mean over responses of Σ |r − 1| / 2", "probability", f"{DPPO}, eq. 11"),
    _metric("ess", "effective sample size", "1 / mean of (w / mean w)², w = Π r", "share", "Kong (1992)"),
    _metric("weight_max", "largest weight", "max Π r", "1", _COMMON),
)  # fmt: skip

CATALOG = (
    BLOCKED, LOST, LOST_MASKED, LOST_CAPPED, TOUCHED, MU_BLOCKED, MU_KEPT, ENTROPY_BLOCKED, ENTROPY_KEPT,
    JACCARD, BOTH, ONLY, TIMES_BLOCKED, RATE, LIFT, MEAN_MU, MEAN_PI, MEAN_RATIO,
    BAD, BAD_OF_TOKENS, BAD_OF_NEGATIVE, REWARD, REWARD_CHANGE, CORRELATION, THRESHOLD, CAPPED_TOKENS,
    MEAN_DIVERGENCE, BIAS, RANK_CORRELATION, WRONG_MASK, TV_AT_LEAST, TV_AT_MOST, DECIDED, *THEORY,
)  # fmt: skip
