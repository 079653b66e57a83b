"""The lattice that logits rounded to bfloat16 leave in the gap: that precision's floor, not a
bug.
"""

from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.power import clear

NAME, STAGE = "logit-lattice", 7
TITLE = "Rounded logits"
CAUSE = (
    "bfloat16 logits differ by whole steps of 1/16 to 1/2 nats; that is the noise of bfloat16, "
    "not a fault."
)
CHANGE = (
    "A float32 LM head on both sides removes the rounding; float16 weights shrink what is left."
)
SOURCE = "arXiv 2602.04879, Fig. 2; arXiv 2510.26788 (FP16)"


def check(evidence: Evidence) -> Finding:
    """Find peaks of the log-odds gap at bfloat16 spacings, as the report draws them."""
    lines = evidence.lattice.result()
    if not lines:
        power = "a line at a step of bfloat16, 1/16 to 1/2 nats"
        return clear(NAME, 0.0, "share of tokens in the lines", power)
    strongest = max(lines, key=lambda line: line.share)
    share = sum(line.share for line in lines)
    rows: list[Row] = []
    for line in lines:
        rows.append((f"line at {line.spacing:g} nats: times the valley before it", line.rise))
    sentence = (
        f"The log-odds gap piles up at steps of {strongest.spacing:g} nats: logits rounded to "
        "bfloat16."
    )
    return Finding(NAME, "found", share, "share of tokens in the lines", sentence, tuple(rows))
