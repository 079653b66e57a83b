"""A gap carried by a few tokens or responses: routing flips of a mixture of experts, broken
sequences.
"""

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.group_estimates import is_share_above
from mismatch_cli.diagnosis.power import clear, percent
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE, OF_SHAPE = "heavy-tail", 6, True
TITLE = "A few tokens carry the gap"
CAUSE = (
    "One side has other values for some tokens or whole responses: written by other code, computed "
    "by batch-dependent kernels, or from overwritten memory."
)
CHANGE = (
    "Look at the worst responses (mismatch-cli report --worst 20 --full) and at what they share, "
    "such as batch or length."
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
_BULK, _END = 1.0, 4.0  # typical gaps, to twice these
# Of the tokens in the bulk, at its end: 0.06 to 0.13 without a fault and with few far tokens, 0.16
# to 0.5 with dropout of 2 to 10 %
_THIN = 1 / 7
_MOST = 0.5  # of Σ|d|: a tail with less is not why the gap is too large
_NEARLY_ALL = 2 / 3  # of Σ|d|: the gap is three times what it is without the tail
_MEASURE = "share of Σ|Δlog p| in the tail"


@dataclass(frozen=True)
class _Tail:
    """Tokens that are far off, by themselves or in their responses."""

    inside_N: np.ndarray  # bool
    count: int  # of tokens or responses
    phrase: str  # such as `12 tokens`
    share: float  # of Σ|d|
    fewest: int  # that are more than chance
    left_N: np.ndarray  # log π − log μ with the gap of typical tokens in the tail

    @property
    def is_few(self) -> bool:
        return bool(self.inside_N.any()) and float(self.inside_N.mean()) <= _FEW

    @property
    def left(self) -> float:
        """The mean gap without the tail, nats per token."""
        return float(np.abs(self.left_N).mean())


def check(evidence: Evidence) -> Finding:
    """Measure the share of Σ|d| on tokens beyond 10 typical gaps, and on responses beyond 4
    times the median.

    A tail that decides whether the gap is too large is a fault; a smaller one needs enough tokens
    to be told from chance.
    """
    sample = evidence.sample
    by_tokens, by_responses = _far_tokens(sample), _far_responses(sample)
    tail = by_responses if by_responses.share >= by_tokens.share else by_tokens
    rows = (
        ("tokens beyond 10 typical gaps", by_tokens.count),
        ("share of Σ|Δlog p| on them", by_tokens.share),
        ("responses beyond 4 times the median response", by_responses.count),
        ("share of Σ|Δlog p| in them", by_responses.share), *_values(sample, tail),
    )  # fmt: skip
    decides = _decides(evidence, tail)
    if not decides:
        if sample.num_counted < _FEWEST_TOKENS:
            return untested(NAME, f"needs at least {_FEWEST_TOKENS} tokens to see a tail")
        if not (tail.is_few and _is_more_than_chance(sample, tail)):
            power = f"≥ {percent(_SHARE)} of the gap on ≤ {percent(_FEW)} of the tokens"
            return clear(NAME, tail.share, _MEASURE, power, rows)
    # Only routing can make a few tokens differ so much that the gap is too large without them, too,
    # or as far as the bulk reaches
    is_why = _is_apart(sample) and (decides or not _is_too_large(evidence))
    if tail is by_tokens and evidence.family != "moe" and not is_why:
        reason = f"{_percent(tail)} of the gap is on {tail.phrase}: where it sits, not why"
        return Finding(
            NAME, "clear", tail.share, _MEASURE, evidence=rows, reason=reason, left_N=tail.left_N
        )
    return _finding(evidence, tail, rows, decides)


def _decides(evidence: Evidence, tail: _Tail) -> bool:
    """Whether few tokens make the gap too large, which is as expected without them, or have two
    thirds of it: no precision moves so few so far.
    """
    makes_it_too_large = (
        tail.share >= _MOST and _is_too_large(evidence) and tail.left <= evidence.expected.high
    )
    is_nearly_all = tail.share >= _NEARLY_ALL and evidence.sample.num_counted >= _FEWEST_TOKENS
    return tail.is_few and (makes_it_too_large or is_nearly_all)


def _is_too_large(evidence: Evidence) -> bool:
    return evidence.gap.value > evidence.expected.high


def _percent(tail: _Tail) -> str:
    return f"{100 * tail.share:.0f} %"


def _finding(evidence: Evidence, tail: _Tail, rows: tuple[Row, ...], decides: bool) -> Finding:
    sentence = f"{tail.phrase} of the sample carry {_percent(tail)} of the gap"
    if decides:
        sentence += f", which is {tail.left:.2g} nats without them. "
        sentence += _range_sentence(evidence.sample, tail)
    else:
        sentence += "."
    cause, change = CAUSE, CHANGE
    if evidence.family != "dense":
        cause += _EXPERTS
        change += _REPLAY
    return Finding(
        NAME,
        "found",
        tail.share,
        _MEASURE,
        sentence,
        rows,
        cause=cause,
        change=change,
        left_N=tail.left_N,
        beyond_expected=decides,
    )


def _is_apart(sample: Sample) -> bool:
    """Whether the far tokens are of another kind: the others end well before 10 typical gaps.

    The noise of a trainer with dropout does not: its bulk reaches as far as its tail.
    """
    u_N = np.abs(sample.d_N) / sample.typical_N
    bulk = int(((u_N > _BULK) & (u_N <= 2 * _BULK)).sum())
    end = int(((u_N > _END) & (u_N <= 2 * _END)).sum())
    return end <= _THIN * bulk


def _far_tokens(sample: Sample) -> _Tail:
    far_N = np.abs(sample.d_N) > _FAR * sample.typical_N
    return _tail(sample, far_N, int(far_N.sum()), "token", _FEWEST_FAR)


def _far_responses(sample: Sample) -> _Tail:
    far_S = are_far_S(sample)
    far_N = far_S[sample.response_N]
    return _tail(sample, far_N, int(far_S.sum()), "response", _FEWEST)


def are_far_S(sample: Sample) -> np.ndarray:
    """Responses of at least 8 counted tokens whose mean normalised gap is far above the median
    response's.
    """
    response_N = sample.response_N
    count_S = np.bincount(response_N, minlength=sample.num_responses)
    sum_S = np.bincount(response_N, weights=sample.u_N, minlength=sample.num_responses)
    mean_S = sum_S / np.maximum(count_S, 1)
    long_S = count_S >= _LONG
    if not long_S.any():
        return long_S
    return np.asarray(long_S & (mean_S > _FAR_RESPONSE * np.median(mean_S[long_S])))


def _tail(sample: Sample, inside_N: np.ndarray, count: int, kind: str, fewest: int) -> _Tail:
    abs_d_N = np.abs(sample.d_N)
    total = float(abs_d_N.sum())
    typical_N = np.copysign(np.minimum(abs_d_N, sample.typical_N), sample.d_N)
    return _Tail(
        inside_N,
        count,
        things(count, kind),
        float(abs_d_N[inside_N].sum() / total) if total else 0.0,
        fewest,
        np.where(inside_N, typical_N, sample.d_N),
    )


def _is_more_than_chance(sample: Sample, tail: _Tail) -> bool:
    if tail.count < tail.fewest or tail.share < _SHARE:
        return False
    return is_share_above(tail.inside_N, np.abs(sample.d_N), sample.group_N, _LEAST_SHARE)


def _values(sample: Sample, tail: _Tail) -> tuple[Row, ...]:
    """The range of both sides' log-probabilities in the tail."""
    if not tail.inside_N.any():
        return ()
    rows: list[Row] = []
    for name, logp_N in (("log μ", sample.logq_N), ("log π", sample.logp_N)):
        own = logp_N[tail.inside_N]
        rows += [(f"{name} in the tail, from", float(own.min())), ("to", float(own.max()))]
    return tuple(rows)


def _range_sentence(sample: Sample, tail: _Tail) -> str:
    low_mu, high_mu, low_pi, high_pi = (value for _, value in _values(sample, tail))
    return (
        f"There log μ is {low_mu:.4g} to {high_mu:.4g} and log π is {low_pi:.4g} to {high_pi:.4g}."
    )
