"""The first pass over traces: numbers about all responses, leaders of lists, counts at each
threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from mismatch_cli.studies.shared_tokens import take_rows
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
        self.pair = pair
        self.judging = judging
        self.rows = rows
        self.pair_b = pair_b
        self.leaders = Leaders()
        self.groups: list[ScoredGroup] = []
        self.responses = 0
        self.tokens = 0
        self.judged_alike = True
        self.one_advantage = True
        self._sliders = judging.sliders()
        self._has_judged = False
        self._rows: list[np.ndarray] = []

    @property
    def sliders(self) -> Mapping[SliderKey, Slider]:
        """The sliders of the algorithms; none if they have judged no response."""
        return self._sliders if self._has_judged else {}

    @property
    def row_S(self) -> np.ndarray:
        """`RESPONSE`s of the first responses, as many as a page can have."""
        return np.concatenate(self._rows)[:MOST_RESPONSES]

    def read(self, trace: Trace, number: int, on_responses: Callable[[int], None]) -> None:
        """Add the scored row groups of a trace."""
        first_row = 0
        explored = self.rows[number]
        for group in trace.row_groups([*SURVEYED, *self.judging.needs.trace_columns]):
            rows = explored.within(first_row, group.table.num_rows)
            if len(rows):
                batch = explored.completed(take_rows(group, rows), first_row + rows)
                place = ScoredGroup(
                    number, group.path, group.number, first_row, self.responses, len(rows)
                )
                self._add(batch, place)
                on_responses(len(rows))
            first_row += group.table.num_rows

    def _add(self, batch: TokenBatch, place: ScoredGroup) -> None:
        """Judge the batch of a row group; if it was scored, add its responses and offer their
        tokens to the lists.
        """
        is_scored = self.pair.measured_in(batch)
        for cases in self.judging.slices(batch, place.trace):
            self._judge(cases, draws=is_scored)
        if not is_scored:
            return
        self.groups.append(place)
        rows = identified_rows(batch, place.trace)
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
        # A token that the trainer calls impossible has the gap −∞; from −∞ to −∞ nothing changes.
        with np.errstate(invalid="ignore"):
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
        if not draws or not compared:
            return
        gaps = cases[0].gaps
        first_N, *others = blocked_N.values()
        self.leaders.draw("blocked", np.logical_or.reduce([first_N, *others]), gaps, self.responses)
        # Of two algorithms with one mask there is nothing that only one blocks.
        for second_N in others:
            self.leaders.draw("only", first_N ^ second_N, gaps, self.responses)


def _judged_alike(batch: TokenBatch, pair: Pair) -> bool:
    """Whether the pair's current policy is the trainer, which is the one that masks judge."""
    if batch.logp_trainer_T is None:
        return True
    current_T = getattr(batch, pair.current)
    return np.array_equal(current_T, batch.logp_trainer_T, equal_nan=True)
