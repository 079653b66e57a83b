"""Log-probabilities that belong to the token before or after."""

import numpy as np

from mismatch_cli.diagnosis.alignment import SHORTEST, in_step_N, lag_scan, real_gap
from mismatch_cli.diagnosis.evidence import Evidence, Finding
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
    scan = {
        f"mean gap at lag {lag:+d}, nats".replace("-", "−"): gap
        for lag, gap in lag_scan(sample, alignment).items()
    }
    scan["least gap of a response that may be shifted, nats"] = real_gap(sample)
    if too_few(shifted_S):
        power = of_responses(varied_S(sample, SHORTEST, real_gap(sample)))
        return clear(NAME, share, "share of responses", power, tuple(scan.items()))
    lag = most_frequent(alignment.lag_S[shifted_S])
    left_N = in_step_N(sample, alignment, shifted_S)
    if _is_by_chance(evidence, shifted_S, left_N):
        reason = "another order of the tokens: a lag fits few of the responses, and not well"
        return Finding(
            NAME, "clear", share, "share of responses", evidence=tuple(scan.items()), reason=reason
        )
    sentence = (
        f"In {count:,} of {sample.num_responses:,} responses π[t{lag:+d}] fits μ[t], and π[t] "
        "does not."
    )
    rows = (("lag, tokens", lag), *scan.items())
    return Finding(NAME, "found", share, "share of responses", sentence, rows, left_N=left_N)


_FEWEST, _SHARE = 2, 0.01
_MOST, _WELL = 0.5, 0.2  # of the responses that may be shifted; of their gap that is left


def _is_by_chance(evidence: Evidence, shifted_S: np.ndarray, left_N: np.ndarray) -> bool:
    """Whether most responses that disagree fit no lag, and the others only fit one so so: tokens
    in another order, of which some lag brings a part into step.
    """
    sample = evidence.sample
    misfit_S = evidence.alignment.gap_S >= real_gap(sample)
    if shifted_S.sum() >= _MOST * misfit_S.sum():
        return False
    inside_N = shifted_S[sample.response_N] & np.isfinite(left_N)
    return bool(np.abs(left_N[inside_N]).sum() > _WELL * np.abs(sample.d_N[inside_N]).sum())


def too_few(chosen_S: np.ndarray) -> bool:
    """Whether this few responses may be chosen by chance."""
    return bool(chosen_S.sum() < max(_FEWEST, _SHARE * len(chosen_S)))


def most_frequent(lag_S: np.ndarray) -> int:
    lag_V, count_V = np.unique(lag_S, return_counts=True)
    return int(lag_V[np.argmax(count_V)])


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Every token of responses that fit better with a lag, from the start or from some token on."""
    return evidence.alignment.better_S[evidence.sample.response_T]
