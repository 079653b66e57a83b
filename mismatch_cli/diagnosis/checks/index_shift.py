"""Log-probabilities that belong to the token before or after."""

import numpy as np

from mismatch_cli.diagnosis.alignment import SHORTEST, in_step_N, lag_scan, real_gap
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.power import clear, of_responses, varied_S

__all__ = ["check", "spoiled_T"]
NAME, STAGE = "index-shift", 2
TITLE = "Shifted by some tokens"
CAUSE = (
    "One side's log-probabilities are stored one position off (the logit at t predicts token t + "
    "1)."
)
CHANGE = (
    "Shift that side by the reported lag before storing it; slice both sides with the same bounds."
)
SOURCE = "ms-swift PR 8196 (shift by one)"


def check(evidence: Evidence) -> Finding:
    """Find responses whose columns match only with a lag."""
    alignment, sample = evidence.alignment, evidence.sample
    shifted_S = alignment.shifted_S
    count = int(shifted_S.sum())
    share = count / max(1, sample.num_responses)
    least_gap = real_gap(sample)
    scan: list[Row] = []
    for lag, gap in lag_scan(sample, alignment).items():
        scan.append((f"mean gap at lag {lag:+d}, nats".replace("-", "−"), gap))
    scan.append(("least gap of a response that may be shifted, nats", least_gap))
    measure = "share of responses"
    testable_S = varied_S(sample, SHORTEST, least_gap)
    if too_few(shifted_S):
        return clear(NAME, share, measure, of_responses(testable_S), tuple(scan))
    left_N = in_step_N(sample, alignment, shifted_S)
    if _is_by_chance(evidence, shifted_S, left_N):
        reason = "another order of the tokens: a lag fits few of the responses, and not well"
        return Finding(NAME, "clear", share, measure, evidence=tuple(scan), reason=reason)
    lag = most_frequent(alignment.lag_S[shifted_S])
    sentence = (
        f"In {count:,} of {sample.num_responses:,} responses π[t{lag:+d}] fits μ[t], and π[t] "
        "does not."
    )
    rows = (("lag, tokens", lag), *scan)
    part = Subset(shifted_S, testable_S)
    return Finding(NAME, "found", share, measure, sentence, rows, left_N=left_N, part=part)


_FEWEST, _SHARE = 2, 0.01
_MOST, _WELL = 0.5, 0.2  # of the responses that may be shifted; of their gap that is left


def _is_by_chance(evidence: Evidence, shifted_S: np.ndarray, left_N: np.ndarray) -> bool:
    """Whether most responses that disagree fit no lag, and the others fit one poorly: tokens in
    another order, of which some lag brings a few into step.
    """
    sample = evidence.sample
    misfit_S = evidence.alignment.gap_S >= real_gap(sample)
    if shifted_S.sum() >= _MOST * misfit_S.sum():
        return False
    shifted_N = shifted_S[sample.response_N] & np.isfinite(left_N)
    return bool(np.abs(left_N[shifted_N]).sum() > _WELL * np.abs(sample.d_N[shifted_N]).sum())


def too_few(chosen_S: np.ndarray) -> bool:
    """Whether this few responses may be chosen by chance."""
    return bool(chosen_S.sum() < max(_FEWEST, _SHARE * len(chosen_S)))


def most_frequent(lag_S: np.ndarray) -> int:
    """The lag of most responses; of equally many, the smallest."""
    lag_V, count_V = np.unique(lag_S, return_counts=True)
    return int(lag_V[np.argmax(count_V)])


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Every token of responses that fit better with a lag, from the start or from some token on."""
    return evidence.alignment.better_S[evidence.sample.response_T]
