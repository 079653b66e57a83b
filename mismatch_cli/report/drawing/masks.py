"""The algorithms that a figure shows if it has no room for all: those that block different
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mismatch_cli.report.drawing.lines import values_of

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData, OneMask

_ALIKE = 0.65  # algorithms with a higher Jaccard index look nearly the same


def distinct_masks(
    data: ClippingPlotData, rows: Iterable[Mapping[str, Any]], most: int
) -> list[OneMask]:
    """The compared algorithms among these rows, then those that block different tokens from the
    ones before.
    """
    compared = [algorithm.name for algorithm in data.compared]
    masks = sorted(data.masks(rows), key=lambda mask: mask.row["name"] not in compared)
    overlap = data.result.get("overlap") or {"names": [], "jaccard": []}
    jaccard_of = {
        (name, other): estimate
        for name, estimates in zip(overlap["names"], overlap["jaccard"], strict=True)
        for other, estimate in zip(overlap["names"], estimates, strict=True)
    }
    chosen: list[OneMask] = []
    for mask in masks:
        name = mask.row["name"]
        jaccard = values_of(jaccard_of.get((name, before.row["name"])) for before in chosen)
        if name in compared or not (jaccard > _ALIKE).any():
            chosen.append(mask)
    return chosen[:most]
