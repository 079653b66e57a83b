"""Summaries of batches, and of a pair made by hand."""

from __future__ import annotations

from typing import Any

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pair_summary import PairSummary, ProfileRow, Sequences, TokenTotals
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.rules.batch import TokenBatch

NOTHING = Estimate(None, note="not measured")


def summarise(*batches: TokenBatch, pair: str = "mismatch") -> MismatchSummary:
    summary = MismatchSummary(PAIRS[pair])
    for batch in batches:
        summary.update(batch)
    return summary


def filled(accumulator: Any, *batches: TokenBatch) -> Any:
    """An accumulator of gaps after these batches."""
    for batch in batches:
        for gaps in token_gaps(batch, PAIRS["mismatch"]):
            accumulator.update(gaps)
    return accumulator


def pair_summary(**parts: Any) -> PairSummary:
    """A summary with these parts, and nothing else."""
    empty = {
        "pair": "mismatch",
        "counts": TokenTotals(0, 0, 0, 0, 0, 0, prompts_exact=True),
        "metrics": {},
        "volatility": [],
        "positions": [],
        "from_end": [],
        "turns": [],
        "sequence": Sequences([]),
        "by_step": [],
    }
    return PairSummary(**empty | parts)


def place(first: int, last: int | None, gap: Estimate, **columns: Any) -> ProfileRow:
    """A row by position or turn, of one gap in every metric."""
    return ProfileRow(first, last, 1, gap, gap, gap, **columns)
