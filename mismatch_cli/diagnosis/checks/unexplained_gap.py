"""A gap that no check explains and that is larger than expected of the trace."""

from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.power import clear

NAME, STAGE = "unexplained-gap", 8
TITLE = "A gap that nothing explains"
CAUSE = (
    "Something that log-probabilities alone cannot distinguish: weights of another step, another "
    "prompt, other positions or attended padding on one side, another attention implementation."
)
CHANGE = (
    "Give each untested check what it needs (the table below says what to type); then change one "
    "setting at a time and compare the traces with mismatch-cli compare."
)
SOURCE = "the steps of the trace's own logits, or other models: mismatch_cli/limits/expected.py"


def check(evidence: Evidence) -> Finding:
    """Compare the mean gap left once all causes found are undone with what is expected without a
    fault.
    """
    gap, expected = evidence.gap, evidence.expected
    rows: tuple[Row, ...] = (
        ("mean |Δlog p| left, nats", gap.value), ("its standard error over prompts", gap.error),
        (f"expected for {expected.who}, from", expected.low), ("to", expected.high),
        ("read from", expected.basis), ("too large from", evidence.resolution),
    )  # fmt: skip
    measure = "mean nats left per token"
    if not evidence.gap_is_too_large:
        power = f"a gap of ≥ {evidence.resolution:.2g} nats"
        return clear(NAME, gap.value, measure, power, rows)
    sentence = (
        f"{gap.value:.2g} nats per token are left on average, where {expected.low:.2g} to "
        f"{expected.high:.2g} are expected of {expected.who} ({expected.basis})."
    )
    left_N = 0 * evidence.sample.d_N
    return Finding(NAME, "found", gap.value, measure, sentence, rows, left_N=left_N)
