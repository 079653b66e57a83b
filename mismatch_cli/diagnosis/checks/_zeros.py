"""Placeholders of exactly 0.0, and which of three faults they are by where they stand."""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis.counts import UNCERTAIN
from mismatch_cli.diagnosis.evidence import Evidence
from mismatch_cli.diagnosis.finding import Finding
from mismatch_cli.diagnosis.sample import Sample

_MOSTLY = 0.7  # of the placeholders, at the last token or in runs, to be called that
_WHERE = {"end-of-sequence": "last", "masked-tokens": "in_runs"}


def zeros_finding(evidence: Evidence, check: str) -> Finding | None:
    """The finding of `check` if the exact zeros are its kind, None if there are none of it."""
    found = {side: zeros for side, zeros in evidence.counts.zeros.items() if zeros.tokens}
    if not found:
        return None
    tokens = sum(zeros.tokens for zeros in found.values())
    kind = next(
        (name for name, where in _WHERE.items() if sum(getattr(z, where) for z in found.values()) >= _MOSTLY * tokens),
        "placeholders",
    )
    if kind != check:
        return None
    all_tokens = max((side.tokens for side in evidence.counts.sides.values()), default=tokens)
    rows: list[tuple[str, float | int | str | None]]
    rows = [(f"{side}: exactly 0.0, the other side uncertain", zeros.tokens) for side, zeros in found.items()]
    rows += [(f"{side}: mean |Δlog p| there, nats", zeros.gap / zeros.tokens) for side, zeros in found.items()]
    sentence = f"{tokens:,} tokens have a log-probability of exactly 0.0 where the other side is far from certain."
    measure = "share of tokens, where the other side is uncertain"
    left_N = evidence.sample.left_without(zeros_T(evidence.sample))
    return Finding(check, "found", tokens / all_tokens, measure, sentence, tuple(rows), left_N=left_N)


def zeros_T(sample: Sample) -> np.ndarray:
    """Exact zeros of the sample, on a side that has some which the other one is far from."""
    zeros = [logp_T == 0 for logp_T in (sample.logq_T, sample.logp_T)]
    named = [zero_T for zero_T in zeros if (zero_T & (sample.abs_d_T > -UNCERTAIN)).any()]
    return np.any(named, axis=0) if named else np.zeros(len(sample.logq_T), dtype=bool)
