"""The algorithms that a figure shows if it has no room for all: those that block different
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch_cli.report.drawing.lines import values_of

if TYPE_CHECKING:
    from mismatch_cli.metrics.clipping.blocked_rows import AlgorithmRow
    from mismatch_cli.studies.clipping_result import ClippingResult, OneMask

_ALIKE = 0.65  # algorithms with a higher Jaccard index look nearly the same


def distinct_masks(
    result: ClippingResult, rows: Sequence[AlgorithmRow], most: int
) -> list[OneMask]:
    """The compared algorithms among these rows, then those that block different tokens from the
    ones before.
    """
    masks = sorted(result.masks(rows), key=lambda mask: mask.row not in result.leading)
    chosen: list[OneMask] = []
    for mask in masks:
        pairs = (result.overlap.pair(mask.row.name, before.row.name) for before in chosen)
        shares = values_of(pair.jaccard for pair in pairs)
        if mask.row in result.leading or not (shares > _ALIKE).any():
            chosen.append(mask)
    return chosen[:most]
