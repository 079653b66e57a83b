"""Sampled tokens whose log-probability differs from that in the same side's top-K column."""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.power import clear, percent

NAME, STAGE, EXACT, NEEDS_A_GAP = "columns-at-odds", 5, True, False
TITLE = "One side's columns contradict each other"
CAUSE = (
    "The sampled and the top-K log-probabilities are not of the same token, request or stage: "
    "one may be from before temperature and truncation, or be shifted or scaled."
)
CHANGE = (
    "Take both from the same response of the engine (vLLM: --logprobs-mode processed_logprobs "
    "for both), and slice both with the same bounds."
)
SOURCE = "vLLM's logprobs_mode (raw and processed log-probabilities of one request differ)"
_SHARE = 1e-3
_APART, _FEW_APART = 0.05, 0.05  # nats, and of the tokens
_EXPLAINS = 0.5  # of the gap that must go with the top-K values, if the sampled ones are wrong


def check(evidence: Evidence) -> Finding:
    """Compare, per side, the sampled token's value with that of its rank, in every token of the
    trace.

    The gap from the top-K columns shows which of the two is wrong.
    """
    sides = {side: found for side, found in evidence.own_columns.sides.items() if found.compared}
    if not sides:
        return untested(NAME, "needs top-K log-probabilities")
    shares = {side: found.at_odds / found.compared for side, found in sides.items()}
    side = max(shares, key=lambda name: shares[name])
    rows: list[Row] = []
    for name, found in sides.items():
        rows += [
            (f"{name}: sampled tokens among the ranks", found.compared),
            (f"{name}: with another value", found.at_odds),
        ]
        if found.at_odds:
            rows.append((f"{name}: mean difference there, nats", found.difference / found.at_odds))
    if shares[side] < _SHARE or settled(evidence):
        power = f"it in ≥ {percent(_SHARE)} of {sides[side].compared:,} tokens"
        return clear(NAME, shares[side], "share of tokens", power, tuple(rows))
    sentence = (
        f"{sides[side].at_odds:,} of {sides[side].compared:,} sampled tokens of the {side} "
        f"contradict the {side}'s own top-K column."
    )
    return Finding(
        NAME,
        "found",
        shares[side],
        "share of tokens",
        sentence,
        tuple(rows),
        left_N=_by_topk(evidence),
    )


def settled(evidence: Evidence) -> bool:
    """Whether another fault was undone, and the top-K columns now give the same gap as the
    sampled ones.
    """
    sample = evidence.sample
    if sample.topk_d_T is None or sample.topk_logp_TK is not None:
        return False
    apart_N = np.abs(sample.topk_d_T[sample.index_N] - sample.d_N)
    known_N = apart_N[np.isfinite(apart_N)]
    return bool(len(known_N)) and float((known_N > _APART).mean()) < _FEW_APART


def _by_topk(evidence: Evidence) -> np.ndarray | None:
    """The gap from the top-K columns, if it is much smaller; None if the sampled
    log-probabilities are right.
    """
    sample = evidence.sample
    if sample.topk_d_T is None:
        return None
    by_topk_N = sample.topk_d_T[sample.index_N]
    left_N = np.where(np.isfinite(by_topk_N), by_topk_N, sample.d_N)
    before = np.abs(sample.d_N).sum()
    return left_N if np.abs(left_N).sum() < (1 - _EXPLAINS) * before else None
