"""Turns the tables of a format into rows of a trace: checks, counts and completes them, or cuts
whole sequences.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.base.numbers import things
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.columns import (
    COLUMNS,
    ID_COLUMNS,
    PROMPT_COLUMN,
    ROW_KEY,
    TOKEN_COLUMNS,
    TOPK_COLUMNS,
    length_column,
)
from mismatch_cli.trace.foreign_values import UNCERTAIN

NO_ROLLOUT = "responses without log-probabilities of the rollout engine"
NO_IDS = "responses without token ids"
NO_PAIR = "responses with neither token ids nor log-probabilities of a second side"
LATER_IDS = "responses with {name}, after others without"
ONLY_LOGP = "responses have no token ids, only log-probabilities: what needs ids is not measured"
NO_PROMPT = "responses have neither prompt_ids nor prompt_id: each counts as a prompt of its own"
TOP_K_WITHOUT_IDS = "responses have top-K columns but no token ids: their top-K columns are dropped"
EMPTY = "responses without a token"
STRANGE_IDS = "responses whose {name} holds numbers that are not token ids"
NO_REWARD = "responses have a reward that is not finite: it is left empty"
NO_VERSION = "responses do not say which weights sampled them, beside others that do: version 0"
NOTE = "note: "  # prefix of columns that count what is noted of each kept row
WRONG_LENGTH = "responses whose {name} does not have one value per token"
WRONG_ADVANTAGE = "responses whose advantage is neither one number nor one per token"
WRONG_TOP_K = "responses whose top-K columns do not have K values per token"
HOLES = "responses whose {name} holds a null"
NO_MASK = "sequences without a trained token, so that the beginning of the response is unknown"
BEYOND = "sequences whose loss mask extends beyond their length (left padding?)"
TOO_LONG = "sequences shorter than their stated length"
UNEQUAL = "sequences whose {name} does not have one value per token id"
SHIFTED = "responses begin with a log-probability one position too early (all shifted by one?)"
UNKNOWN = "unknown"  # finish_reason where the dump has none; readers only test for "length"

_BEGINS = "mask"  # of a sequence, beside the columns of its tokens
_IDS = {PROMPT_COLUMN, "response_ids"}
_SIDES = ("rollout", "trainer", "recomputed")
_SECOND = ("logp_trainer", "logp_recomputed", "logp_average")
# The other sides, whose value tells whether an exact 0 is log 1; a token's first one decides.
_OTHERS = {
    "rollout": ("recomputed", "trainer"),
    "trainer": ("rollout",),
    "recomputed": ("rollout",),
}
_DEFAULTS = {
    "step": 0,
    "epoch": 0,
    "minibatch": 0,
    "version_rollout": 0,
    "finish_reason": UNKNOWN,
}
_NULLS = "trained tokens have a {side} log-probability that is null: not measured"


class Completer:
    """Turns the tables of a format into tables of a trace, in order."""

    def __init__(
        self,
        tally: Tally,
        *,
        newer_trainer: bool,
        vocabulary: int | None = None,
        needs_ids: bool = True,
    ) -> None:
        """`needs_ids`: token ids of prompt and response are required; otherwise the first table
        decides whether the trace has them.
        """
        self._tally = tally
        self._newer_trainer = newer_trainer
        self._vocabulary = vocabulary
        self._ids: set[str] | None = set(_IDS) if needs_ids else None  # that every row must have
        self._keys: set[int] = set()  # of the rows so far
        self._k = 0  # of the top-K columns, once a row has some
        self._numbered = 0  # rows so far, duplicates included
        self.rows = self.tokens = 0
        self.steps: set[int] = set()
        # Rows with log π, and those of them whose trainer has newer weights
        self.scored = self.newer = 0
        self.unfinished = 0  # rows without a finish reason
        self.without_minibatch = 0  # rows that do not name their optimizer step
        self._versioned = self._unversioned = 0  # rows that say which weights sampled them, or not

    def remember(self, table: pa.Table) -> None:
        """Register rows that the trace already holds: rows with their keys are left out."""
        self._keys.update(_keys_of(table).tolist())

    def facts(self) -> dict[str, int]:
        """Counts of complete rows and tokens, and of rows that lack something or have a newer
        trainer.
        """
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "rows_with_trainer": self.scored,
            "rows_with_newer_trainer": self.newer,
            "rows_with_unknown_finish": self.unfinished,
            "rows_without_minibatch": self.without_minibatch,
        }

    def complete(self, table: pa.Table, where: str) -> pa.Table:
        """The usable rows, with every column that a trace requires."""
        table = self._without_ranks(_trace_columns(table))
        table = _only(table, self._usable(table, where))
        table = table.drop_columns([name for name in table.column_names if self._is_foreign(name)])
        if not table.num_rows:
            return table
        columns = _lists.columns_of(table)
        self._fill_tokens(columns)
        lacks_minibatch_S = _lacks(columns, "minibatch", table.num_rows)
        self._fill_keys(columns, table.num_rows)
        self._empty_strange_rewards(columns)
        order = (*COLUMNS, *filter(_is_note, columns))
        table = pa.table({name: columns[name] for name in order if name in columns})
        # Notes are columns until here, so that those of a repeated row leave with it.
        first_S = self._first_of_its_key(table, where)
        table = _only(table, first_S)
        self.without_minibatch += int(lacks_minibatch_S[first_S].sum())
        table = self._without_notes(table)
        self._count(table)
        return table

    def _without_notes(self, table: pa.Table) -> pa.Table:
        """The table without its notes, which are counted."""
        notes = list(filter(_is_note, table.column_names))
        for name in notes:
            count = pc.sum(table.column(name)).as_py() or 0
            if name == NOTE + NO_VERSION:
                self._note_versions(count, table.num_rows)
            else:
                self._tally.note(name.removeprefix(NOTE), count)
        self._note_odd_values(table)
        return table.drop_columns(notes)

    def _usable(self, table: pa.Table, where: str) -> np.ndarray:
        """Which rows have ids, log μ, and one value per token in every token column."""
        columns = _lists.columns_of(table)
        rows = table.num_rows
        bad_S = self._without_ids(columns, rows)
        columns = {name: its for name, its in columns.items() if not self._is_foreign(name)}
        lengths_S, empty_S = _response_lengths(columns, rows)
        bad_S |= {EMPTY: empty_S, NO_ROLLOUT: _lacks(columns, "logp_rollout", rows)}
        values_S: dict[str, np.ndarray] = {}  # how many a row has, by the reason if that is wrong
        for name in filter(columns.__contains__, TOKEN_COLUMNS):
            reason = WRONG_ADVANTAGE if name == "advantage" else WRONG_LENGTH.format(name=name)
            values_S[reason] = _lists.lengths_of(columns[name])
            bad_S[reason] = (values_S[reason] != lengths_S) & ~_lists.is_null(columns[name])
        bad_S |= self._invalid_values(columns)
        good_S = ~np.logical_or.reduce([*bad_S.values()])
        bad_S[WRONG_TOP_K] = self._ragged_top_k(columns, lengths_S, good_S)

        def detail(reason: str, row: int) -> str:
            if reason not in values_S:
                return ""
            return f": {things(values_S[reason][row], 'value')} for {lengths_S[row]:,} tokens"

        return self._tally.sift(bad_S, where, detail)

    def _without_ranks(self, table: pa.Table) -> pa.Table:
        """The table without top-K columns where no id says which rank was sampled."""
        ranks = [name for name in table.column_names if name in TOPK_COLUMNS]
        has_ids = "response_ids" in table.column_names and not self._is_foreign("response_ids")
        if not ranks or has_ids:
            return table
        self._tally.note(TOP_K_WITHOUT_IDS, table.num_rows)
        return table.drop_columns(ranks)

    def _without_ids(self, columns: Mapping[str, pa.Array], rows: int) -> dict[str, np.ndarray]:
        """Rows without the token ids that others have, or with ids that others lack, by reason."""
        present = _IDS & columns.keys()
        if self._ids is None:
            self._ids = present
        no_ids_S = np.zeros(rows, dtype=bool)
        for name in self._ids:
            no_ids_S |= _lists.holds_null(columns[name]) if name in columns else True
        bad_S = {NO_IDS: no_ids_S}
        for name in sorted(present - self._ids):
            bad_S[LATER_IDS.format(name=name)] = ~_lists.is_null(columns[name])
        if "response_ids" not in self._ids:
            lacks_second_S = [_lacks(columns, name, rows) for name in _SECOND]
            bad_S[NO_PAIR] = np.logical_and.reduce(lacks_second_S)
        return bad_S

    def _is_foreign(self, name: str) -> bool:
        """Whether these are ids that the trace does not have: no row that stays has any."""
        return name in _IDS and self._ids is not None and name not in self._ids

    def _invalid_values(self, columns: Mapping[str, pa.Array]) -> dict[str, np.ndarray]:
        """Rows with a null among ids or flags, or with an invalid token id, by reason."""
        bad_S: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            # In a column of floats a null is NaN, "not measured"; elsewhere it makes a row useless.
            if pa.types.is_list(column.type) and not pa.types.is_floating(column.type.value_type):
                bad_S[HOLES.format(name=name)] = _lists.holds_null(column) & ~_lists.is_null(column)
                bad_S[STRANGE_IDS.format(name=name)] = self._strange_ids(name, column)
        return bad_S

    def _ragged_top_k(
        self, columns: dict[str, pa.Array], lengths_S: np.ndarray, good_S: np.ndarray
    ) -> np.ndarray:
        """Rows whose top-K columns lack K values per token; K is the most common one in the
        first block's good rows.
        """
        top_k = {name: columns[name] for name in TOPK_COLUMNS if name in columns}
        if not self._k:
            good = _lists.select_rows(top_k, good_S)
            self._k = _usual_width(good.values(), lengths_S[good_S])
        bad_S = np.zeros(len(lengths_S), dtype=bool)
        for column in top_k.values():
            bad_S |= ~_lists.is_null(column) & (_lists.lengths_of(column) != lengths_S * self._k)
        return bad_S

    def _strange_ids(self, name: str, column: pa.Array) -> np.ndarray:
        """Rows with an invalid token id."""
        strange_S = np.zeros(len(column), dtype=bool)
        if name not in ID_COLUMNS:
            return strange_S
        # Only rows without a null have values that numpy can hold as integers.
        whole_S = ~_lists.holds_null(column)
        whole = column.filter(pa.array(whole_S))
        strange_T = foreign_values.strange_ids(_lists.flat(whole), self._vocabulary)
        row_T = np.repeat(np.flatnonzero(whole_S), _lists.lengths_of(whole))
        strange_S[row_T[strange_T]] = True
        return strange_S

    def _empty_strange_rewards(self, columns: dict[str, pa.Array]) -> None:
        """Replace rewards that are not finite by null."""
        reward = columns.get("reward")
        if reward is None or pc.all(pc.is_finite(reward), min_count=0).as_py():
            return
        strange = pc.fill_null(pc.invert(pc.is_finite(reward)), False)
        columns["reward"] = pc.if_else(strange, pa.scalar(None, reward.type), reward)
        columns[NOTE + NO_REWARD] = strange.cast(pa.int64())

    def _fill_tokens(self, columns: dict[str, pa.Array]) -> None:
        """Replace nulls among values by NaN, "not measured"; without a mask every token is
        trained.
        """
        lengths_S = _lists.lengths_of(columns[length_column(columns)])
        if "response_ids" not in columns:
            columns[NOTE + ONLY_LOGP] = pa.array(np.ones(len(lengths_S), np.int64))
        mask = columns.get("loss_mask")
        if mask is None or mask.null_count:
            mask = all_true_where_null(mask, lengths_S)
            columns["loss_mask"] = mask
        # In the order of the table, not of a set: a report lists the notes as they were made.
        for name in filter(columns.__contains__, (*TOKEN_COLUMNS, *TOPK_COLUMNS)):
            column = columns[name]
            is_float = pa.types.is_floating(column.type.value_type)
            if not is_float or not column.flatten().null_count:
                continue
            side = name.removeprefix("logp_")
            if side in _SIDES:
                columns[NOTE + _NULLS.format(side=side)] = _trained_nulls(column, mask)
            # On its way through numpy, a null among floats becomes NaN.
            columns[name] = _lists.from_flat(
                _lists.flat(column), _lists.lengths_of(column), _lists.is_null(column)
            )

    def _note_versions(self, unversioned: int, rows: int) -> None:
        """Note the rows without a version once others have one, in this block or in another."""
        self._unversioned += unversioned
        self._versioned += rows - unversioned
        if self._versioned:
            self._tally.note(NO_VERSION, self._unversioned)
            self._unversioned = 0

    def _note_odd_values(self, table: pa.Table) -> None:
        """Note odd log-probabilities of trained tokens; the notes of nulls are still columns."""
        columns = _lists.columns_of(table)
        lengths_S = _lists.lengths_of(columns[length_column(columns)])
        trained_T = _lists.flat(columns["loss_mask"])
        logp_N: dict[str, np.ndarray] = {}
        for side in _SIDES:
            if f"logp_{side}" in columns:
                logp_N[side] = _in_every_row(columns[f"logp_{side}"], lengths_S)[trained_T]
        for side, own_N in logp_N.items():
            null_S = _lists.is_null(columns[f"logp_{side}"])
            recorded_N = np.repeat(~null_S, lengths_S)[trained_T]
            ordinary_N = (own_N < 0) & np.isfinite(own_N)
            # Most tables end here: counting the odd values by kind takes a pass for each kind.
            if not (recorded_N & ~ordinary_N).any():
                continue
            missing = int(np.count_nonzero(~recorded_N))
            nulls = columns.get(NOTE + _NULLS.format(side=side))
            if nulls is not None:
                missing += pc.sum(nulls).as_py()
            self._note_dropped(side, own_N, missing)
            others = [logp_N[other] for other in _OTHERS[side] if other in logp_N]
            self._note_zeros(side, own_N, others)

    def _note_dropped(self, side: str, own_N: np.ndarray, missing: int) -> None:
        """Note, by kind, the values that are no log-probability of a sampled token; `missing` ones
        are NaN because nothing was recorded.
        """
        subject = f"trained tokens have a {side} log-probability"
        nans = int(np.isnan(own_N).sum()) - missing
        use = "not measured" if side == "rollout" else "outside of its support"
        self._tally.note(f"{subject} above 0: not measured", int((own_N > 0).sum()))
        self._tally.note(f"{subject} that is NaN: not measured", nans)
        self._tally.note(f"{subject} of −∞: {use}", int(np.isneginf(own_N).sum()))

    def _note_zeros(self, side: str, own_N: np.ndarray, others: Sequence[np.ndarray]) -> None:
        """Note exact zeros that the other side doubts; without another side, all of them.

        A confident policy has many of them on both sides: log 1.
        """
        doubtful_N = own_N == 0
        where = "and no other side to compare with"
        if others:
            other_N = others[0]
            for second_N in others[1:]:
                other_N = np.where(np.isnan(other_N), second_N, other_N)
            doubtful_N &= other_N < UNCERTAIN
            where = f"where the other side's is below −{-UNCERTAIN:g}"
        subject = f"trained tokens have a {side} log-probability of exactly 0"
        advice = "(placeholders? Run `diagnose`)"
        self._tally.note(f"{subject} {where} {advice}", int(doubtful_N.sum()))

    def _fill_keys(self, columns: dict[str, pa.Array], rows: int) -> None:
        """Fill in the keys that a row lacks."""
        unversioned_S = _lacks(columns, "version_rollout", rows)
        columns[NOTE + NO_VERSION] = pa.array(unversioned_S.astype(np.int64))
        for name, value in _DEFAULTS.items():
            columns[name] = _filled(columns.get(name), pa.scalar(value, COLUMNS[name].type), rows)
        # A response with a recomputed log π has its other log π from weights after an update.
        newer_S = np.full(rows, self._newer_trainer) | ~_lacks(columns, "logp_recomputed", rows)
        later = pa.array(columns["version_rollout"].to_numpy() + newer_S, pa.int32())
        columns["version_trainer"] = _filled(columns.get("version_trainer"), later, rows)
        self._fill_prompt_ids(columns, rows)
        columns["sample_index"] = _numbered(columns.get("sample_index"), self._numbered, rows)
        self._numbered += rows

    def _fill_prompt_ids(self, columns: dict[str, pa.Array], rows: int) -> None:
        """A prompt without an id has the hash of its tokens; an unknown one is like no other."""
        prompt_id = columns.get("prompt_id", pa.nulls(rows, pa.int64()))
        if not prompt_id.null_count:
            return
        if PROMPT_COLUMN in columns:
            hash_S = prompt_hash(columns[PROMPT_COLUMN])
        else:
            columns[NOTE + NO_PROMPT] = prompt_id.is_null().cast(pa.int64())
            number_S = np.arange(self._numbered, self._numbered + rows)
            hash_S = _as_ids(hash_keys(number_S))
        columns["prompt_id"] = _filled(prompt_id, pa.array(hash_S), rows)

    def _first_of_its_key(self, table: pa.Table, where: str) -> np.ndarray:
        """Drop duplicates: a dump may hold a response twice (two ranks, a resumed run)."""
        keys = _keys_of(table).tolist()
        repeated_S = np.zeros(len(keys), dtype=bool)
        for row, key in enumerate(keys):
            repeated_S[row] = key in self._keys
            self._keys.add(key)
        reason = "repeated responses (same step, prompt and sample index)"
        return self._tally.sift({reason: repeated_S}, where)

    def _count(self, table: pa.Table) -> None:
        self.rows += table.num_rows
        lists = table.column(length_column(table.column_names))
        self.tokens += int(_lists.lengths_of(foreign_values.single(lists)).sum())
        is_unfinished = pc.equal(table.column("finish_reason"), UNKNOWN)
        self.unfinished += pc.sum(is_unfinished, min_count=0).as_py()
        if "logp_trainer" in table.column_names:
            scored_S = ~_lists.is_null(foreign_values.single(table.column("logp_trainer")))
            newer_S = _numbers(table, "version_trainer") != _numbers(table, "version_rollout")
            self.scored += int(scored_S.sum())
            self.newer += int((scored_S & newer_S).sum())
        self.steps.update(np.unique(_numbers(table, "step")).tolist())


def _response_lengths(columns: Mapping[str, pa.Array], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of tokens of each response, and which ones say that they have none."""
    measure = columns.get(length_column(columns))
    if measure is None:
        return np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=bool)
    lengths_S = _lists.lengths_of(measure)
    return lengths_S, (lengths_S == 0) & ~_lists.is_null(measure)


