"""The tokens and responses on which the two policies differ most, with the keys to look up their context."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mismatch_cli.metrics.estimate import finite_or_none
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.keep import RESPONSE_ROW, TOKEN_ROW, SmallestRows, response_rows, token_rows


class WorstTokens:
    """The N tokens with the largest |d|, the N with the largest |Δp|, and the N responses with the largest |Σd|.

    Equal values are ordered by step, prompt, sample and position. A gap of exactly 0 is never among them; a token out
    of support can be only under |Δp|.
    """

    def __init__(self, count: int = 50) -> None:
        self.abs_d, self.abs_dp = SmallestRows(TOKEN_ROW, count), SmallestRows(TOKEN_ROW, count)
        self.responses = SmallestRows(RESPONSE_ROW, count)

    def update(self, gaps: TokenGaps) -> None:
        for kept, values_N in ((self.abs_d, gaps.abs_d_N), (self.abs_dp, gaps.abs_dp_N)):
            large = np.flatnonzero(values_N >= max(-kept.limit, _SMALLEST))
            kept.offer(-values_N[large], partial(_rows_among, gaps, large))
        length_S, d_sum_S = gaps.length_and_d_sum
        real = np.flatnonzero(d_sum_S)
        self.responses.offer(-np.abs(d_sum_S[real]), lambda index: response_rows(gaps, real[index], length_S, d_sum_S))

    def merge(self, other: WorstTokens) -> None:
        for name, kept in vars(self).items():
            kept.merge(getattr(other, name))

    def result(self) -> dict[str, list[dict[str, Any]]]:
        return {name: _records(kept.rows()) for name, kept in vars(self).items()}


_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def _rows_among(gaps: TokenGaps, candidates: np.ndarray, index: np.ndarray) -> np.ndarray:
    return token_rows(gaps, candidates[index])


def _records(rows: np.ndarray) -> list[dict[str, Any]]:
    names = [name for name in rows.dtype.names or () if name != "key"]
    return [{name: finite_or_none(row[name].item()) for name in names} for row in rows]
