"""Values that no log-probability can have: above 0, not a number, or −inf for a token that was
sampled.
"""

import numpy as np

from mismatch_cli.diagnosis.checks.truncated_support import trainer_truncates
from mismatch_cli.diagnosis.counts import ROUNDING
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.power import clear, of_values

NAME, STAGE = "values", 1
TITLE = "Impossible values"
CAUSE = (
    "A log-softmax in low precision (log-probabilities above 0), an overflow (not a number, −inf), "
    "a token that is masked out of one side's softmax, or broken bookkeeping."
)
CHANGE = (
    "Compute the log-softmax in float32 on that side; if values are not a number, look for fp16 "
    "overflow in its logits."
)
SOURCE = "maxtext PR 5231 (positive log-probs up to +0.125), NeMo-RL 2180 (KL NaN)"
_NEARLY_ALL = 0.9  # of the tokens with −inf


def check(evidence: Evidence) -> Finding:
    """Count impossible values over every token of the trace; one is enough.

    A trainer that truncates may call a sampled token impossible, which is another fault.
    """
    rows: list[Row] = []
    wrong = tokens = 0
    may_be_impossible = ("logp_trainer", "logp_recomputed") if trainer_truncates(evidence) else ()
    for side, counts in evidence.counts.sides.items():
        tokens += counts.tokens
        wrong_by_kind = {"above 0": counts.above_zero, "not a number": counts.not_a_number}
        if side not in may_be_impossible:
            wrong_by_kind["−inf for a sampled token"] = counts.impossible
        for kind, count in wrong_by_kind.items():
            wrong += count
            if count:
                rows.append((f"{side}: {kind}", count))
        if counts.above_zero:
            rows.append((f"{side}: largest, nats", counts.largest))
    share = wrong / tokens if tokens else None
    if not wrong:
        return clear(NAME, share, "share of values", of_values(tokens))
    sentence = (
        f"{wrong:,} of {tokens:,} values cannot be log-probabilities; they are excluded from "
        f"every number.{_at_the_end(evidence)}"
    )
    above_T = np.maximum(evidence.sample.logq_T, evidence.sample.logp_T) > ROUNDING
    left_N = evidence.sample.left_without(above_T)
    return Finding(NAME, "found", share, "share of values", sentence, tuple(rows), left_N=left_N)


def _at_the_end(evidence: Evidence) -> str:
    """Whether the impossible tokens are those that end a response."""
    sample = evidence.sample
    impossible_T = np.isneginf(sample.logq_T) | np.isneginf(sample.logp_T)
    if not impossible_T.any() or sample.last_T[impossible_T].mean() < _NEARLY_ALL:
        return ""
    return " They are at the end of responses: one side masks the end-of-sequence token."