def _in_every_row(column: pa.Array, lengths_S: np.ndarray) -> np.ndarray:
    """The values of all tokens; NaN in rows that are null."""
    values_T = np.full(int(lengths_S.sum()), np.nan, np.float32)
    values_T[np.repeat(~_lists.is_null(column), lengths_S)] = _lists.flat(column)
    return values_T


def _trained_nulls(column: pa.Array, mask: pa.Array) -> pa.Array:
    """How many trained tokens of each row have a null."""
    lengths_S = _lists.lengths_of(mask)
    null_T = np.zeros(int(lengths_S.sum()), dtype=bool)
    null_T[np.repeat(~_lists.is_null(column), lengths_S)] = _lists.is_null(column.flatten())
    rows = _lists.rows_of(lengths_S)[null_T & _lists.flat(mask)]
    return pa.array(np.bincount(rows, minlength=len(lengths_S)).astype(np.int64))


def _lacks(columns: Mapping[str, pa.Array], name: str, rows: int) -> np.ndarray:
    """Which rows lack a value in a column: every row, if the column is absent."""
    if name not in columns:
        return np.ones(rows, dtype=bool)
    return _lists.is_null(columns[name])


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column of numbers without nulls."""
    return np.asarray(foreign_values.single(table.column(name)).to_numpy())


def _keys_of(table: pa.Table) -> np.ndarray:
    return hash_keys(*(_numbers(table, name) for name in ROW_KEY))


def _trace_columns(table: pa.Table) -> pa.Table:
    """The columns that a trace has, in its types, and the notes; all-null columns are dropped."""
    columns: dict[str, pa.Array] = {}
    for name in filter(table.column_names.__contains__, COLUMNS):
        if not pa.types.is_null(table.column(name).type):
            columns[name] = foreign_values.single(table.column(name))
    measure = columns.get(length_column(columns))
    if "advantage" in columns and measure is None:
        del columns["advantage"]  # without the tokens that it belongs to
    elif "advantage" in columns:
        columns["advantage"] = advantages_per_token(columns["advantage"], measure)
    for name, column in columns.items():
        columns[name] = foreign_values.exact(column, COLUMNS[name].type)
    notes = {name: table.column(name) for name in filter(_is_note, table.column_names)}
    return pa.table(columns | notes)


def advantages_per_token(column: pa.Array, tokens: pa.Array) -> pa.Array:
    """One advantage per token; a number, or a list of one, applies to the whole response."""
    tokens_S = _lists.lengths_of(tokens)
    if not foreign_values.is_list(column.type):
        null_S = _lists.is_null(column)
        column = _lists.from_flat(column.drop_null(), (~null_S).astype(np.int64), null_S)
    values_S = _lists.lengths_of(column)
    lengths_S = np.where(values_S == 1, tokens_S, values_S)
    if np.array_equal(lengths_S, values_S):
        return column
    times_T = np.repeat(np.where(values_S == 1, tokens_S, 1), values_S)
    return _lists.from_flat(
        np.repeat(_lists.flat(column), times_T), lengths_S, _lists.is_null(column)
    )


def _is_note(name: str) -> bool:
    return name.startswith(NOTE)


def _only(table: pa.Table, keep_S: np.ndarray) -> pa.Table:
    """The flagged rows; without a copy if these are all."""
    if keep_S.all():
        return table
    return table.filter(pa.array(keep_S))


def _usual_width(lists: Iterable[pa.Array], lengths_S: np.ndarray) -> int:
    """The most common K per token (the smallest, if tied); 0 without top-K values."""
    widths = [np.empty(0, np.int64)]
    for column in lists:
        entries_S = _lists.lengths_of(column)
        whole_S = (entries_S > 0) & (lengths_S > 0) & (entries_S % np.maximum(lengths_S, 1) == 0)
        widths.append(entries_S[whole_S] // lengths_S[whole_S])
    width, counts = np.unique(np.concatenate(widths), return_counts=True)
    if not len(width):
        return 0
    return int(width[counts.argmax()])


def all_true_where_null(mask: pa.Array | None, lengths_S: np.ndarray) -> pa.Array:
    """A mask of these lengths, all true in rows without one."""
    values_T = np.ones(int(lengths_S.sum()), dtype=bool)
    if mask is not None:
        values_T[np.repeat(~_lists.is_null(mask), lengths_S)] = _lists.flat(mask)
    return _lists.from_flat(values_T, lengths_S)


def _filled(column: pa.Array | None, values: pa.Array | pa.Scalar, rows: int) -> pa.Array:
    """The column with its nulls replaced by `values`, one value or one per row."""
    if column is None:
        column = pa.nulls(rows, values.type)
    return pc.coalesce(column, values)


def _numbered(column: pa.Array | None, first: int, rows: int) -> pa.Array:
    """Number the rows without a number by position, from `first`; a number already taken is
    replaced by a free one.
    """
    number_S = np.arange(first, first + rows, dtype=np.int32)
    if column is None:
        return pa.array(number_S)
    missing_S = _lists.is_null(column)
    recorded = column.drop_null().to_numpy()
    taken_S = missing_S & np.isin(number_S, recorded)
    # Rows with a number of their own leave their position's number free, unless a row has it.
    free = np.setdiff1d(number_S[~missing_S], recorded)
    number_S[taken_S] = free[: taken_S.sum()]
    return _filled(column, pa.array(number_S), rows)


def text_key(text: str) -> int:
    """The id of a prompt with a text name: 63 bits of it, the same in every file and on every
    rank.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def prompt_hash(prompts: pa.Array) -> np.ndarray:
    """63 bits of each prompt's token ids: equal prompts get the same id in every step and file."""
    lengths_S = _lists.lengths_of(prompts)
    offset_S1 = _lists.offsets_of(lengths_S)
    hash_T = hash_keys(_lists.position_in_row(lengths_S), _lists.flat(prompts))
    # A running sum gives every prompt's sum as a difference, modulo 2^64 in unsigned integers.
    sum_T1 = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hash_T)])
    total_S = sum_T1[offset_S1[1:]] - sum_T1[offset_S1[:-1]]
    return _as_ids(hash_keys(total_S.view(np.int64), lengths_S))


