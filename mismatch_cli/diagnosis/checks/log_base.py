"""Logarithms to a base other than e, on one side or both."""

import numpy as np

from mismatch_cli.diagnosis.checks.index_shift import too_few
from mismatch_cli.diagnosis.evidence import Evidence, Finding
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
    bases = {
        "rollout": _base_of_topk(sample.topk_logq_TK),
        "trainer": _base_of_topk(sample.topk_logp_TK),
    }
    if evidence.model is not None:
        bases = {
            side: base or _base_by_model(evidence.model, sample, side)
            for side, base in bases.items()
        }
    rows = tuple(
        (f"{side}: base, by its own numbers", base or "not known") for side, base in bases.items()
    )
    if all(base not in (None, "e") for base in bases.values()):
        named_bases = (str(bases["rollout"]), str(bases["trainer"]))
        return _finding(evidence, dict.fromkeys(range(sample.num_responses), named_bases), rows)
    found = {}
    for s, span in enumerate(sample.spans()):
        counts_T = sample.counts_T[span]
        if pair := pair_of_bases(sample.logq_T[span][counts_T], sample.logp_T[span][counts_T]):
            found[s] = pair
    chosen_S = np.isin(np.arange(sample.num_responses), list(found))
    if too_few(chosen_S):
        share = float(chosen_S.mean()) if len(chosen_S) else 0.0
        return clear(NAME, share, "share of responses", of_responses(_telling_S(sample)), rows)
    return _finding(evidence, found, rows)


def _telling_S(sample: Sample) -> np.ndarray:
    """The responses with enough uncertain tokens."""
    telling_T = sample.counts_T & (sample.logq_T < _TELLING)
    at = sample.response_T[telling_T]
    return np.asarray(np.bincount(at, minlength=sample.num_responses) >= _FEWEST)


def _finding(
    evidence: Evidence, base_of: dict[int, tuple[str, str]], rows: tuple[tuple[str, str], ...]
) -> Finding:
    sample = evidence.sample
    left_T = sample.logp_T - sample.logq_T
    for s, span in enumerate(sample.spans()):
        if s in base_of:
            base_q, base_p = base_of[s]
            left_T[span] = (
                _BASES[base_p] * sample.logp_T[span] - _BASES[base_q] * sample.logq_T[span]
            )
    pairs, counts = np.unique(list(base_of.values()), axis=0, return_counts=True)
    base_q, base_p = pairs[np.argmax(counts)].tolist()
    sides = {"rollout": base_q, "trainer": base_p}
    named = " and ".join(
        f"the {side}'s are to base {base}" for side, base in sides.items() if base != "e"
    )
    share = len(base_of) / sample.num_responses
    sentence = (
        f"In {len(base_of):,} of {sample.num_responses:,} responses the logarithms are not "
        f"natural: {named}."
    )
    return Finding(
        NAME, "found", share, "share of responses", sentence, rows, left_N=left_T[sample.index_N]
    )


def pair_of_bases(logq_N: np.ndarray, logp_N: np.ndarray) -> tuple[str, str] | None:
    """The two sides' bases in one response, if natural logarithms leave a gap and these do not."""
    before = float(np.abs(logp_N - logq_N).sum())
    telling_N = np.minimum(logq_N, logp_N) < _TELLING
    if telling_N.sum() < _FEWEST or before < _REAL * len(logq_N):
        return None
    best, pair = _LEFT * before, None
    for base_q, base_p in _PAIRS:
        p_N, q_N = _BASES[base_p] * logp_N, _BASES[base_q] * logq_N
        left_N = np.abs(p_N - q_N)
        near = (left_N[telling_N] < _NEAR * np.abs(p_N[telling_N]) + _NEAR / 2).mean()
        if near >= _NEARLY_ALL and left_N.sum() < best:
            best, pair = float(left_N.sum()), (base_q, base_p)
    return pair


_PAIRS = (("2", "e"), ("e", "2"), ("10", "e"), ("e", "10"), ("2", "10"), ("10", "2"))


def _base_of_topk(logp_TK: np.ndarray | None) -> str | None:
    """The smallest base for which the ranks' probabilities never sum to above 1; with base 2
    also to most of 1.
    """
    if logp_TK is None:
        return None
    first_T = logp_TK.max(axis=1, initial=-np.inf, where=np.isfinite(logp_TK))
    logp_UK = logp_TK[np.isfinite(first_T) & (first_T < _UNCERTAIN)].astype(np.float64)
    if len(logp_UK) < _FEWEST_UNCERTAIN:
        return None
    for name, factor in _BASES.items():
        mass_U = np.where(np.isnan(logp_UK), 0, np.exp(factor * logp_UK)).sum(axis=1)
        if (mass_U > _MOST_MASS).mean() < _BROKEN:
            return name if name != "2" or np.median(mass_U) > _COVERED else None
    return None


def _base_by_model(model: ModelAtHand, sample: Sample, side: str) -> str | None:
    """The base with which a side's log-probabilities match the model's; None if they never do."""
    own_T = sample.logq_T if side == "rollout" else sample.logp_T
    logp_T = model.logp_T()
    telling_T = sample.counts_T & np.isfinite(logp_T) & (logp_T < _TELLING)
    if telling_T.sum() < _FEWEST_UNCERTAIN:
        return None
    for name, factor in _BASES.items():
        left_N = np.abs(factor * own_T[telling_T] - logp_T[telling_T])
        if (left_N < _NEAR * np.abs(logp_T[telling_T]) + _NEAR / 2).mean() >= _NEARLY_ALL:
            return name
    return None
