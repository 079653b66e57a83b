"""Turns the tables of a format into rows of a trace: checks, counts and completes them, or cuts
whole sequences.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.hashing import hash_keys
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

_IDS = {PROMPT_COLUMN, "response_ids"}
_SIDES = ("rollout", "trainer", "recomputed")
_SECOND = ("logp_trainer", "logp_recomputed", "logp_average")
_OTHERS = {  # whose value tells whether an exact 0 is log 1
    "rollout": ("recomputed", "trainer"),
    "trainer": ("rollout",),
    "recomputed": ("rollout",),
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
        self._tally, self._newer_trainer, self._vocabulary = tally, newer_trainer, vocabulary
        self._ids: set[str] | None = set(_IDS) if needs_ids else None
        self._seen: set[int] = set()
        self._k = 0  # of the top-K columns, once a row has some
        self._numbers = 0  # rows so far, duplicates included
        self.rows = self.tokens = 0
        self.steps: set[int] = set()
        # Rows with log π, and those of them whose trainer has newer weights
        self.scored = self.newer = 0
        self.unfinished = 0  # rows without a finish reason
        self.without_minibatch = 0  # rows that do not name their optimizer step
        self._versioned = self._unversioned = 0  # rows that say which weights sampled them, or not

    def remember(self, table: pa.Table) -> None:
        """Register rows that the trace already holds: rows with their keys are left out."""
        self._seen.update(_keys(table).tolist())

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
        table = self._without_ranks(_known_columns(table))
        table = _only(table, self._usable(table, where))
        if not table.num_rows:
            return table
        columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
        self._fill_tokens(columns)
        self._fill_keys(columns, table.num_rows)
        self._empty_strange_rewards(columns)
        names = [name for name in columns if name.startswith(NOTE)]
        table = pa.table({name: columns[name] for name in (*COLUMNS, *names) if name in columns})
        table = _only(table, self._first_of_its_key(table, where))
        for name in _notes(table):
            count = pc.sum(table.column(name)).as_py() or 0
            if name == NOTE + NO_VERSION:
                self._note_versions(count, table.num_rows)
            else:
                self._tally.note(name.removeprefix(NOTE), count)
        self._note_odd_values(table)
        table = table.drop_columns(_notes(table))
        self._count(table)
        return table

    def _usable(self, table: pa.Table, where: str) -> np.ndarray:
        """Which rows have ids, log μ, and one value per token in every token column."""
        columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
        absent_S = np.ones(table.num_rows, dtype=bool)
        bad_S = self._without_ids(columns, absent_S)
        mu, measure = columns.get("logp_rollout"), columns.get(length_column(columns))
        lengths_S = absent_S * 0 if measure is None else _lists.lengths_of(measure)
        bad_S |= {
            EMPTY: (lengths_S == 0) & (absent_S if measure is None else ~_lists.is_null(measure)),
            NO_ROLLOUT: absent_S if mu is None else _lists.is_null(mu),
        }
        counts: dict[str, np.ndarray] = {}
        for name in TOKEN_COLUMNS:
            if name in columns:
                reason = WRONG_ADVANTAGE if name == "advantage" else WRONG_LENGTH.format(name=name)
                counts[reason] = given_S = _lists.lengths_of(columns[name])
                bad_S[reason] = (given_S != lengths_S) & ~_lists.is_null(columns[name])
        for name, column in columns.items():  # in float columns a null is NaN, "not measured"
            if pa.types.is_list(column.type) and not pa.types.is_floating(column.type.value_type):
                bad_S[HOLES.format(name=name)] = _lists.holds_null(column) & ~_lists.is_null(column)
                bad_S[STRANGE_IDS.format(name=name)] = self._strange_ids(name, column)
        good_S = ~np.logical_or.reduce([*bad_S.values()])
        bad_S |= {WRONG_TOP_K: self._ragged_top_k(columns, lengths_S, good_S)}

        def detail(reason: str, row: int) -> str:
            if reason not in counts:
                return ""
            given = counts[reason][row]
            return (
                f": {given:,} {'value' if given == 1 else 'values'} for {lengths_S[row]:,} tokens"
            )

        return self._tally.sift(bad_S, where, detail)

    def _without_ranks(self, table: pa.Table) -> pa.Table:
        """The table without top-K columns where no id says which rank was sampled."""
        ranks = [name for name in table.column_names if name in TOPK_COLUMNS]
        if not ranks or "response_ids" in table.column_names:
            return table
        self._tally.note(TOP_K_WITHOUT_IDS, table.num_rows)
        return table.drop_columns(ranks)

    def _without_ids(
        self, columns: Mapping[str, pa.Array], absent_S: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Rows without the token ids that others have, or with ids that others lack, by reason."""
        present = _IDS & columns.keys()
        self._ids = present if self._ids is None else self._ids
        no_ids_S = ~absent_S
        for name in self._ids:
            no_ids_S |= _lists.holds_null(columns[name]) if name in columns else absent_S
        bad_S = {NO_IDS: no_ids_S}
        for name in sorted(present - self._ids):
            bad_S[LATER_IDS.format(name=name)] = ~_lists.is_null(columns[name])
        if "response_ids" not in self._ids:
            scored_S = [~_lists.is_null(columns[name]) for name in _SECOND if name in columns]
            bad_S[NO_PAIR] = ~np.logical_or.reduce([~absent_S, *scored_S])
        return bad_S

    def _ragged_top_k(
        self, columns: dict[str, pa.Array], lengths_S: np.ndarray, good_S: np.ndarray
    ) -> np.ndarray:
        """Rows whose top-K columns lack K values per token; K is the most common one in the
        first block's good rows.
        """
        lists = [columns[name] for name in TOPK_COLUMNS if name in columns]
        self._k = self._k or _usual_width(
            [column.filter(pa.array(good_S)) for column in lists], lengths_S[good_S]
        )
        bad_S = np.zeros(len(lengths_S), dtype=bool)
        for column in lists:
            bad_S |= ~_lists.is_null(column) & (_lists.lengths_of(column) != lengths_S * self._k)
        return bad_S

    def _strange_ids(self, name: str, column: pa.Array) -> np.ndarray:
        """Rows with an invalid token id."""
        found_S, known_S = np.zeros(len(column), dtype=bool), ~_lists.holds_null(column)
        if name in ID_COLUMNS:
            known = column.filter(pa.array(known_S))
            strange_T = foreign_values.strange_ids(_lists.flat(known), self._vocabulary)
            found_S[
                np.flatnonzero(known_S)[_lists.rows_of(_lists.lengths_of(known))[strange_T]]
            ] = True
        return found_S

    def _empty_strange_rewards(self, columns: dict[str, pa.Array]) -> None:
        reward = columns.get("reward")
        if reward is not None and not pc.all(pc.is_finite(reward), min_count=0).as_py():
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
            columns["loss_mask"] = mask = all_true_where_null(mask, lengths_S)
        for name in {*TOKEN_COLUMNS, *TOPK_COLUMNS} & columns.keys():
            column = columns[name]
            if pa.types.is_floating(column.type.value_type) and column.flatten().null_count:
                side = name.removeprefix("logp_")
                if side in _SIDES:
                    columns[NOTE + _NULLS.format(side=side)] = _trained_nulls(column, mask)
                columns[name] = _lists.from_flat(
                    _lists.flat(column), _lists.lengths_of(column), _lists.is_null(column)
                )

    def _note_versions(self, unknown: int, rows: int) -> None:
        """Note the rows without a version once others have one, in this block or in another."""
        self._unversioned += unknown
        self._versioned += rows - unknown
        if self._versioned:
            self._tally.note(NO_VERSION, self._unversioned)
            self._unversioned = 0

    def _note_odd_values(self, table: pa.Table) -> None:
        """Note odd values in the responses that are kept; the notes of nulls are still columns."""
        columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
        lengths_S = _lists.lengths_of(columns[length_column(columns)])
        trained_T = _lists.flat(columns["loss_mask"])
        of_side = {side: columns.get(f"logp_{side}") for side in _SIDES}
        logp_T = {
            side: _in_every_row(column, lengths_S)[trained_T]
            for side, column in of_side.items()
            if column is not None
        }
        for side, own_T in logp_T.items():
            recorded_T = np.repeat(~_lists.is_null(of_side[side]), lengths_S)[trained_T]
            if (recorded_T & ~((own_T < 0) & np.isfinite(own_T))).any():
                nulls = columns.get(NOTE + _NULLS.format(side=side))
                missing = int((~recorded_T).sum()) + (pc.sum(nulls).as_py() if nulls else 0)
                self._note_dropped(side, own_T, missing)
                others = [logp_T[other] for other in _OTHERS[side] if other in logp_T]
                self._note_zeros(side, own_T, others)

    def _note_dropped(self, side: str, own_T: np.ndarray, missing: int) -> None:
        """Note, by kind, the values that are no log-probability of a sampled token; `missing` ones
        are NaN because nothing was recorded.
        """
        said = f"trained tokens have a {side} log-probability"
        self._tally.note(f"{said} above 0: not measured", int((own_T > 0).sum()))
        self._tally.note(f"{said} that is NaN: not measured", int(np.isnan(own_T).sum()) - missing)
        use = "not measured" if side == "rollout" else "outside of its support"
        self._tally.note(f"{said} of −∞: {use}", int(np.isneginf(own_T).sum()))

    def _note_zeros(self, side: str, own_T: np.ndarray, others: Sequence[np.ndarray]) -> None:
        """Note exact zeros that the other side doubts; without another side, all of them.

        A confident policy has many of them on both sides: log 1.
        """
        doubtful_T, where = own_T == 0, "and no other side to compare with"
        if others:
            doubtful_T = doubtful_T & (others[0] < UNCERTAIN)
            where = f"where the other side's is below −{-UNCERTAIN:g}"
        said = f"trained tokens have a {side} log-probability of exactly 0"
        self._tally.note(f"{said} {where} (placeholders? Run `diagnose`)", int(doubtful_T.sum()))

    def _fill_keys(self, columns: dict[str, pa.Array], rows: int) -> None:
        """Fill in the keys that a row lacks."""
        minibatch = columns.get("minibatch")
        self.without_minibatch += rows if minibatch is None else minibatch.null_count
        version = columns.get("version_rollout")
        unknown = pa.array(np.ones(rows, bool)) if version is None else version.is_null()
        columns[NOTE + NO_VERSION] = unknown.cast(pa.int64())
        defaults = {
            "step": 0,
            "epoch": 0,
            "minibatch": 0,
            "version_rollout": 0,
            "finish_reason": UNKNOWN,
        }
        for name, value in defaults.items():
            columns[name] = _filled(columns.get(name), pa.scalar(value, COLUMNS[name].type), rows)
        newer_S = np.full(rows, self._newer_trainer)
        if "logp_recomputed" in columns:
            newer_S |= ~_lists.is_null(columns["logp_recomputed"])
        later = pa.array(columns["version_rollout"].to_numpy() + newer_S, pa.int32())
        columns["version_trainer"] = _filled(columns.get("version_trainer"), later, rows)
        self._fill_prompt_ids(columns, rows)
        columns["sample_index"] = _numbered(columns.get("sample_index"), self._numbers, rows)
        self._numbers += rows

    def _fill_prompt_ids(self, columns: dict[str, pa.Array], rows: int) -> None:
        """A prompt without an id has the hash of its tokens; an unknown one is like no other."""
        prompt_id = columns.get("prompt_id", pa.nulls(rows, pa.int64()))
        if prompt_id.null_count and PROMPT_COLUMN not in columns:
            columns[NOTE + NO_PROMPT] = prompt_id.is_null().cast(pa.int64())
            number_S = hash_keys(np.arange(self._numbers, self._numbers + rows))
            hash_S = (number_S >> np.uint64(1)).astype(np.int64)
        elif prompt_id.null_count:
            hash_S = prompt_hash(columns[PROMPT_COLUMN])
        else:
            return
        columns["prompt_id"] = _filled(prompt_id, pa.array(hash_S), rows)

    def _first_of_its_key(self, table: pa.Table, where: str) -> np.ndarray:
        """Drop duplicates: a dump may hold a response twice (two ranks, a resumed run)."""
        keys = _keys(table).tolist()
        new_S = np.zeros(len(keys), dtype=bool)
        for row, key in enumerate(keys):
            new_S[row] = key not in self._seen
            self._seen.add(key)
        return self._tally.sift(
            {"repeated responses (same step, prompt and sample index)": ~new_S}, where
        )

    def _count(self, table: pa.Table) -> None:
        self.rows += table.num_rows
        lists = table.column(length_column(table.column_names))
        self.tokens += int(_lists.lengths_of(foreign_values.single(lists)).sum())
        self.unfinished += pc.sum(pc.equal(table.column("finish_reason"), UNKNOWN)).as_py() or 0
        if "logp_trainer" in table.column_names:
            versions = (
                foreign_values.single(table.column(f"version_{side}")).to_numpy()
                for side in ("trainer", "rollout")
            )
            scored_S = ~_lists.is_null(foreign_values.single(table.column("logp_trainer")))
            self.scored += int(scored_S.sum())
            self.newer += int((scored_S & np.not_equal(*versions)).sum())
        self.steps |= set(
            np.unique(foreign_values.single(table.column("step")).to_numpy()).tolist()
        )


