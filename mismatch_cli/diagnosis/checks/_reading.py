"""A check of how one side read the responses: what the three of them share."""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.readings import Reading

NEEDS = "--trainer-model MODEL"
MEASURE = "of the gap left"


def reading_finding(name: str, evidence: Evidence, kind: str, what: str) -> Finding:
    """Whether a hypothesis of that kind makes one side's numbers; `what` names it in the sentence."""
    readings = evidence.readings
    if readings is None:
        return untested(name, "needs the trainer's model, to read the responses again", needs=NEEDS)
    if evidence.gap.value < evidence.usual.high:
        return Finding(name, "clear", sentence="The gap is what the precisions make: nothing to read again.")
    if readings.side is None:
        return Finding(name, "clear", reason="the model at hand agrees with neither side, or with both")
    reading: Reading | None = getattr(readings, kind)
    if reading is None:
        sentence = f"No {what} that was tried makes the {readings.side}'s numbers."
        return Finding(name, "clear", sentence=sentence)
    sentence = (
        f"With {reading.name} the model at hand gives the {reading.side}'s numbers, and as recorded the other side's."
    )
    rows = (("the side that differs", reading.side), ("it read the responses with", reading.name),
            ("of the gap left when that is undone", reading.left))  # fmt: skip
    return Finding(name, "found", reading.left, MEASURE, sentence, rows, left_N=left_N(evidence, reading))


def left_N(evidence: Evidence, reading: Reading) -> np.ndarray:
    """The gap without the other reading; where that was not scored, as much smaller as it is where it was."""
    sample = evidence.sample
    left_N = reading.left_T[sample.kept]
    return np.where(np.isfinite(left_N), left_N, sample.d_N * min(1.0, reading.left))
