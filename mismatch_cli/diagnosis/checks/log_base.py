"""Logarithms to a base other than e, on one side or both."""

import numpy as np

from mismatch_cli.diagnosis.checks.index_shift import too_few
from mismatch_cli.diagnosis.evidence import Evidence, Finding
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.model import ModelAtHand
from mismatch_cli.diagnosis.power import clear, of_responses
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "log-base", 2
TITLE = "Another base of the logarithm"
CAUSE = "One side writes log2 (bits) or log10 where the other writes ln (nats)."
CHANGE = "Multiply that side's columns by ln 2 (or ln 10) where they are written."
SOURCE = (
    "kernels that use exp2 and log2 (FlashAttention's log-sum-exp); no known public report of "
    "such a dump"
)
_BASES = {"2": np.log(2.0), "e": 1.0, "10": np.log(10.0)}
_WRONG = ("2", "10")
# The bases of the rollout and of the trainer
_PAIRS = (("2", "e"), ("e", "2"), ("10", "e"), ("e", "10"), ("2", "10"), ("10", "2"))
_LEFT = 0.5  # of a response's gap
_NEAR, _NEARLY_ALL = 0.06, 0.7  # of log π, and of the tokens with informative log-probabilities
_TELLING, _FEWEST = -0.05, 6  # nats, tokens
_REAL = 0.02  # mean nats per token: another base makes a larger gap
_UNCERTAIN, _FEWEST_UNCERTAIN, _COVERED, _BROKEN = -0.1, 100, 0.75, 0.01
_MOST_MASS = 1.002  # of the top K: more than rounding adds to 1


def check(evidence: Evidence) -> Finding:
    """Check each side's top-K (with the right base, probabilities sum to 1), and log π / log μ per
    response.

    A wrong base on both sides leaves that quotient as it is; it shows in the top-K columns or with
    the trainer's model.
    """
    sample = evidence.sample
    rollout, trainer = _base_of(evidence, "rollout"), _base_of(evidence, "trainer")
    rows = (
        ("rollout: base, by its own numbers", rollout or "not known"),
        ("trainer: base, by its own numbers", trainer or "not known"),
    )
    if rollout in _WRONG and trainer in _WRONG:
        base_of = dict.fromkeys(range(sample.num_responses), (str(rollout), str(trainer)))
        return _finding(evidence, base_of, rows)
    base_of = {}
    for s, span in enumerate(sample.spans()):
        counts_T = sample.counts_T[span]
        pair = pair_of_bases(sample.logq_T[span][counts_T], sample.logp_T[span][counts_T])
        if pair is not None:
            base_of[s] = pair
    chosen_S = np.isin(np.arange(sample.num_responses), list(base_of))
    if too_few(chosen_S):
        share = len(base_of) / max(1, sample.num_responses)
        return clear(NAME, share, "share of responses", of_responses(_telling_S(sample)), rows)
    return _finding(evidence, base_of, rows)


def _base_of(evidence: Evidence, side: str) -> str | None:
    """The base of a side's columns by its top-K, else by the model; None if neither shows it."""
    sample = evidence.sample
    ranks_TK = sample.topk_logq_TK if side == "rollout" else sample.topk_logp_TK
    base = _base_of_topk(ranks_TK)
    if base is None and evidence.model is not None:
        own_T = sample.logq_T if side == "rollout" else sample.logp_T
        base = _base_by_model(own_T, evidence.model, sample)
    return base


def _telling_S(sample: Sample) -> np.ndarray:
    """The responses with enough uncertain tokens."""
    telling_T = sample.counts_T & (sample.logq_T < _TELLING)
    count_S = np.bincount(sample.response_T[telling_T], minlength=sample.num_responses)
    return np.asarray(count_S >= _FEWEST)


