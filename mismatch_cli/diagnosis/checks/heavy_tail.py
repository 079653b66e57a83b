"""A gap carried by a few tokens or responses: routing flips of a mixture of experts, broken
sequences.
"""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.grouped import is_share_above
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "heavy-tail", 6
TITLE = "A few tokens carry the gap"
CAUSE = (
    "One side computed some tokens or whole responses differently: batch-dependent kernels, or "
    "overwritten memory."
)
CHANGE = (
    "Look at the worst responses (mismatch-cli report --worst 20) and at what they share, such "
    "as batch or length."
)
_EXPERTS = (
    " In a mixture of experts, the two sides may have chosen different experts for some tokens."
)
_REPLAY = " With experts: replay the engine's routing in the trainer (R3)."
SOURCE = (
    "arXiv 2510.11370 (R3), NeMo-RL 2100 (15–20 % of sequences, 100 to 670 times), NeMo-RL 4243"
)
_FAR = 10.0  # typical gaps
_SHARE = 0.3  # of Σ|d|
_FAR_RESPONSE = 4.0  # times the median response
_FEWEST, _FEWEST_FAR, _LONG = 3, 10, 8
_FEW = 0.2  # of the tokens: more are not a tail
_LEAST_SHARE = 0.2  # of Σ|d|, two standard errors below the share
_FEWEST_TOKENS = 1000


def check(evidence: Evidence) -> Finding:
    """Measure the share of Σ|d| on tokens beyond 10 typical gaps, and on responses beyond 4
    times the median.
    """
    sample = evidence.sample
    if len(sample.kept) < _FEWEST_TOKENS:
        return untested(NAME, f"needs at least {_FEWEST_TOKENS} tokens to see a tail")
    abs_d_N, total = np.abs(sample.d_N), float(np.abs(sample.d_N).sum())
    far_N = abs_d_N > _FAR * sample.typical_N
    tokens = float(abs_d_N[far_N].sum() / total) if total else 0.0
    far_S = _far_responses(sample)
    far_response_N = far_S[sample.response_T[sample.kept]]
    responses = float(abs_d_N[far_response_N].sum() / total) if total else 0.0
    rows = (
        ("tokens beyond 10 typical gaps", int(far_N.sum())), ("share of Σ|Δlog p| on them", tokens),
        ("responses beyond 4 times the median response", int(far_S.sum())),
        ("share of Σ|Δlog p| in them", responses),
    )  # fmt: skip
    share, measure = max(tokens, responses), "share of Σ|Δlog p| in the tail"
    if responses >= tokens:
        in_tail_N, count, fewest, what = far_response_N, int(far_S.sum()), _FEWEST, "responses"
    else:
        in_tail_N, count, fewest, what = far_N, int(far_N.sum()), _FEWEST_FAR, "tokens"
    is_tail = count >= fewest and in_tail_N.mean() <= _FEW and share >= _SHARE
    if not (is_tail and is_share_above(in_tail_N, abs_d_N, sample.group_N, _LEAST_SHARE)):
        return Finding(NAME, "clear", share, measure, evidence=rows)
    what = f"{count:,} {what}"
    left_N = np.where(
        in_tail_N, np.copysign(np.minimum(abs_d_N, sample.typical_N), sample.d_N), sample.d_N
    )
    cause, change = (
        (CAUSE, CHANGE) if evidence.family == "dense" else (CAUSE + _EXPERTS, CHANGE + _REPLAY)
    )
    # only routing can make a few tokens differ so much that the whole gap is far above the usual
    by_tokens = responses < tokens and evidence.family != "moe"
    if by_tokens and evidence.gap.value > evidence.usual.far_above:
        reason = f"{100 * share:.0f} % of the gap is on {what}: where it sits, not why"
        return Finding(NAME, "clear", share, measure, evidence=rows, reason=reason, left_N=left_N)
    sentence = f"{what} of the sample carry {100 * share:.0f} % of the gap."
    return Finding(
        NAME, "found", share, measure, sentence, rows, cause=cause, change=change, left_N=left_N
    )


def _far_responses(sample: Sample) -> np.ndarray:
    """Responses of at least 8 counted tokens whose mean normalised gap is far above the median
    response's.
    """
    response_N = sample.response_T[sample.kept]
    count_S = np.bincount(response_N, minlength=sample.num_responses)
    mean_S = np.bincount(
        response_N, weights=sample.u_N, minlength=sample.num_responses
    ) / np.maximum(count_S, 1)
    long_S = count_S >= _LONG
    return long_S & (mean_S > _FAR_RESPONSE * np.median(mean_S[long_S])) if long_S.any() else long_S
