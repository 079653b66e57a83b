"""Left padding of the prompt that one side's attention sees, found by reading the responses
again.
"""

from mismatch_cli.diagnosis.checks._read_again import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "attended-padding", 4
READS = True
TITLE = "Padding that attention sees"
CAUSE = (
    "A batch was padded on the left and scored without its attention mask, or with a mask that "
    "covers the padding."
)
CHANGE = (
    "Pass the attention mask to every forward pass (position ids start at the prompt), or pack "
    "without padding."
)
SOURCE = (
    "TRL PR 2708 (no attention_mask in GRPO's scoring), maxtext PR 4016 (ratios of 200,000 to "
    "1.4 million)"
)


def check(evidence: Evidence) -> Finding:
    """Reads the responses after 1 to 64 padding tokens, and after prompts padded to one length,
    up to the first length that makes the gap larger.
    """
    return reading_finding(NAME, evidence, "padding", "after {} paddings")
