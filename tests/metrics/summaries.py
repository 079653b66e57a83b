"""Summaries of a pair made by hand."""

from __future__ import annotations

from typing import Any

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pair_summary import PairSummary, PlaceRow, Sequences, TokenTotals

NOTHING = Estimate(None, note="not measured")


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


def place(first: int, last: int | None, gap: Estimate, **columns: Any) -> PlaceRow:
    """A row by position or turn, of one gap in every metric."""
    return PlaceRow(first, last, 1, gap, gap, gap, **columns)
