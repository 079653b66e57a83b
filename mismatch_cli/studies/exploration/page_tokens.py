"""The second pass over traces: every column of the tokens in the passages of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.studies.exploration.explored import NOT_JUDGED, TokenList, TopRanks
from mismatch_cli.studies.exploration.response_rows import add_gap, identified_rows, profiles
from mismatch_cli.studies.exploration.slider_levels import SliderKey
from mismatch_cli.studies.exploration.survey import ScoredGroup, Survey
from mismatch_cli.trace.foreign import packed_flags
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.schema import PROMPT_COLUMN
from mismatch_cli.trace.vocabulary import Vocabulary

RANKS = 5  # of the top K
_PROMPT_TOKENS = 200  # the last ones
_COLUMNS = (
    "version_rollout", "version_trainer", "reward", "loss_mask", "logp_trainer",
    "logp_recomputed", "logp_average", "entropy_trainer", "advantage", "topk_ids",
    "topk_logp_rollout", "topk_logp_trainer", "topk_logp_recomputed",
)  # fmt: skip


class PageTokens:
    """The tokens `_T` of passages, and the responses `_C` that these belong to."""

    def __init__(self, survey: Survey, passage_P: np.ndarray, lists: Sequence[TokenList]) -> None:
        self._pair, self._judging, self._sliders = survey.pair, survey.judging, survey.sliders
        self.passage_P = passage_P
        self._listed_U = np.array(
            sorted({t for each in lists for t in each.token_U.tolist()}), dtype=np.int64
        )
        self._end_P = np.cumsum(passage_P["tokens"])
        tokens = int(passage_P["tokens"].sum())
        names = (self._pair.reference, self._pair.current, "entropy_trainer_T", "advantage_T")
        # NaN where not measured
        self._columns = {name: np.full(tokens, np.nan, dtype=np.float32) for name in names}
        self.levels = {key: np.full(tokens, NOT_JUDGED, dtype=np.uint8) for key in self._sliders}
        self.text_T: list[str] = []  # raw
        self.prompt_C: list[str] = []  # raw
        self._rows: list[np.ndarray] = []
        self._profiles: list[np.ndarray] = []
        self._ranks: list[TopRanks] = []

    def column(self, name: str) -> np.ndarray:
        """A column of the batch."""
        return self._columns[name]

    @property
    def row_C(self) -> np.ndarray:
        """`RESPONSE`s."""
        return np.concatenate(self._rows)

    @property
    def profile_CB(self) -> np.ndarray:
        return np.concatenate(self._profiles)

    @property
    def ranks(self) -> TopRanks | None:
        if not self._ranks:
            return None
        return TopRanks(
            np.concatenate([ranks.token_U for ranks in self._ranks]),
            [texts for ranks in self._ranks for texts in ranks.text_UK],
            np.concatenate([ranks.logq_UK for ranks in self._ranks]),
            np.concatenate([ranks.logp_UK for ranks in self._ranks]),
        )

    def read(self, trace: Trace, groups: Sequence[ScoredGroup]) -> None:
        """Add the passages in the scored row groups of a trace; reads only those that have one."""
        chosen = [group for group in groups if self._places_in(group).size]
        numbers: dict[Path, list[int]] = {}
        for group in chosen:
            numbers.setdefault(group.path, []).append(group.number)
        tables = trace.chosen_tables(numbers, _COLUMNS)
        for group, table in zip(chosen, tables, strict=True):
            self._add(group, table, trace.vocabulary)

    def _places_in(self, group: ScoredGroup) -> np.ndarray:
        """The indices in P of the passages in a row group."""
        response_P = self.passage_P["response"]
        first, end = np.searchsorted(response_P, [group.first, group.first + group.responses])
        return np.arange(first, end)

    def _add(self, group: ScoredGroup, table: pa.Table, vocabulary: Vocabulary) -> None:
        places = self._places_in(group)
        passage_P = self.passage_P[places]
        row_C, response_P = np.unique(passage_P["response"] - group.first, return_inverse=True)
        is_chosen_S = np.isin(np.arange(group.responses), row_C)
        rows = table if is_chosen_S.all() else table.filter(packed_flags(is_chosen_S))
        batch = table_to_batch(rows)
        start_P = batch.offset_S1[response_P] + passage_P["start"]
        spans = list(zip(start_P.tolist(), (start_P + passage_P["tokens"]).tolist(), strict=True))
        token_T = np.concatenate([np.arange(first, end) for first, end in spans])
        end = int(self._end_P[places[-1]])
        on_page = slice(end - len(token_T), end)
        for name, column_T in self._columns.items():
            if (recorded_T := getattr(batch, name)) is not None:
                column_T[on_page] = recorded_T[token_T]
        for key, level_T in self._levels_in(batch, group.trace).items():
            self.levels[key][on_page] = level_T[token_T]
        for first, end in spans:
            self.text_T += vocabulary.texts(batch.response_ids_T[first:end])
        for prompt in rows.column(PROMPT_COLUMN).to_pylist():
            self.prompt_C.append(vocabulary.decode(prompt[-_PROMPT_TOKENS:]))
        self._describe(batch, group.trace)
        self._rank(batch, token_T, on_page, vocabulary)

    def _levels_in(self, batch: TokenBatch, trace: int) -> Mapping[SliderKey, np.ndarray]:
        levels = {
            key: np.full(batch.num_tokens, NOT_JUDGED, dtype=np.uint8) for key in self._sliders
        }
        for cases in self._judging.slices(batch, trace):
            for key, slider in self._sliders.items():
                slider.fill(levels[key], cases)
        return levels

    def _describe(self, batch: TokenBatch, trace: int) -> None:
        rows = identified_rows(batch, trace)
        for gaps in token_gaps(batch, self._pair):
            add_gap(rows, gaps)
        self._rows.append(rows)
        self._profiles.append(profiles(batch, self._pair))

    def _rank(
        self, batch: TokenBatch, token_T: np.ndarray, on_page: slice, vocabulary: Vocabulary
    ) -> None:
        """The ranks of the listed tokens in this part of the page; NaN where fewer were
        recorded.
        """
        first, end = np.searchsorted(self._listed_U, [on_page.start, on_page.stop])
        listed_U = self._listed_U[first:end]
        if not len(listed_U) or not self._pair.topk_measured_in(batch):
            return
        assert batch.topk_ids_TK is not None  # `topk_measured_in` checked it
        token_U = token_T[listed_U - on_page.start]
        logq_UK, logp_UK = (
            getattr(batch, str(name))[token_U, :RANKS]
            for name in (self._pair.topk_reference, self._pair.topk_current)
        )
        is_measured_U = ~np.isnan(logq_UK[:, 0])
        missing = RANKS - logq_UK.shape[1]
        wide = partial(np.pad, pad_width=((0, 0), (0, missing)), constant_values=np.nan)
        texts = [
            [*(vocabulary.decode([token]) for token in ids), *[""] * missing]
            for ids in batch.topk_ids_TK[token_U[is_measured_U], :RANKS].tolist()
        ]
        self._ranks.append(
            TopRanks(
                listed_U[is_measured_U],
                texts,
                wide(logq_UK[is_measured_U]),
                wide(logp_UK[is_measured_U]),
            )
        )