def _in_every_row(column: pa.Array, lengths_S: np.ndarray) -> np.ndarray:
    """The values of all tokens; NaN in rows that are null."""
    found_T = np.full(int(lengths_S.sum()), np.nan, np.float32)
    found_T[np.repeat(~_lists.is_null(column), lengths_S)] = _lists.flat(column)
    return found_T


def _trained_nulls(column: pa.Array, mask: pa.Array) -> pa.Array:
    """How many trained tokens of each row have a null."""
    lengths_S = _lists.lengths_of(mask)
    null_T = np.zeros(int(lengths_S.sum()), dtype=bool)
    null_T[np.repeat(~_lists.is_null(column), lengths_S)] = _lists.is_null(column.flatten())
    rows = _lists.rows_of(lengths_S)[null_T & _lists.flat(mask)]
    return pa.array(np.bincount(rows, minlength=len(lengths_S)).astype(np.int64))


def _keys(table: pa.Table) -> np.ndarray:
    return hash_keys(*(foreign_values.single(table.column(name)).to_numpy() for name in ROW_KEY))


def _known_columns(table: pa.Table) -> pa.Table:
    """The trace's columns among the given ones, in its types, and the notes; all-null columns
    are dropped.
    """
    names = [n for n in COLUMNS if n in table.column_names and table.column(n).type != pa.null()]
    given = {name: foreign_values.single(table.column(name)) for name in names}
    measure = given.get(length_column(given))
    if "advantage" in given and measure is not None:
        given["advantage"] = _advantages(given["advantage"], measure)
    elif "advantage" in given:
        del given["advantage"]  # without the tokens that it belongs to
    columns = {
        name: foreign_values.exact(column, COLUMNS[name].type) for name, column in given.items()
    }
    return pa.table(columns | {name: table.column(name) for name in _notes(table)})


