"""Values that no log-probability can have: above 0, not a number, or −inf for a token that was
sampled.
"""

import numpy as np

from mismatch_cli.diagnosis.counts import ROUNDING
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row

NAME, STAGE = "values", 1
TITLE = "Impossible values"
CAUSE = (
    "A log-softmax in low precision (log-probabilities above 0), an overflow (not a number), or "
    "broken bookkeeping."
)
CHANGE = (
    "Compute the log-softmax in float32 on that side; if values are not a number, look for fp16 "
    "overflow in its logits."
)
SOURCE = "maxtext PR 5231 (positive log-probs up to +0.125), NeMo-RL 2180 (KL NaN)"


def check(evidence: Evidence) -> Finding:
    """Count impossible values over every token of the trace; one is enough."""
    rows: list[Row] = []
    wrong = tokens = 0
    for side, counts in evidence.counts.sides.items():
        impossible = counts.impossible if side == "logp_rollout" else 0
        wrong, tokens = (
            wrong + counts.not_a_number + counts.above_zero + impossible,
            tokens + counts.tokens,
        )
        found = (("above 0", counts.above_zero), ("not a number", counts.not_a_number),
                 ("−inf for a sampled token", impossible))  # fmt: skip
        rows += [(f"{side}: {what}", count) for what, count in found if count]
        if counts.above_zero:
            rows.append((f"{side}: largest, nats", counts.largest))
    share = wrong / tokens if tokens else None
    if not wrong:
        return Finding(NAME, "clear", share, "share of values")
    sentence = (
        f"{wrong:,} of {tokens:,} values cannot be log-probabilities; they are excluded from "
        "every number."
    )
    above_T = np.maximum(evidence.sample.logq_T, evidence.sample.logp_T) > ROUNDING
    left_N = evidence.sample.left_without(above_T)
    return Finding(NAME, "found", share, "share of values", sentence, tuple(rows), left_N=left_N)
