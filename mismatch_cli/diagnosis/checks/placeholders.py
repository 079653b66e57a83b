"""Placeholders: one exact value, such as 0.0 or −100, where a log-probability should have been."""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis.checks._zeros import zeros_finding, zeros_T
from mismatch_cli.diagnosis.evidence import Evidence
from mismatch_cli.diagnosis.finding import Finding

NAME, STAGE = "placeholders", 1
TITLE = "Placeholders instead of log-probabilities"
CAUSE = "A default value was written where the engine returned nothing; the ratio of such a token is meaningless."
CHANGE = "Ask the engine for log-probabilities on every path, also after tool calls, and fail where one is missing."
SOURCE = "NeMo-RL PR 4218 (0.0 by default: ratio 4.8e4), verl-recipe dynamo (12 of 6,944 real)"
_FEWEST, _SHARE = 16, 1e-3
_APART = 0.5  # nats between a placeholder and what the other side says
_CERTAIN = -0.05  # nats: values above it repeat by themselves


def check(evidence: Evidence) -> Finding:
    """Exact zeros over every token; another value that repeats while the other side varies, in the sample."""
    if found := zeros_finding(evidence, NAME):
        return found
    sample = evidence.sample
    logq_N, logp_N = sample.logq_T[sample.kept], sample.logp_T[sample.kept]
    for side, own_N, other_N in (("logp_rollout", logq_N, logp_N), ("logp_trainer", logp_N, logq_N)):
        value, count = _most_suspicious(own_N, other_N)
        if count:
            share = count / len(own_N)
            sentence = f"{count:,} sampled tokens have {side} = {value:g} exactly, whatever the other side says."
            rows = ((f"{side}: the value, nats", value), ("tokens of the sample with it", count))
            left_N = np.where(own_N == value, np.nan, sample.d_N)
            return Finding(NAME, "found", share, "share of tokens", sentence, rows, left_N=left_N)
    return Finding(NAME, "clear", 0.0, "share of tokens")


def spoiled_T(evidence: Evidence) -> np.ndarray:
    return zeros_T(evidence.sample)


def _most_suspicious(own_N: np.ndarray, other_N: np.ndarray) -> tuple[float, int]:
    """A value that many tokens share exactly and that the other side does not confirm, and how many do."""
    value_V, of_N, count_V = np.unique(own_N, return_inverse=True, return_counts=True)
    gap_V = np.bincount(of_N, weights=np.abs(own_N - other_N), minlength=len(value_V))
    often_V = (count_V >= max(_FEWEST, _SHARE * len(own_N))) & (value_V < _CERTAIN)
    suspicious_V = often_V & (gap_V > _APART * count_V)
    if not suspicious_V.any():
        return 0.0, 0
    worst = int(np.argmax(np.where(suspicious_V, gap_V, 0)))
    return float(value_V[worst]), int(count_V[worst])
