"""Text that was tokenised again: the sides agree up to some token, and then refer to different
tokens.
"""

import numpy as np

from mismatch_cli.diagnosis.alignment import SHORTEST, in_step_N, real_gap
from mismatch_cli.diagnosis.checks.index_shift import most_frequent, spoiled_T, too_few
from mismatch_cli.diagnosis.evidence import Evidence, Finding
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.power import clear, of_responses, varied_S

__all__ = ["check", "spoiled_T"]
NAME, STAGE = "retokenised", 2
TITLE = "Retokenised text"
CAUSE = (
    "The trainer tokenised the response's text again, or a chat template changed it: from the "
    "first differing token on, the two sides refer to different tokens."
)
CHANGE = (
    "Pass the engine's token ids to the trainer (vLLM: return_token_ids); never decode and "
    "re-encode them."
)
SOURCE = "vLLM blog 2025-10-22, verl 3720, rllm PR 272, ART 726"


def check(evidence: Evidence) -> Finding:
    """Find responses that match unshifted up to some token, and with a lag from there on."""
    alignment, sample = evidence.alignment, evidence.sample
    broken_S = alignment.broken_S
    count = int(broken_S.sum())
    share = count / max(1, sample.num_responses)
    testable_S = varied_S(sample, 2 * SHORTEST, real_gap(sample))
    if too_few(broken_S):
        return clear(NAME, share, "share of responses", of_responses(testable_S))
    left_N = in_step_N(sample, alignment, broken_S)
    sentence = (
        f"{count:,} of {sample.num_responses:,} responses agree up to some token and are shifted "
        "from there on."
    )
    rows = (
        ("responses", count),
        ("first shifted token, median", float(np.median(alignment.from_S[broken_S]))),
        ("most frequent lag, tokens", most_frequent(alignment.lag_S[broken_S])),
    )
    part = Subset(broken_S, testable_S)
    return Finding(
        NAME, "found", share, "share of responses", sentence, rows, left_N=left_N, part=part
    )
