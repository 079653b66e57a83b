"""The first pass over traces: numbers about all responses, leaders of lists, counts at each
threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_, xor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.gaps import TokenGaps, token_gaps
from mismatch_cli.metrics.pairs import PAIR_COLUMNS, Pair
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.exploration.explored_rows import ExploredRows
from mismatch_cli.studies.exploration.leaders import Leaders
from mismatch_cli.studies.exploration.passages import MOST_RESPONSES
from mismatch_cli.studies.exploration.response_rows import (
    add_gap,
    has_one_advantage,
    identified_rows,
)
from mismatch_cli.studies.exploration.slider_levels import Slider, SliderAlgorithms, SliderKey
from mismatch_cli.studies.pairing import take_rows
from mismatch_cli.trace.reader import Trace

# The columns that a first pass reads, besides those that masks need
SURVEYED = (*PAIR_COLUMNS, "reward", "advantage")


class ScoredGroup(NamedTuple):
    """A row group with scored responses, and the number of the first of them in the traces."""

    trace: int
    path: Path
    number: int  # in the shard
    first_row: int  # in the trace
    first: int
    responses: int


class TokenSurvey:
    """What one pass keeps of scored responses, in memory that does not grow with their number
    except for a row per row group.
    """

    def __init__(
        self,
        pair: Pair,
        judging: SliderAlgorithms,
        rows: Sequence[ExploredRows],
        pair_b: Pair | None = None,
    ) -> None:
        self.pair, self.judging, self.rows, self.pair_b = pair, judging, rows, pair_b
        self._sliders = judging.sliders()
        self.leaders = Leaders()
        self.groups: list[ScoredGroup] = []
        self.responses, self.tokens = 0, 0
        self.judged_alike, self.one_advantage = True, True
        self._has_judged = False
        self._rows: list[np.ndarray] = []

    @property
    def sliders(self) -> Mapping[SliderKey, Slider]:
        """Of the algorithms; none if they have judged no response."""
        return self._sliders if self._has_judged else {}

    @property
    def row_S(self) -> np.ndarray:
        """`RESPONSE`s of the first responses, as many as a page can have."""
        return np.concatenate(self._rows)[:MOST_RESPONSES]

    def read(self, trace: Trace, number: int, on_responses: Callable[[int], None]) -> None:
        """Add the scored row groups of a trace."""
        first_row, explored = 0, self.rows[number]
        for group in trace.row_groups([*SURVEYED, *self.judging.needs.trace_columns]):
            place = ScoredGroup(number, group.path, group.number, first_row, self.responses, 0)
            rows = explored.within(first_row, group.table.num_rows)
            if len(rows):
                self._read(explored.completed(take_rows(group, rows), first_row + rows), place)
                on_responses(len(rows))
            first_row += group.table.num_rows

    def _read(self, batch: TokenBatch, place: ScoredGroup) -> None:
        is_scored = self.pair.measured_in(batch)
        for cases in self.judging.slices(batch, place.trace):
            self._judge(cases, draws=is_scored)
        if is_scored:
            self.groups.append(place._replace(responses=batch.num_responses))
            self._add(batch, place.trace)

    def _add(self, batch: TokenBatch, trace: int) -> None:
        rows = identified_rows(batch, trace)
        for gaps in token_gaps(batch, self.pair):
            add_gap(rows, gaps)
            self.leaders.measure(gaps, self._sizes(gaps), self.responses)
        if self.responses < MOST_RESPONSES:
            self._rows.append(rows)
        self.judged_alike = self.judged_alike and _judged_alike(batch, self.pair)
        self.one_advantage = self.one_advantage and has_one_advantage(batch)
        self.responses += batch.num_responses
        self.tokens += batch.num_tokens

    def _sizes(self, gaps: TokenGaps) -> Mapping[str, np.ndarray]:
        """What the lists of the slice's largest tokens are ordered by."""
        if self.pair_b is None:
            return {"gap": gaps.abs_d_N, "probability": gaps.abs_dp_N}
        gaps_b = TokenGaps(gaps.batch, self.pair_b, gaps.first, gaps.last)
        with np.errstate(invalid="ignore"):  # −∞ − (−∞)
            change_N = (gaps_b.logp_N - gaps_b.logq_N) - (gaps.logp_N - gaps.logq_N)
        size_N = np.where(np.isfinite(change_N), np.abs(change_N), 0)
        return {"change": size_N, "gap": gaps.abs_d_N, "gap_b": gaps_b.abs_d_N}

    def _judge(self, cases: Sequence[MaskedSlice], *, draws: bool) -> None:
        """Count what each slider blocks; `draws` offers what the compared algorithms block to
        their lists.
        """
        self._has_judged = True
        compared = {algorithm.masks for algorithm in self.judging.compared}
        blocked_N = {masks: np.zeros(len(cases[0].advantage_N), dtype=bool) for masks in compared}
        for key, slider in self._sliders.items():
            own_N = slider.count(cases)
            if key.masks in compared:
                blocked_N[key.masks] |= own_N
        if draws and compared:
            blocks = list(blocked_N.values())
            self.leaders.draw("blocked", reduce(or_, blocks), cases[0].gaps, self.responses)
            if len(blocks) == 2:
                self.leaders.draw("only", xor(*blocks), cases[0].gaps, self.responses)


def _judged_alike(batch: TokenBatch, pair: Pair) -> bool:
    trainer_T = batch.logp_trainer_T
    return trainer_T is None or np.array_equal(
        getattr(batch, pair.current), trainer_T, equal_nan=True
    )