def _finding(
    evidence: Evidence, base_of: dict[int, tuple[str, str]], rows: tuple[tuple[str, str], ...]
) -> Finding:
    """Found in these responses, each with the bases of the rollout and the trainer."""
    sample = evidence.sample
    pairs, counts = np.unique(list(base_of.values()), axis=0, return_counts=True)
    base_q, base_p = pairs[np.argmax(counts)].tolist()
    wrong = []
    for side, base in (("rollout", base_q), ("trainer", base_p)):
        if base != "e":
            wrong.append(f"the {side}'s are to base {base}")
    inside_S = np.isin(np.arange(sample.num_responses), list(base_of))
    sentence = (
        f"In {len(base_of):,} of {sample.num_responses:,} responses the logarithms are not "
        f"natural: {' and '.join(wrong)}."
    )
    left_N = _natural_d_T(sample, base_of)[sample.index_N]
    part, share = Subset(inside_S, _telling_S(sample)), float(inside_S.mean())
    measure = "share of responses"
    return Finding(NAME, "found", share, measure, sentence, rows, left_N=left_N, part=part)


def _natural_d_T(sample: Sample, base_of: dict[int, tuple[str, str]]) -> np.ndarray:
    """log π − log μ, nats, with the logarithms of these responses made natural."""
    d_T = sample.logp_T - sample.logq_T
    for s, span in enumerate(sample.spans()):
        if s in base_of:
            base_q, base_p = base_of[s]
            natural_p_T = _BASES[base_p] * sample.logp_T[span]
            d_T[span] = natural_p_T - _BASES[base_q] * sample.logq_T[span]
    return d_T


def pair_of_bases(logq_N: np.ndarray, logp_N: np.ndarray) -> tuple[str, str] | None:
    """The two sides' bases in one response, if natural logarithms leave a gap and these do not."""
    before = float(np.abs(logp_N - logq_N).sum())
    telling_N = np.minimum(logq_N, logp_N) < _TELLING
    if telling_N.sum() < _FEWEST or before < _REAL * len(logq_N):
        return None
    best, pair = _LEFT * before, None
    for base_q, base_p in _PAIRS:
        natural_p_N = _BASES[base_p] * logp_N
        left_N = np.abs(natural_p_N - _BASES[base_q] * logq_N)
        near_N = left_N < _NEAR * np.abs(natural_p_N) + _NEAR / 2
        if near_N[telling_N].mean() >= _NEARLY_ALL and left_N.sum() < best:
            best, pair = float(left_N.sum()), (base_q, base_p)
    return pair


def _base_of_topk(logp_TK: np.ndarray | None) -> str | None:
    """The smallest base for which the ranks' probabilities never sum to above 1; with base 2
    also to most of 1. A single rank is below 1 to any base.
    """
    if logp_TK is None:
        return None
    first_T = logp_TK.max(axis=1, initial=-np.inf, where=np.isfinite(logp_TK))
    has_two_T = np.isfinite(logp_TK).sum(axis=1) >= 2
    logp_UK = logp_TK[has_two_T & (first_T < _UNCERTAIN)].astype(np.float64)
    if len(logp_UK) < _FEWEST_UNCERTAIN:
        return None
    for base, factor in _BASES.items():
        mass_U = np.where(np.isnan(logp_UK), 0, np.exp(factor * logp_UK)).sum(axis=1)
        if (mass_U > _MOST_MASS).mean() < _BROKEN:
            # Few ranks of natural logarithms sum to little to base 2, too
            is_covered = base != "2" or np.median(mass_U) > _COVERED
            return base if is_covered else None
    return None


def _base_by_model(own_T: np.ndarray, model: ModelAtHand, sample: Sample) -> str | None:
    """The base with which a side's log-probabilities match the model's; None if they never do."""
    logp_T = model.logp_T()
    telling_T = sample.counts_T & np.isfinite(logp_T) & (logp_T < _TELLING)
    if telling_T.sum() < _FEWEST_UNCERTAIN:
        return None
    own_M, logp_M = own_T[telling_T], logp_T[telling_T]
    for base, factor in _BASES.items():
        near_M = np.abs(factor * own_M - logp_M) < _NEAR * np.abs(logp_M) + _NEAR / 2
        if near_M.mean() >= _NEARLY_ALL:
            return base
    return None