def _as_ids(hash_S: np.ndarray) -> np.ndarray:
    """The upper 63 bits, since an int64 with the highest bit is negative."""
    return (hash_S >> np.uint64(1)).astype(np.int64)


def split_sequences(
    ids: pa.Array,
    mask: pa.Array,
    columns: Mapping[str, pa.Array],
    tally: Tally,
    where: str,
    length_S: np.ndarray | None = None,
) -> tuple[dict[str, pa.Array], np.ndarray]:
    """Split sequences into prompt and response; returns the response's columns, and which rows are
    kept.

    `ids`, `mask` (booleans) and `columns` hold one value per position of the sequence; positions
    from `length_S` on are padding. The response begins at the first true position of the mask;
    later gaps in the mask stay, and so do those of a `loss_mask` among the columns.
    """
    total_S = _lists.lengths_of(ids)
    stop_S = total_S if length_S is None else length_S
    keep_S = tally.sift(_misfits(ids, mask, columns, stop_S), where)

    sequences = {"response_ids": ids, _BEGINS: mask, **columns}
    sequences = _lists.select_rows(sequences, keep_S)
    total_S = total_S[keep_S]
    stop_S = stop_S[keep_S]
    first_S, last_S = _lists.ends_of(_lists.flat(sequences[_BEGINS]), total_S)
    fits_S = tally.sift({NO_MASK: first_S < 0, BEYOND: last_S >= stop_S}, where)
    keep_S[np.flatnonzero(keep_S)] = fits_S

    cutter = _Cutter(total_S, np.where(fits_S, first_S, 0), np.where(fits_S, stop_S, 0), fits_S)
    responses = cutter.cut(sequences)
    responses["loss_mask"] = _both(responses.pop(_BEGINS), responses.get("loss_mask"))
    return responses, keep_S


