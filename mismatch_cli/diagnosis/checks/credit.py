"""Advantages that do not follow the rewards of the responses to one prompt."""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.power import clear, percent
from mismatch_cli.metrics.estimate import standard_error, without_groups

NAME, STAGE = "credit", 2
TITLE = "Advantages that do not follow the rewards"
CAUSE = (
    "Rewards or advantages were put beside other responses (a batch sorted, shuffled or padded in "
    "between), or their sign is turned: the update learns from the wrong responses, whatever the "
    "gap."
)
CHANGE = (
    "Carry reward, advantage and tokens of a response through every reordering under one key, and "
    "compute advantages after the last one."
)
SOURCE = "batches reordered between reward and advantage (balancing by length, dynamic sampling)"
_FEWEST_PAIRS, _FEWEST_GROUPS = 30, 8
# Of the pairs: a reward that is logged before a length penalty or a KL term turns a few
_MOST_AGAINST, _TURNED = 0.2, 0.8
_Z = 3.0


def check(evidence: Evidence) -> Finding:
    """Count pairs of responses to one prompt and step of which the one with the smaller reward has
    the larger advantage.
    """
    credit = evidence.credit
    pairs = credit.pairs()
    usable_G = pairs.count_G > 0
    count, groups = int(pairs.count_G.sum()), int(usable_G.sum())
    if count < _FEWEST_PAIRS or groups < _FEWEST_GROUPS:
        reason = "too few prompts with different rewards and one advantage for each response"
        return untested(NAME, reason)
    against_G = pairs.against_G[usable_G]
    _, without_G = without_groups(np.true_divide, against_G, pairs.count_G[usable_G])
    error = standard_error(without_G)
    permuted = int(pairs.permuted_G[usable_G].sum())
    rows = (
        ("pairs of responses with different rewards", count),
        ("of these, the smaller reward has the larger advantage", float(against_G.sum())),
        ("prompts compared", groups),
        ("prompts whose advantages fit in another order", permuted),
        ("responses with several advantages, left out", credit.varying),
    )
    if not pairs.share - _Z * error > _MOST_AGAINST:
        power = f"it in ≥ {percent(_MOST_AGAINST + _Z * error)} of the pairs"
        return clear(NAME, pairs.share, "share of pairs", power, rows)
    if pairs.share > _TURNED:
        diagnosis = "their sign is turned"
    elif permuted >= _TURNED * float((against_G > 0).sum()):
        diagnosis = (
            "they fit in another order, so they belong to other responses of the same prompt"
        )
    else:
        diagnosis = "they belong to other responses"
    sentence = (
        f"In {against_G.sum():,.0f} of {count:,} pairs of responses to one prompt the smaller "
        f"reward has the larger advantage: {diagnosis}."
    )
    return Finding(NAME, "found", pairs.share, "share of pairs", sentence, rows)
