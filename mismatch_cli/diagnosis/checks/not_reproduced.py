"""Trainer log-probabilities that its own model does not reproduce, although it reproduces the
engine's.
"""

from types import ModuleType

import numpy as np

from mismatch_cli.diagnosis.checks import context_parallel, not_repeatable
from mismatch_cli.diagnosis.checks._read_again import MEASURE, readings_of
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.readings import KINDS, Readings

NAME, STAGE = "not-reproduced", 5
READS = True
TITLE = "The trainer's numbers are not its model's"
CAUSE = (
    "The trainer did not score the recorded tokens as they are: another prompt, other weights, "
    "other positions, or another attention mask."
)
CHANGE = (
    "Log the token ids, the mask and the position ids of the trainer's forward pass, and compare "
    "them with the trace; mismatch-cli rescore computes the correct numbers."
)
SOURCE = "elimination: on the recorded tokens the model gives the rollout's numbers"
_LEFT = 0.5
_BETTER = 0.1  # of the gap: how much more than this a named misreading may leave
_SIGNATURES = (context_parallel, not_repeatable)  # checks that name such a trainer


def check(evidence: Evidence) -> Finding:
    """Replace the trainer's numbers with the model's own, unless a named misreading explains
    them.
    """
    readings = readings_of(NAME, evidence)
    if isinstance(readings, Finding):
        return readings
    reading = readings.as_recorded
    rows: tuple[Row, ...] = tuple(
        (f"mean |Δlog p| of the {side} to the model, nats", nats)
        for side, nats in readings.distances.items()
    )
    if reading is None or reading.left > _LEFT:
        sentence = "The model read all of these responses as they are recorded."
        return Finding(NAME, "clear", measure=MEASURE, sentence=sentence, evidence=rows)
    if _left_by_others(readings, evidence) < reading.left + _BETTER:
        reason = "a cause that has a name explains it"
        return Finding(NAME, "clear", measure=MEASURE, evidence=rows, reason=reason)
    sentence = (
        "On the recorded tokens the model reproduces the rollout's log-probabilities, but not "
        "the trainer's."
    )
    rows += (("of the gap left with the model's own numbers", reading.left),)
    left_N = reading.left_N(evidence.sample)
    return Finding(NAME, "found", reading.left, MEASURE, sentence, rows, left_N=left_N)


def _left_by_others(readings: Readings, evidence: Evidence) -> float:
    """The smallest share of the gap that a named misreading or another check leaves."""
    lefts = []
    for kind in KINDS:
        other = readings.search(kind).reading
        if other is not None:
            lefts.append(other.left)
    # They may read, too, with what the searches leave of the budget
    lefts += [_left_by(signature, evidence) for signature in _SIGNATURES]
    return min(lefts)


def _left_by(signature: ModuleType, evidence: Evidence) -> float:
    """The share of the gap that a check leaves; 1 if it finds nothing."""
    left_N = signature.check(evidence).left_N
    total = float(np.abs(evidence.sample.d_N).sum())
    if left_N is None or not total:
        return 1.0
    return float(np.nansum(np.abs(left_N))) / total