def _both(mask: pa.Array, loss_mask: pa.Array | None) -> pa.Array:
    """The flags of the mask that a loss mask does not clear, in rows that have one."""
    if loss_mask is None:
        return mask
    lengths_S = _lists.lengths_of(mask)
    flags_T = _lists.flat(mask) & _lists.flat(all_true_where_null(loss_mask, lengths_S))
    return _lists.from_flat(flags_T, lengths_S)


def _misfits(
    ids: pa.Array, mask: pa.Array, columns: Mapping[str, pa.Array], stop_S: np.ndarray
) -> dict[str, np.ndarray]:
    """Sequences with a hole, or with columns that are not as long as their ids, by reason."""
    total_S = _lists.lengths_of(ids)
    bad_S = {NO_IDS: _lists.holds_null(ids), TOO_LONG: stop_S > total_S}
    for name, column in {"loss mask": mask, **columns}.items():
        differs_S = _lists.lengths_of(column) != total_S
        bad_S[UNEQUAL.format(name=name)] = differs_S & ~_lists.is_null(column)
    bad_S[NO_MASK] = _lists.holds_null(mask)
    if "loss_mask" in columns:
        holes_S = _lists.holds_null(columns["loss_mask"]) & ~_lists.is_null(columns["loss_mask"])
        bad_S[HOLES.format(name="loss_mask")] = holes_S
    return bad_S


