"""A gap that no check explains and that is far above the usual for the trace's precisions."""

from mismatch_cli.diagnosis.evidence import Evidence, Finding

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
SOURCE = "the usual gap of each precision: mismatch_cli/verdict/reference.toml"


def check(evidence: Evidence) -> Finding:
    """Compare the mean gap left once all causes found are undone with twice the upper end of the
    usual range.
    """
    gap, usual = evidence.gap, evidence.usual
    rows = (
        ("mean |Δlog p| left, nats", gap.value), ("its standard error over prompts", gap.error),
        (f"usual for {usual.who}, from", usual.low), ("to", usual.high),
    )  # fmt: skip
    measure = "mean nats left per token"
    if not evidence.gap_is_too_large:
        return Finding(NAME, "clear", gap.value, measure, evidence=rows)
    sentence = (
        f"{gap.value:.2g} nats per token are left on average; {usual.who} is usually {usual.text}."
    )
    return Finding(
        NAME, "found", gap.value, measure, sentence, rows, left_N=0 * evidence.sample.d_N
    )
