"""The gap that nothing explains, where it is far above what the precisions of the trace make."""

from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "unexplained-gap", 8
TITLE = "A gap that nothing explains"
CAUSE = (
    "Something that the tokens alone cannot tell apart: weights of another step, another prompt, other positions or "
    "padding that is attended on one side, another implementation of attention."
)
CHANGE = (
    "Give each check that was not tested what it needs (the table below says what to type); then change one setting at "
    "a time and hold the traces beside each other with mismatch-cli compare."
)
SOURCE = "the usual gap of each precision: mismatch_cli/verdict/reference.toml"


def check(evidence: Evidence) -> Finding:
    """The mean gap, once every cause that was found is undone, against twice the upper end of what is usual."""
    gap, usual = evidence.gap, evidence.usual
    rows = (
        ("mean |Δlog p| that is left, nats", gap.value), ("its standard error over prompts", gap.error),
        (f"usual for {usual.who}, from", usual.low), ("to", usual.high),
    )  # fmt: skip
    measure = "nats that are left on an average token"
    if not evidence.gap_is_too_large:
        return Finding(NAME, "clear", gap.value, measure, evidence=rows)
    sentence = f"{gap.value:.2g} nats are left on an average token; {usual.who} is usually {usual.text}."
    return Finding(NAME, "found", gap.value, measure, sentence, rows, left_N=0 * evidence.sample.d_N)