class _Cutter:
    """Knows which positions of the flattened sequences are prompt, and which are response.

    A sequence has `total_S` positions; its response begins at `first_S` and ends before `stop_S`,
    both 0 for the rows that are left out.
    """

    def __init__(
        self, total_S: np.ndarray, first_S: np.ndarray, stop_S: np.ndarray, keep_S: np.ndarray
    ) -> None:
        start_S = _lists.offsets_of(total_S)[:-1]
        self._total_S = total_S
        self._keep_S = keep_S
        self._prompt_S = first_S  # the length of the prompt
        self._response_S = stop_S - first_S
        self._begin_S = start_S + first_S
        self._end_S = start_S + stop_S
        self._prompt_T = _lists.ranges(start_S, self._begin_S)
        self._response_T = _lists.ranges(self._begin_S, self._end_S)

    def cut(self, sequences: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """The prompts, the responses' columns, and the note on a shift."""
        prompt_T = _lists.flat(sequences["response_ids"])[self._prompt_T]
        columns = {"prompt_ids": _lists.from_flat(prompt_T, self._prompt_S[self._keep_S])}
        for name, column in sequences.items():
            columns[name] = self._response(column)
        if "logp_rollout" in sequences:
            shifted_S = self._shifted(sequences["logp_rollout"])
            columns[NOTE + SHIFTED] = pa.array(shifted_S.astype(np.int64))
        return columns

    def _response(self, column: pa.Array) -> pa.Array:
        """The values of the response of each kept row; null rows stay null."""
        null_S = _lists.is_null(column)
        if null_S.all():
            return pa.nulls(int(self._keep_S.sum()), column.type)
        # A null row has no values, so later rows are at earlier places than their positions say.
        # A null inside of a row has a place, and stays a null.
        recorded_T = np.repeat(~null_S, self._total_S)
        place_T = (np.cumsum(recorded_T) - 1)[self._response_T]
        taken = pa.array(place_T, mask=~recorded_T[self._response_T])
        values = column.flatten().take(taken)
        responses = _lists.from_flat(values, self._response_S[self._keep_S])
        recorded = pa.array(~null_S[self._keep_S])
        return pc.if_else(recorded, responses, pa.nulls(len(responses), responses.type))

    def _shifted(self, logp: pa.Array) -> np.ndarray:
        """Kept rows with a log-probability at the last prompt position, but none at the last
        response position.
        """
        null_S = _lists.is_null(logp)
        shifted_S = np.zeros(len(logp), dtype=bool)
        has_both_S = self._keep_S & ~null_S & (self._prompt_S > 0)
        values_T = _lists.flat(logp)
        # A null row has no values, so later rows are at earlier places than their positions say.
        absent_S = _lists.offsets_of(np.where(null_S, self._total_S, 0))[:-1]
        before = values_T[(self._begin_S - absent_S)[has_both_S] - 1]
        last = values_T[(self._end_S - absent_S)[has_both_S] - 1]
        # Nulls, and fillers above 0, are not log-probabilities.
        shifted_S[has_both_S] = (before < 0) & (last == 0)
        return shifted_S[self._keep_S]
