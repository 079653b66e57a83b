"""The two algorithms that are drawn side by side, and tokens in context that only one of a pair blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.errors import UsageError
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.report.excerpts import token_excerpts
from mismatch_cli.report.view import Excerpt
from mismatch_cli.studies.clipping import ClippingAnalysis
from mismatch_cli.trace.reader import Trace

_PAPER = ("grpo-clip-higher", "dppo-binary-tv")


def chosen_pair(analysis: ClippingAnalysis, asked: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
    """The algorithms to compare, at most two: as asked, else those of the paper, else the first that block anything."""
    for algorithm in asked:
        if algorithm.name in analysis.support.skipped:
            raise UsageError(f"{algorithm.name} cannot be compared: {analysis.support.skipped[algorithm.name]}")
    if asked:
        return tuple(asked)
    by_name = {algorithm.name: algorithm for algorithm in analysis.algorithms}
    paper = [by_name[name] for name in _PAPER if name in by_name]
    cells = analysis.summary.cells.by_mu[1:]
    blocking = [algorithm for algorithm, counts in zip(analysis.algorithms, cells, strict=True) if counts.any()]
    return tuple(dict.fromkeys([*paper, *blocking, *analysis.algorithms]))[:2]


def example_excerpts(traces: Sequence[Trace], result: Mapping[str, Any], pair: Sequence[Algorithm]) -> list[Excerpt]:
    """Tokens that one of the pair blocks and the other keeps, both ways, in their context."""
    names = [algorithm.name for algorithm in pair]
    rows = [
        row | {"title": f"{row['only']} blocks, {row['not']} keeps (A {'>' if row['advantage'] == '+' else '<'} 0)"}
        for row in result["overlap"]["examples"]
        if row["only"] in names and row["not"] in names
    ]
    return token_excerpts(traces, PAIRS["total"], rows)
