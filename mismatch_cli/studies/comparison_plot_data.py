"""What a plot of `compare` may draw: the numbers of its JSON, and the distribution of |d| in each trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mismatch_cli.metrics.volatility import D_BINS

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ComparisonPlotData:
    """`exceedance` has, for each trace, |d| in nats and the share of its tokens with more: [2, edges]."""

    STUDY: ClassVar[str] = "comparison"

    result: Row  # what docs/compare.md describes
    subject: str = ""  # who is compared, in one line
    exceedance: tuple[np.ndarray, ...] = ()

    @property
    def traces(self) -> Sequence[Row]:
        rows: Sequence[Row] = self.result.get("traces", ())
        return rows

    @property
    def comparisons(self) -> Sequence[Row]:
        rows: Sequence[Row] = self.result.get("comparisons", ())
        return rows

    @property
    def names(self) -> list[str]:
        return [row["name"] for row in self.traces]

    def rows(self, key: str) -> list[Sequence[Row]]:
        """A table of each trace's summary, such as `volatility`."""
        return [row["summary"][key] for row in self.traces]


_EVERY = 32  # bins of 0.1 % are more than a picture shows


def exceedance(counts_Bx: np.ndarray) -> np.ndarray:
    """From the histograms of d by bin of μ: edges of |d|, 3 % apart, and the share of tokens beyond each."""
    counts_x = D_BINS.fold(counts_Bx.sum(axis=0))
    at_least_x = counts_x[::-1].cumsum()[::-1]
    occupied = np.flatnonzero(at_least_x[1::_EVERY]) * _EVERY + 1  # bin 0 is what counts as 0
    return np.stack([D_BINS.positive.edges[0][occupied], at_least_x[occupied] / max(1, counts_x.sum())])
