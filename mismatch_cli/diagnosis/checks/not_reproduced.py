"""Trainer log-probabilities that its own model does not reproduce, although it reproduces the
engine's.
"""

from mismatch_cli.diagnosis.checks.position_encoding import MEASURE, readings_of
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "not-reproduced", 5
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


def check(evidence: Evidence) -> Finding:
    """Replace the trainer's numbers with the model's own, unless a named misreading explains
    them.
    """
    readings = readings_of(NAME, evidence)
    if isinstance(readings, Finding):
        return readings
    reading = readings.as_recorded
    known = (
        []
        if reading is None
        else [r for r in (readings.positions, readings.padding, readings.prompt) if r]
    )
    rows = (("the side that differs from the model at hand", readings.side),)
    if (
        reading is None
        or any(other.left < reading.left + _BETTER for other in known)
        or reading.left > _LEFT
    ):
        return Finding(NAME, "clear", measure=MEASURE, evidence=rows)
    sentence = (
        "On the recorded tokens the model reproduces the rollout's log-probabilities, but not "
        "the trainer's."
    )
    rows += (("of the gap left with the model's own numbers", reading.left),)  # type: ignore[assignment]
    return Finding(
        NAME, "found", reading.left, MEASURE, sentence, rows, left_N=reading.left_N(evidence.sample)
    )
