"""The second pass over traces: every column of the tokens in the passages of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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


class _Excerpt(NamedTuple):
    """The responses of a row group that have passages, complete, and where these passages are."""

    trace: int
    batch: TokenBatch
    prompts: Sequence[Sequence[int]]
    spans: Sequence[slice]  # of each passage in the batch
    on_page: slice  # of all of them, among the tokens of the page

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
        self._survey = survey
        self._pair = survey.pair
        self._sliders = survey.sliders
        self.passage_P = passage_P
        self._end_P = np.cumsum(passage_P["tokens"])
        tokens = int(self._end_P[-1])
        self._columns: dict[str, np.ndarray] = {}
        for name in (*_columns_of(survey.pair), *_columns_of(survey.pair_b), *_OPTIONAL):
            self._columns[name] = np.full(tokens, np.nan, dtype=np.float32)
        self._recorded: set[str] = set()
        self.levels = self._unjudged_levels(tokens)
        self.lists = lists
        self._is_listed_T = np.zeros(tokens, dtype=bool)
        for token_list in lists:
            self._is_listed_T[token_list.token_U] = True
        self._texts: list[str] = []
        self.prompt_C: list[str] = []  # raw
        self._rows: list[np.ndarray] = []
        self._profiles: list[np.ndarray] = []
        self._ranks: list[TopRanks] = []

    @property
    def row_C(self) -> np.ndarray:
        """A `RESPONSE` for each response with a passage."""
        return np.concatenate(self._rows)

    @property
    def profile_CB(self) -> np.ndarray:
        """The largest |d| in equal parts of each response with a passage."""
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
        """The columns of the tokens of all passages, in page order."""
        tokens = ExploredTokens(
            self._texts,
            self._columns[self._pair.reference],
            self._columns[self._pair.current],
            self._recorded_column("entropy_trainer_T"),
            self._recorded_column("advantage_T"),
            TopRanks.joined(self._ranks) if self._ranks else None,
        )
        pair_b = self._survey.pair_b
        if pair_b is None:
            return tokens
        return replace(
            tokens,
            logq_b_T=self._columns[pair_b.reference],
            logp_b_T=self._columns[pair_b.current],
        )

    def _recorded_column(self, name: str) -> np.ndarray | None:
        """A column of the page; None if no token has it."""
        return self._columns[name] if name in self._recorded else None

    def read(self, trace: Trace, number: int, on_responses: Callable[[int], None]) -> None:
        """Add the passages of a trace; reads only row groups that have one."""
        groups = [group for group in self._survey.groups if group.trace == number]
        chosen = [group for group in groups if self._places_in(group).size]
        # Responses that need not be read are done: `on_responses` hears of each of them, too.
        on_responses(sum(group.responses for group in groups if group not in chosen))
        numbers: dict[Path, list[int]] = {}
        for group in chosen:
            numbers.setdefault(group.path, []).append(group.number)
        tables = trace.chosen_tables(numbers, _COLUMNS)
        for group, table in zip(chosen, tables, strict=True):
            excerpt = self._excerpt(group, table)
            self._copy(excerpt)
            self._decode(excerpt, trace.vocabulary)
            self._describe(excerpt)
            self._rank(excerpt, trace.vocabulary)
            on_responses(group.responses)

    def _places_in(self, group: ScoredGroup) -> np.ndarray:
        """The indices in P of the passages in a row group."""
        response_P = self.passage_P["response"]
        first, end = np.searchsorted(response_P, [group.first, group.first + group.responses])
        return np.arange(first, end)

    def _excerpt(self, group: ScoredGroup, table: pa.Table) -> _Excerpt:
        places = self._places_in(group)
        passage_P = self.passage_P[places]
        row_C, response_P = np.unique(passage_P["response"] - group.first, return_inverse=True)
        explored = self._survey.rows[group.trace]
        chosen_C = explored.within(group.first_row, table.num_rows)[row_C]
        is_chosen = np.isin(np.arange(table.num_rows), chosen_C)
        rows = table if is_chosen.all() else table.filter(packed_flags(is_chosen))
        batch = explored.completed(table_to_batch(rows), group.first_row + chosen_C)
        first_P = batch.offset_S1[response_P] + passage_P["start"]
        end_P = first_P + passage_P["tokens"]
        spans = list(map(slice, first_P.tolist(), end_P.tolist()))
        # Passages are ordered by response, so those of a row group follow one another on the page.
        end = int(self._end_P[places[-1]])
        on_page = slice(end - int(passage_P["tokens"].sum()), end)
        prompts = rows.column(PROMPT_COLUMN).to_pylist()
        return _Excerpt(group.trace, batch, prompts, spans, on_page)

    def _copy(self, excerpt: _Excerpt) -> None:
        """Copy what was recorded of the tokens, and their levels, to their place on the page."""
        token_T = excerpt.token_T
        for name, column_T in self._columns.items():
            recorded_T = getattr(excerpt.batch, name)
            if recorded_T is not None:
                column_T[excerpt.on_page] = recorded_T[token_T]
                self._recorded.add(name)
        for key, level_T in self._levels_in(excerpt).items():
            self.levels[key][excerpt.on_page] = level_T[token_T]

    def _levels_in(self, excerpt: _Excerpt) -> Mapping[SliderKey, np.ndarray]:
        """The levels of all tokens in the batch."""
        levels = self._unjudged_levels(excerpt.batch.num_tokens)
        for cases in self._survey.judging.slices(excerpt.batch, excerpt.trace):
            for key, slider in self._sliders.items():
                slider.fill(levels[key], cases)
        return levels

    def _unjudged_levels(self, tokens: int) -> dict[SliderKey, np.ndarray]:
        return {key: np.full(tokens, NOT_JUDGED, dtype=np.uint8) for key in self._sliders}

    def _decode(self, excerpt: _Excerpt, vocabulary: Vocabulary) -> None:
        assert excerpt.batch.response_ids_T is not None  # else there is no exploration
        for span in excerpt.spans:
            self._texts += vocabulary.texts(excerpt.batch.response_ids_T[span])
        for prompt in excerpt.prompts:
            self.prompt_C.append(vocabulary.decode(prompt[-_PROMPT_TOKENS:]))

    def _describe(self, excerpt: _Excerpt) -> None:
        """Add the rows and profiles of the responses, which are about all of their tokens."""
        rows = identified_rows(excerpt.batch, excerpt.trace)
        for gaps in token_gaps(excerpt.batch, self._pair):
            add_gap(rows, gaps)
        self._rows.append(rows)
        self._profiles.append(profiles(excerpt.batch, self._pair))

    def _rank(self, excerpt: _Excerpt, vocabulary: Vocabulary) -> None:
        """Add the ranks of the listed tokens."""
        if not self._pair.topk_measured_in(excerpt.batch):
            return
        is_listed_T = self._is_listed_T[excerpt.on_page]
        token_U = excerpt.token_T[is_listed_T]
        page_U = excerpt.on_page.start + np.flatnonzero(is_listed_T)
        logq_TK = getattr(excerpt.batch, str(self._pair.topk_reference))
        is_measured_U = ~np.isnan(logq_TK[token_U, 0])
        ranks = _ranks_of(
            excerpt.batch, self._pair, token_U[is_measured_U], page_U[is_measured_U], vocabulary
        )
        self._ranks.append(ranks)


def _columns_of(pair: Pair | None) -> tuple[str, ...]:
    """The columns of a pair's two policies; none without a pair."""
    return () if pair is None else (pair.reference, pair.current)


def _ranks_of(
    batch: TokenBatch, pair: Pair, token_U: np.ndarray, page_U: np.ndarray, vocabulary: Vocabulary
) -> TopRanks:
    """The ranks of some tokens of a batch, which have the indices `page_U` on the page; NaN where
    fewer were recorded.
    """
    assert batch.topk_ids_TK is not None  # `topk_measured_in` checked it
    ids_UK = batch.topk_ids_TK[token_U, :RANKS]
    missing = RANKS - ids_UK.shape[1]
    padding = ((0, 0), (0, missing))
    logq_UK = getattr(batch, str(pair.topk_reference))[token_U, :RANKS]
    logp_UK = getattr(batch, str(pair.topk_current))[token_U, :RANKS]
    # Few tokens fill most ranks: each is decoded once.
    text_of = {token: vocabulary.decode([token]) for token in np.unique(ids_UK).tolist()}
    text_UK = []
    for ids in ids_UK.tolist():
        text_UK.append([*map(text_of.__getitem__, ids), *[""] * missing])
    return TopRanks(
        page_U,
        text_UK,
        np.pad(logq_UK, padding, constant_values=np.nan),
        np.pad(logp_UK, padding, constant_values=np.nan),
    )
