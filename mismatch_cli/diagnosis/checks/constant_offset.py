"""A constant that was added to every log-probability of a response, on one side."""

import numpy as np

from mismatch_cli.diagnosis.checks.index_shift import too_few
from mismatch_cli.diagnosis.checks.truncated_support import OneSided
from mismatch_cli.diagnosis.checks.uniform_mixture import mixture_in
from mismatch_cli.diagnosis.evidence import Evidence, Finding
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.power import clear, no_power
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "constant-offset", 2
TITLE = "A constant added to whole responses"
CAUSE = (
    "A value of the whole response was added to its log-probabilities in place: a reward, a "
    "penalty, a normaliser, a KL term, or a log-weight of the sampler."
)
CHANGE = (
    "Keep rewards, penalties and weights in columns of their own; pass on the log-softmax values "
    "unchanged."
)
SOURCE = "in-place additions to a dump's columns; no known public report"
_LEAST = 0.004  # nats
_FEWEST = 6  # tokens, not 0 on either side
_NEAR = 0.2  # of the constant: a token this close to it has no other gap
_LEAST_BESIDE = 0.05  # of the constant: the mean gap of the other responses
_NEARLY_ALL, _LEFT = 0.6, 0.5  # of a response's tokens; of its gap


def check(evidence: Evidence) -> Finding:
    """Find responses in which d is the same number at nearly every token, probable or not.

    The number is the median over the other half of the response's tokens (every second one); a
    token at 0 on one side may have been clipped there and is not used.
    """
    sample = evidence.sample
    constant_S = np.zeros(sample.num_responses)
    left_T = sample.logp_T - sample.logq_T
    for s, span in enumerate(sample.spans()):
        fit = _fit_constant(sample.logq_T[span], sample.logp_T[span], sample.counts_T[span])
        if fit is not None:
            constant_S[s], left_T[span] = fit
    offset_S = constant_S != 0
    count = int(offset_S.sum())
    share = count / max(1, sample.num_responses)
    if too_few(offset_S) or renormalised(sample, constant_S) or mixture_in(sample):
        return clear(NAME, share, "share of responses", power(sample))
    low, middle, high = map(float, np.quantile(constant_S[offset_S], [0.05, 0.5, 0.95]))
    sentence = (
        f"In {count:,} of {sample.num_responses:,} responses log π − log μ is the same number at "
        f"nearly every token (median {middle:+.3g} nats)."
    )
    rows = (
        ("responses", count), ("the constant, 5 % quantile, nats", low),
        ("median", middle), ("95 % quantile", high),
    )  # fmt: skip
    left_N = left_T[sample.index_N]
    part = Subset(offset_S, _testable_S(sample))
    return Finding(
        NAME, "found", share, "share of responses", sentence, rows, left_N=left_N, part=part
    )


def _testable_S(sample: Sample) -> np.ndarray:
    """The responses with enough tokens that were not clipped."""
    unclipped_T = _unclipped_T(sample.logq_T, sample.logp_T, sample.counts_T)
    count_S = np.bincount(sample.response_T[unclipped_T], minlength=sample.num_responses)
    return np.asarray(count_S >= _FEWEST)


def _unclipped_T(logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray) -> np.ndarray:
    """The tokens that count and have no probability of 1, at which an offset may be cut off."""
    return np.asarray(counts_T & (logq_T != 0) & (logp_T != 0))


def power(sample: Sample) -> str:
    """The constant that would have been found in half of the responses: 60 % of a response's gaps
    are within a fifth of it.
    """
    abs_d_T = sample.abs_d_T
    usable_T = sample.counts_T & np.isfinite(abs_d_T)
    constants = []
    for span in sample.spans():
        abs_d_N = abs_d_T[span][usable_T[span]]
        if len(abs_d_N) >= _FEWEST:
            constants.append(float(np.quantile(abs_d_N, _NEARLY_ALL)) / _NEAR)
    if not constants:
        return no_power(f"no response has {_FEWEST} tokens")
    return f"≥ {max(_LEAST, float(np.median(constants))):.2g} nats in half of the responses"


def renormalised(sample: Sample, constant_S: np.ndarray) -> bool:
    """Whether the engine's truncation made the constants: all have one sign, and other responses
    lean that way too.

    top-p 0.9 takes about ln 0.9 from every uncertain token, in some responses from nearly all. Even
    float32 rounding leans: a gap that is tiny compared with the constants is not from truncation.
    """
    if constant_S.max() > 0:
        return False
    other_N = constant_S[sample.response_N] == 0
    others = OneSided.of(sample.d_N[other_N], sample.group_N[other_N])
    least = _LEAST_BESIDE * float(-np.median(constant_S[constant_S != 0]))
    return bool(others.gap > least and others.renormalised)


def _fit_constant(
    logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray
) -> tuple[float, np.ndarray] | None:
    """The constant of one response, and the gap without it; None if it has none."""
    d_T = logp_T - logq_T
    unclipped_T = _unclipped_T(logq_T, logp_T, counts_T)
    if unclipped_T.sum() < _FEWEST:
        return None
    constant = float(np.median(d_T[unclipped_T]))
    near_T = np.abs(d_T - constant) < _NEAR * abs(constant)
    if abs(constant) < _LEAST or near_T[unclipped_T].mean() < _NEARLY_ALL:
        return None
    left_T = np.empty(len(d_T))
    for half in (0, 1):
        own_T = np.arange(len(d_T)) % 2 == half
        fitted_T = unclipped_T & ~own_T
        fitted = float(np.median(d_T[fitted_T])) if fitted_T.any() else constant
        left_T[own_T] = without_constant(logq_T[own_T], logp_T[own_T], fitted)
    if np.abs(left_T[counts_T]).sum() > _LEFT * np.abs(d_T[counts_T]).sum():
        return None
    return constant, left_T


def without_constant(logq_T: np.ndarray, logp_T: np.ndarray, constant: float) -> np.ndarray:
    """log π − log μ without the constant, and 0 where clipping at 0 explains the rest."""
    d_T = logp_T - logq_T
    is_clipped_T = (logp_T == 0) | (logq_T == 0)
    return np.where(is_clipped_T & (np.abs(d_T) <= abs(constant)), 0.0, d_T - constant)
