"""Sampled tokens whose log-probability differs from that in the same side's top-K column."""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.far_responses import Subset, responses_with
from mismatch_cli.diagnosis.power import clear, percent
from mismatch_cli.diagnosis.sample import Sample

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
    shares: dict[str, float] = {}
    rows: list[Row] = []
    for name, agreement in evidence.own_columns.sides.items():
        compared, at_odds = agreement.compared, agreement.at_odds
        if not compared:
            continue
        shares[name] = at_odds / compared
        rows.append((f"{name}: sampled tokens among the ranks", compared))
        rows.append((f"{name}: with another value", at_odds))
        if at_odds:
            rows.append((f"{name}: mean difference there, nats", agreement.difference / at_odds))
    if not shares:
        return untested(NAME, "needs top-K log-probabilities")
    side = max(shares, key=lambda name: shares[name])
    share, worst = shares[side], evidence.own_columns.sides[side]
    if share < _SHARE or settled(evidence):
        power = f"it in ≥ {percent(_SHARE)} of {worst.compared:,} tokens"
        return clear(NAME, share, "share of tokens", power, tuple(rows))
    sentence = (
        f"{worst.at_odds:,} of {worst.compared:,} sampled tokens of the {side} contradict the "
        f"{side}'s own top-K column."
    )
    sample = evidence.sample
    return Finding(
        NAME,
        "found",
        share,
        "share of tokens",
        sentence,
        tuple(rows),
        left_N=_left_by_topk(sample),
        part=_part_at_odds(sample),
    )


def _part_at_odds(sample: Sample) -> Subset | None:
    """The responses with a token whose two gaps differ, among those with a token that has both."""
    if sample.topk_d_T is None:
        return None
    apart_T = np.abs(sample.topk_d_T - (sample.logp_T - sample.logq_T))
    return responses_with(apart_T > _APART, np.isfinite(apart_T) & sample.counts_T, sample)


def settled(evidence: Evidence) -> bool:
    """Whether another fault was undone, and the top-K columns now give the same gap as the
    sampled ones.
    """
    sample = evidence.sample
    if sample.topk_d_T is None or sample.topk_logp_TK is not None:
        return False
    apart_N = np.abs(sample.topk_d_T[sample.index_N] - sample.d_N)
    apart_M = apart_N[np.isfinite(apart_N)]
    return bool(len(apart_M)) and float((apart_M > _APART).mean()) < _FEW_APART


def _left_by_topk(sample: Sample) -> np.ndarray | None:
    """The gap from the top-K columns, if it is much smaller; None if the sampled
    log-probabilities are right.
    """
    if sample.topk_d_T is None:
        return None
    by_topk_N = sample.topk_d_T[sample.index_N]
    left_N = np.where(np.isfinite(by_topk_N), by_topk_N, sample.d_N)
    before = np.abs(sample.d_N).sum()
    return left_N if np.abs(left_N).sum() < (1 - _EXPLAINS) * before else None
