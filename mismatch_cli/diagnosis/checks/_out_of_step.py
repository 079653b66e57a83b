"""Responses whose two columns do not fit as they stand: what both ways of that share."""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence

_FEWEST, _SHARE = 2, 0.01


def too_few(chosen_S: np.ndarray) -> bool:
    """Whether so few responses may fit better with a lag by chance."""
    return bool(chosen_S.sum() < max(_FEWEST, _SHARE * len(chosen_S)))


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Every token of the responses that fit better with a lag, as a whole or from some token on."""
    return evidence.alignment.better_S[evidence.sample.response_T]
