"""Log-probabilities of the trainer that its own model does not give on the recorded tokens, and the engine's does."""

from mismatch_cli.diagnosis.checks.position_encoding import MEASURE, readings_of
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "not-reproduced", 5
TITLE = "The trainer's numbers are not its model's"
CAUSE = (
    "The trainer scored something else than what is recorded: another prompt, other weights, other positions, or a "
    "forward pass with another mask."
)
CHANGE = (
    "Log the token ids, the mask and the position ids of the trainer's forward pass, and compare them with the trace; "
    "mismatch-cli rescore gives the numbers as they should be."
)
SOURCE = "the rule of elimination: the model at hand gives the rollout's numbers on the recorded tokens"
_LEFT = 0.5
_BETTER = 0.1  # of the gap: what a kind of reading that is known by name may leave more than this


def check(evidence: Evidence) -> Finding:
    """The model's own numbers in the trainer's place; not where another reading explains the trainer's."""
    readings = readings_of(NAME, evidence)
    if isinstance(readings, Finding):
        return readings
    reading = readings.as_recorded
    known = [] if reading is None else [r for r in (readings.positions, readings.padding, readings.prompt) if r]
    rows = (("the side that differs from the model at hand", readings.side),)
    if reading is None or any(other.left < reading.left + _BETTER for other in known) or reading.left > _LEFT:
        return Finding(NAME, "clear", measure=MEASURE, evidence=rows)
    sentence = "On the recorded tokens the model at hand gives the rollout's log-probabilities, and not the trainer's."
    rows += (("of the gap left with the model's own numbers", reading.left),)  # type: ignore[assignment]
    return Finding(NAME, "found", reading.left, MEASURE, sentence, rows, left_N=reading.left_N(evidence.sample))