def _advantages(column: pa.Array, tokens: pa.Array) -> pa.Array:
    """One advantage per token; a number, or a list of one, applies to the whole response."""
    wanted_S = _lists.lengths_of(tokens)
    if not foreign_values.is_list(column.type):
        null_S = _lists.is_null(column)
        column = _lists.from_flat(column.drop_null(), (~null_S).astype(np.int64), null_S)
    given_S = _lists.lengths_of(column)
    lengths_S = np.where(given_S == 1, wanted_S, given_S)
    if np.array_equal(lengths_S, given_S):
        return column
    times_T = np.repeat(np.where(given_S == 1, wanted_S, 1), given_S)
    return _lists.from_flat(
        np.repeat(_lists.flat(column), times_T), lengths_S, _lists.is_null(column)
    )


def _notes(table: pa.Table) -> list[str]:
    return [name for name in table.column_names if name.startswith(NOTE)]


def _only(table: pa.Table, keep_S: np.ndarray) -> pa.Table:
    return table if keep_S.all() else table.filter(pa.array(keep_S))


def _usual_width(lists: Sequence[pa.Array], lengths_S: np.ndarray) -> int:
    """The most common K per token (the smallest, if tied); 0 without top-K values."""
    widths = [np.empty(0, np.int64)]
    for column in lists:
        entries_S = _lists.lengths_of(column)
        whole_S = (entries_S > 0) & (lengths_S > 0) & (entries_S % np.maximum(lengths_S, 1) == 0)
        widths.append(entries_S[whole_S] // lengths_S[whole_S])
    found, counts = np.unique(np.concatenate(widths), return_counts=True)
    return int(found[counts.argmax()]) if len(found) else 0


def all_true_where_null(mask: pa.Array | None, lengths_S: np.ndarray) -> pa.Array:
    """A mask of these lengths, all true in rows without one."""
    values_T = np.ones(int(lengths_S.sum()), dtype=bool)
    if mask is not None:
        values_T[np.repeat(~_lists.is_null(mask), lengths_S)] = _lists.flat(mask)
    return _lists.from_flat(values_T, lengths_S)


def _filled(column: pa.Array | None, values: pa.Array | pa.Scalar, rows: int) -> pa.Array:
    """The column with its nulls replaced by `values`, one value or one per row."""
    return pc.coalesce(pa.nulls(rows, values.type) if column is None else column, values)


def _numbered(column: pa.Array | None, first: int, rows: int) -> pa.Array:
    """Number the rows without a number by position, from `first`; a number already taken is
    replaced by a free one.
    """
    number_S = np.arange(first, first + rows, dtype=np.int32)
    if column is None:
        return pa.array(number_S)
    missing_S, given = _lists.is_null(column), column.drop_null().to_numpy()
    taken_S = missing_S & np.isin(number_S, given)
    number_S[taken_S] = np.setdiff1d(number_S[~missing_S], given)[: taken_S.sum()]
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
    position_T = np.arange(offset_S1[-1]) - np.repeat(offset_S1[:-1], lengths_S)
    sums = np.concatenate(
        [np.zeros(1, np.uint64), np.cumsum(hash_keys(position_T, _lists.flat(prompts)))]
    )
    total_S = sums[offset_S1[1:]] - sums[offset_S1[:-1]]  # modulo 2^64
    return (hash_keys(total_S.view(np.int64), lengths_S) >> np.uint64(1)).astype(np.int64)


def split(
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
    later gaps in the mask stay.
    """
    total_S = _lists.lengths_of(ids)
    stop_S = total_S if length_S is None else length_S
    bad_S = {NO_IDS: _lists.holds_null(ids), TOO_LONG: stop_S > total_S}
    for name, column in {"loss mask": mask, **columns}.items():
        bad_S[UNEQUAL.format(name=name)] = (_lists.lengths_of(column) != total_S) & ~_lists.is_null(
            column
        )
    bad_S[NO_MASK] = _lists.holds_null(mask)
    keep_S = tally.sift(bad_S, where)
    ids, mask, stop_S = ids.filter(pa.array(keep_S)), mask.filter(pa.array(keep_S)), stop_S[keep_S]
    columns = {name: column.filter(pa.array(keep_S)) for name, column in columns.items()}

    total_S = _lists.lengths_of(ids)
    first_S, last_S = _lists.ends_of(_lists.flat(mask), total_S)
    fits_S = tally.sift({NO_MASK: first_S < 0, BEYOND: last_S >= stop_S}, where)
    keep_S[np.flatnonzero(keep_S)[~fits_S]] = False
    cutter = _Cutter(total_S, np.where(fits_S, first_S, 0), np.where(fits_S, stop_S, 0), fits_S)
    found = {
        "prompt_ids": cutter.prompt(ids),
        "response_ids": cutter.response(ids),
        "loss_mask": cutter.response(mask),
    }
    found |= {name: cutter.response(column) for name, column in columns.items()}
    if "logp_rollout" in columns:
        found[NOTE + SHIFTED] = pa.array(cutter.shifted(columns["logp_rollout"]).astype(np.int64))
    return found, keep_S


class _Cutter:
    """Knows which positions of the flattened sequences are prompt, and which are response."""

    def __init__(
        self, total_S: np.ndarray, first_S: np.ndarray, stop_S: np.ndarray, keep_S: np.ndarray
    ) -> None:
        start_S = _lists.offsets_of(total_S)[:-1]
        self._total_S, self._keep_S = total_S, keep_S
        self._first_S, self._start_S, self._stop_S = first_S, start_S, stop_S
        self._prompt_T = _lists.ranges(start_S, start_S + first_S)
        self._response_T = _lists.ranges(start_S + first_S, start_S + stop_S)

    def prompt(self, column: pa.Array) -> pa.Array:
        return _lists.from_flat(_lists.flat(column)[self._prompt_T], self._first_S[self._keep_S])

    def response(self, column: pa.Array) -> pa.Array:
        null_S = _lists.is_null(column)
        lengths_S = (self._stop_S - self._first_S)[self._keep_S]
        if null_S.all():
            return pa.nulls(int(self._keep_S.sum()), column.type)
        # A null row has no values; a null inside of a row stays one
        known_T = np.repeat(~null_S, self._total_S)
        index_T = (np.cumsum(known_T) - 1)[self._response_T]
        values = column.flatten().take(pa.array(index_T, mask=~known_T[self._response_T]))
        found = _lists.from_flat(values, lengths_S)
        return pc.if_else(pa.array(~null_S[self._keep_S]), found, pa.nulls(len(found), found.type))

    def shifted(self, logp: pa.Array) -> np.ndarray:
        """Kept rows with a log-probability at the last prompt position, but none at the last
        response position.
        """
        found_S = np.zeros(len(logp), dtype=bool)
        sure_S = self._keep_S & (self._first_S > 0)
        if not _lists.is_null(logp).any():
            values_T = _lists.flat(logp)
            before = values_T[(self._start_S + self._first_S - 1)[sure_S]]
            last = values_T[(self._start_S + self._stop_S - 1)[sure_S]]
            found_S[sure_S] = (before != 0) & (last == 0)
        return found_S[self._keep_S]
