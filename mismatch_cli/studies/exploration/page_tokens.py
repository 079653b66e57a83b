"""The second pass over traces: every column of the tokens in the passages of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.exploration.explored import (
    NOT_JUDGED,
    ExploredTokens,
    TokenList,
    TopRanks,
)
from mismatch_cli.studies.exploration.response_rows import add_gap, identified_rows, profiles
from mismatch_cli.studies.exploration.slider_levels import SliderKey
from mismatch_cli.studies.exploration.token_survey import SURVEYED, ScoredGroup, TokenSurvey
from mismatch_cli.trace.columns import PROMPT_COLUMN, TOPK_COLUMNS
from mismatch_cli.trace.foreign_values import packed_flags
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.vocabulary import Vocabulary

RANKS = 5  # of the top K
_PROMPT_TOKENS = 200  # the last ones
_OPTIONAL = ("entropy_trainer_T", "advantage_T")
_COLUMNS = (*SURVEYED, "logp_average", "entropy_trainer", *TOPK_COLUMNS)


class _Part(NamedTuple):
    """The responses of a row group that have passages, complete, and where these passages are."""

    trace: int
    batch: TokenBatch
    prompts: Sequence[Sequence[int]]
    spans: Sequence[slice]  # in the batch
    on_page: slice

    @property
    def token_T(self) -> np.ndarray:
        """The tokens of the passages, by index in the batch."""
        every = np.arange(self.batch.num_tokens)
        return np.concatenate([every[span] for span in self.spans])


class PageTokens:
    """Collects the tokens `_T` of passages, and the responses `_C` that these belong to."""

    def __init__(
        self, survey: TokenSurvey, passage_P: np.ndarray, lists: Sequence[TokenList]
    ) -> None:
        self._pair, self._judging, self._sliders = survey.pair, survey.judging, survey.sliders
        self.passage_P, self._end_P = passage_P, np.cumsum(passage_P["tokens"])
        tokens = self._end_P[-1]
        self._pair_b, self._explored = survey.pair_b, survey.rows
        measured = [(pair.reference, pair.current) for pair in (self._pair, self._pair_b) if pair]
        columns = (*chain(*measured), *_OPTIONAL)
        self._columns = {name: np.full(tokens, np.nan, dtype=np.float32) for name in columns}
        self._recorded: set[str] = set()
        self.levels = {key: np.full(tokens, NOT_JUDGED, dtype=np.uint8) for key in self._sliders}
        self._is_listed_T = np.zeros(tokens, dtype=bool)
        for each in lists:
            self._is_listed_T[each.token_U] = True
        self._texts: list[str] = []
        self.prompt_C: list[str] = []  # raw
        self._rows: list[np.ndarray] = []
        self._profiles: list[np.ndarray] = []
        self._ranks: list[TopRanks] = []

    @property
    def row_C(self) -> np.ndarray:
        """`RESPONSE`s."""
        return np.concatenate(self._rows)

    @property
    def profile_CB(self) -> np.ndarray:
        return np.concatenate(self._profiles)

    @property
    def is_partial_C(self) -> np.ndarray:
        """Whether some tokens of a response are in no passage."""
        _, index_P = np.unique(self.passage_P["response"], return_inverse=True)
        is_partial_C: np.ndarray = (
            np.bincount(index_P, self.passage_P["tokens"]) < self.row_C["length"]
        )
        return is_partial_C

    def result(self) -> ExploredTokens:
        """The columns."""
        entropy_T, advantage_T = (
            self._columns[name] if name in self._recorded else None for name in _OPTIONAL
        )
        columns_b = (self._pair_b.reference, self._pair_b.current) if self._pair_b else ()
        return ExploredTokens(
            self._texts,
            self._columns[self._pair.reference],
            self._columns[self._pair.current],
            entropy_T,
            advantage_T,
            TopRanks.joined(self._ranks) if self._ranks else None,
            *(self._columns[name] for name in columns_b),
        )

    def read(
        self, trace: Trace, groups: Sequence[ScoredGroup], on_responses: Callable[[int], None]
    ) -> None:
        """Add the passages in the scored row groups of a trace; reads only those that have one."""
        chosen = [group for group in groups if self._places_in(group).size]
        on_responses(sum(group.responses for group in groups if group not in chosen))
        numbers: dict[Path, list[int]] = {}
        for group in chosen:
            numbers.setdefault(group.path, []).append(group.number)
        tables = trace.chosen_tables(numbers, _COLUMNS)
        for group, table in zip(chosen, tables, strict=True):
            part = self._part(group, table)
            self._copy(part)
            self._decode(part, trace.vocabulary)
            self._describe(part)
            self._rank(part, trace.vocabulary)
            on_responses(group.responses)

    def _places_in(self, group: ScoredGroup) -> np.ndarray:
        """The indices in P of the passages in a row group."""
        response_P = self.passage_P["response"]
        first, end = np.searchsorted(response_P, [group.first, group.first + group.responses])
        return np.arange(first, end)

    def _part(self, group: ScoredGroup, table: pa.Table) -> _Part:
        places = self._places_in(group)
        passage_P = self.passage_P[places]
        row_C, response_P = np.unique(passage_P["response"] - group.first, return_inverse=True)
        explored = self._explored[group.trace]
        chosen_C = explored.within(group.first_row, table.num_rows)[row_C]
        is_chosen = np.isin(np.arange(table.num_rows), chosen_C)
        rows = table if is_chosen.all() else table.filter(packed_flags(is_chosen))
        batch = explored.completed(table_to_batch(rows), group.first_row + chosen_C)
        first_P = batch.offset_S1[response_P] + passage_P["start"]
        ends_P = np.stack([first_P, first_P + passage_P["tokens"]], axis=1).tolist()
        end = int(self._end_P[places[-1]])
        on_page = slice(end - int(passage_P["tokens"].sum()), end)
        prompts = rows.column(PROMPT_COLUMN).to_pylist()
        return _Part(group.trace, batch, prompts, [slice(*ends) for ends in ends_P], on_page)

    def _copy(self, part: _Part) -> None:
        """Copy what was recorded of the tokens, and their levels, to their place on the page."""
        token_T = part.token_T
        for name, column_T in self._columns.items():
            if (recorded_T := getattr(part.batch, name)) is not None:
                column_T[part.on_page] = recorded_T[token_T]
                self._recorded.add(name)
        for key, level_T in self._levels_in(part).items():
            self.levels[key][part.on_page] = level_T[token_T]

    def _levels_in(self, part: _Part) -> Mapping[SliderKey, np.ndarray]:
        size = part.batch.num_tokens
        levels = {key: np.full(size, NOT_JUDGED, dtype=np.uint8) for key in self._sliders}
        for cases in self._judging.slices(part.batch, part.trace):
            for key, slider in self._sliders.items():
                slider.fill(levels[key], cases)
        return levels

    def _decode(self, part: _Part, vocabulary: Vocabulary) -> None:
        for span in part.spans:
            assert part.batch.response_ids_T is not None  # else there is no exploration
            self._texts += vocabulary.texts(part.batch.response_ids_T[span])
        for prompt in part.prompts:
            self.prompt_C.append(vocabulary.decode(prompt[-_PROMPT_TOKENS:]))

    def _describe(self, part: _Part) -> None:
        rows = identified_rows(part.batch, part.trace)
        for gaps in token_gaps(part.batch, self._pair):
            add_gap(rows, gaps)
        self._rows.append(rows)
        self._profiles.append(profiles(part.batch, self._pair))

    def _rank(self, part: _Part, vocabulary: Vocabulary) -> None:
        """Add the ranks of the listed tokens."""
        if not self._pair.topk_measured_in(part.batch):
            return
        is_listed_T = self._is_listed_T[part.on_page]
        token_U = part.token_T[is_listed_T]
        page_U = part.on_page.start + np.flatnonzero(is_listed_T)
        logq_TK = getattr(part.batch, str(self._pair.topk_reference))
        is_measured_U = ~np.isnan(logq_TK[token_U, 0])
        ranks = _ranks_of(
            part.batch, self._pair, token_U[is_measured_U], page_U[is_measured_U], vocabulary
        )
        self._ranks.append(ranks)


def _ranks_of(
    batch: TokenBatch, pair: Pair, token_U: np.ndarray, page_U: np.ndarray, vocabulary: Vocabulary
) -> TopRanks:
    """The ranks of some tokens of a batch, which have the indices `page_U` on the page; NaN where
    fewer were recorded.
    """
    assert batch.topk_ids_TK is not None  # `topk_measured_in` checked it
    ids_UK = batch.topk_ids_TK[token_U, :RANKS]
    missing = RANKS - ids_UK.shape[1]
    logq_UK, logp_UK = (
        np.pad(
            getattr(batch, str(name))[token_U, :RANKS],
            ((0, 0), (0, missing)),
            constant_values=np.nan,
        )
        for name in (pair.topk_reference, pair.topk_current)
    )
    words = {token: vocabulary.decode([token]) for token in np.unique(ids_UK).tolist()}
    text_UK = [[*map(words.__getitem__, ids), *[""] * missing] for ids in ids_UK.tolist()]
    return TopRanks(page_U, text_UK, logq_UK, logp_UK)
