"""Positions that the two sides encode differently, found by reading the responses again."""

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.readings import Reading, Readings

NAME, STAGE = "position-encoding", 4
TITLE = "Another position encoding"
CAUSE = (
    "One side does not use the RoPE base or scaling (linear, NTK, YaRN) of the model's "
    "configuration."
)
CHANGE = (
    "Compare rope_theta and rope_scaling (rope_parameters) as resolved on both sides; pass the "
    "same --hf-overrides to the engine, or remove them on both sides."
)
SOURCE = (
    "prime-rl PR 2802 (YaRN's attention factor in vLLM: 0.030 against 0.0015), vLLM 27722, vLLM "
    "PR 43419"
)


def check(evidence: Evidence) -> Finding:
    """Read the responses with other RoPE bases and scalings: does one reproduce the side that
    differs?
    """
    return reading_finding(NAME, evidence, "positions", "base or scaling of RoPE")


def reading_finding(name: str, evidence: Evidence, kind: str, what: str) -> Finding:
    """Whether a hypothesis of that kind reproduces one side; `what` names it in the sentence."""
    readings = readings_of(name, evidence)
    if isinstance(readings, Finding):
        return readings
    if readings.side is None:
        return Finding(name, "clear", reason="the model agrees with neither side, or with both")
    reading: Reading | None = getattr(readings, kind)
    if reading is None and readings.is_cut_short:
        return untested(name, readings.budget_spent)
    if reading is None:
        sentence = f"No {what} that was tried reproduces the {readings.side}'s numbers."
        return Finding(name, "clear", sentence=sentence)
    sentence = (
        f"With {reading.name} the model reproduces the {reading.side}'s numbers; as recorded, "
        "the other side's."
    )
    rows = (("the side that differs", reading.side), ("it read the responses with", reading.name),
            (f"{MEASURE} when that is undone", reading.left))  # fmt: skip
    return Finding(
        name, "found", reading.left, MEASURE, sentence, rows, left_N=reading.left_N(evidence.sample)
    )


MEASURE = "of the gap left"


def readings_of(name: str, evidence: Evidence) -> Readings | Finding:
    """How the model reads the responses; or the check's finding if there is no model."""
    if evidence.readings is None:
        reason = "needs the trainer's model to read the responses again"
        return untested(name, reason, needs="--trainer-model MODEL")
    return evidence.readings
