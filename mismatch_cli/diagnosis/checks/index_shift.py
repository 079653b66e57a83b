"""Log-probabilities that belong to the token before or after."""

import numpy as np

from mismatch_cli.diagnosis.alignment import in_step_N, lag_scan, real_gap
from mismatch_cli.diagnosis.evidence import Evidence, Finding

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
        return Finding(NAME, "clear", share, "share of responses", evidence=tuple(scan.items()))
    lag = most_frequent(alignment.lag_S[shifted_S])
    left_N = in_step_N(sample, alignment, shifted_S)
    sentence = (
        f"In {count:,} of {sample.num_responses:,} responses π[t{lag:+d}] fits μ[t], and π[t] "
        "does not."
    )
    rows = (("lag, tokens", lag), *scan.items())
    return Finding(NAME, "found", share, "share of responses", sentence, rows, left_N=left_N)


_FEWEST, _SHARE = 2, 0.01


def too_few(chosen_S: np.ndarray) -> bool:
    """Whether this few responses may be chosen by chance."""
    return bool(chosen_S.sum() < max(_FEWEST, _SHARE * len(chosen_S)))


def most_frequent(lag_S: np.ndarray) -> int:
    lag_V, count_V = np.unique(lag_S, return_counts=True)
    return int(lag_V[np.argmax(count_V)])


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Every token of responses that fit better with a lag, from the start or from some token on."""
    return evidence.alignment.better_S[evidence.sample.response_T]
