"""Rows of a trace from what a format yields: checked, counted and completed, or cut out of whole sequences."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.hashing import hash_keys
from mismatch_cli.importers import _lists
from mismatch_cli.importers._tally import Tally
from mismatch_cli.trace import foreign
from mismatch_cli.trace.schema import (
    ID_COLUMNS,
    PROMPT_COLUMN,
    ROW_COLUMNS,
    ROW_KEY,
    TOKEN_COLUMNS,
    TOPK_COLUMNS,
    arrow_type,
    column_order,
)

NO_ROLLOUT = "responses without log-probabilities of the rollout engine"
NO_IDS = "responses without token ids"
EMPTY = "responses without a token"
STRANGE_IDS = "responses whose {name} holds a number that is no token id"
NO_REWARD = "responses have a reward that is no finite number: it is left empty"
NOTE = "note: "  # begins the name of a column of counts: what is noted of each row that is kept
WRONG_LENGTH = "responses whose {name} has another length than their tokens"
HOLES = "responses whose {name} holds a null"
NO_MASK = "responses without a trained token (nothing says where they begin)"
BEYOND = "sequences whose loss mask reaches beyond their length (padding on the left?)"
TOO_LONG = "sequences that are shorter than the length they state"
UNEQUAL = "sequences whose {name} has another length than their token ids"
SHIFTED = "responses begin with a log-probability one position too early (all shifted by one?)"
UNKNOWN = "unknown"  # finish_reason, where a dump does not say; readers ask for "length" only

_SIDES = ("rollout", "trainer", "recomputed")


class Completer:
    """Turns the tables of a format into tables of a trace, in the order in which they come."""

    def __init__(self, tally: Tally, *, newer_trainer: bool, vocabulary: int | None = None) -> None:
        self._tally, self._newer_trainer, self._vocabulary = tally, newer_trainer, vocabulary
        self._seen: set[int] = set()
        self._k = 0  # of the top-K columns, once there are any
        self._numbers = 0  # of rows so far, those included that were there before
        self.rows = self.tokens = 0
        self.steps: set[int] = set()
        self.scored = self.newer = 0  # rows with log π, and those of them whose trainer has newer weights
        self.unfinished = 0  # rows of which nobody knows why they ended
        self.without_minibatch = 0  # rows that do not say of which optimiser step they are

    def remember(self, table: pa.Table) -> None:
        """Rows that the trace holds already: a row with the key of one of them is left out."""
        self._seen.update(_keys(table).tolist())

    def facts(self) -> dict[str, int]:
        """How many rows and tokens were complete so far, and of how many rows something is not known or newer."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "rows_with_trainer": self.scored,
            "rows_with_newer_trainer": self.newer,
            "rows_with_unknown_finish": self.unfinished,
            "rows_without_minibatch": self.without_minibatch,
        }

    def complete(self, table: pa.Table, where: str) -> pa.Table:
        """The rows that can be used, with every column that a trace requires."""
        table = _known_columns(table)
        table = _only(table, self._usable(table, where))
        if not table.num_rows:
            return table
        columns = {name: foreign.single(table.column(name)) for name in table.column_names}
        self._fill_tokens(columns)
        self._fill_keys(columns, table.num_rows)
        self._empty_strange_rewards(columns)
        names = [name for name in columns if name.startswith(NOTE)]
        table = pa.table({name: columns[name] for name in (*column_order(), *names) if name in columns})
        table = _only(table, self._first_of_its_key(table, where))
        for name in _notes(table):
            self._tally.note(name.removeprefix(NOTE), pc.sum(table.column(name)).as_py() or 0)
        table = table.drop_columns(_notes(table))
        self._note_odd_values(table)
        self._count(table)
        return table

    def _usable(self, table: pa.Table, where: str) -> np.ndarray:
        """Which rows have ids and log μ, and as many values in every column as they have tokens."""
        columns = {name: foreign.single(table.column(name)) for name in table.column_names}
        nothing_S = np.ones(table.num_rows, dtype=bool)
        no_ids_S = np.zeros(table.num_rows, dtype=bool)
        for name in (PROMPT_COLUMN, "response_ids"):
            no_ids_S |= _lists.holds_null(columns[name]) if name in columns else nothing_S
        ids, mu = columns.get("response_ids"), columns.get("logp_rollout")
        lengths_S = np.zeros(table.num_rows, np.int64) if ids is None else _lists.lengths_of(ids)
        bad_S = {NO_IDS: no_ids_S, EMPTY: lengths_S == 0, NO_ROLLOUT: nothing_S if mu is None else _lists.is_null(mu)}
        for name in TOKEN_COLUMNS:
            if name in columns:
                other_S = (_lists.lengths_of(columns[name]) != lengths_S) & ~_lists.is_null(columns[name])
                bad_S[WRONG_LENGTH.format(name=name)] = other_S
        for name, column in columns.items():  # among floats a null is NaN, "not measured"
            if pa.types.is_list(column.type) and not pa.types.is_floating(column.type.value_type):
                bad_S[HOLES.format(name=name)] = _lists.holds_null(column) & ~_lists.is_null(column)
                bad_S[STRANGE_IDS.format(name=name)] = self._strange_ids(name, column)
        good_S = ~np.logical_or.reduce([*bad_S.values()])
        bad_S |= {WRONG_LENGTH.format(name="top-K columns"): self._ragged_top_k(columns, lengths_S, good_S)}
        return self._tally.sift(bad_S, where)

    def _ragged_top_k(self, columns: dict[str, pa.Array], lengths_S: np.ndarray, good_S: np.ndarray) -> np.ndarray:
        """Rows whose top-K columns are not K values per token; K is that of most good rows of the first block."""
        lists = [columns[name] for name in TOPK_COLUMNS if name in columns]
        self._k = self._k or _usual_width([column.filter(pa.array(good_S)) for column in lists], lengths_S[good_S])
        bad_S = np.zeros(len(lengths_S), dtype=bool)
        for column in lists:
            bad_S |= ~_lists.is_null(column) & (_lists.lengths_of(column) != lengths_S * self._k)
        return bad_S

    def _strange_ids(self, name: str, column: pa.Array) -> np.ndarray:
        """Rows with an id that no token has."""
        found_S, known_S = np.zeros(len(column), dtype=bool), ~_lists.holds_null(column)
        if name in ID_COLUMNS:
            known = column.filter(pa.array(known_S))
            strange_T = foreign.strange_ids(_lists.flat(known), self._vocabulary)
            found_S[np.flatnonzero(known_S)[_lists.rows_of(_lists.lengths_of(known))[strange_T]]] = True
        return found_S

    def _empty_strange_rewards(self, columns: dict[str, pa.Array]) -> None:
        reward = columns.get("reward")
        if reward is not None and not pc.all(pc.is_finite(reward), min_count=0).as_py():
            strange = pc.fill_null(pc.invert(pc.is_finite(reward)), False)
            columns["reward"] = pc.if_else(strange, pa.scalar(None, reward.type), reward)
            columns[NOTE + NO_REWARD] = strange.cast(pa.int64())

    def _fill_tokens(self, columns: dict[str, pa.Array]) -> None:
        """Nulls among values become NaN, "not measured"; without a mask every token is trained."""
        lengths_S = _lists.lengths_of(columns["response_ids"])
        mask = columns.get("loss_mask")
        if mask is None or mask.null_count:
            columns["loss_mask"] = mask = all_true_where_null(mask, lengths_S)
        for name in (TOKEN_COLUMNS | TOPK_COLUMNS).keys() & columns.keys():
            column = columns[name]
            if pa.types.is_floating(column.type.value_type) and column.flatten().null_count:
                columns[name] = _lists.from_flat(_lists.flat(column), _lists.lengths_of(column), _lists.is_null(column))

    def _note_odd_values(self, table: pa.Table) -> None:
        """What is kept but looks odd, in the responses that are kept."""
        lengths_S = _lists.lengths_of(foreign.single(table.column("response_ids")))
        trained_T = _lists.flat(foreign.single(table.column("loss_mask")))
        for side in _SIDES:
            if f"logp_{side}" in table.column_names:
                self._note_odd(side, foreign.single(table.column(f"logp_{side}")), lengths_S, trained_T)

    def _note_odd(self, side: str, column: pa.Array, lengths_S: np.ndarray, trained_T: np.ndarray) -> None:
        null_S, logp_T = _lists.is_null(column), _lists.flat(column)
        if (logp_T < 0).all():  # false for NaN too
            return
        counted = logp_T[trained_T[np.repeat(~null_S, lengths_S)] if null_S.any() else trained_T]
        tokens = f"trained tokens have a {side} log-probability"
        self._tally.note(f"{tokens} of exactly 0 (placeholders? see `diagnose`)", int((counted == 0).sum()))
        self._tally.note(f"{tokens} above 0: not measured", int((counted > 0).sum()))
        self._tally.note(f"{tokens} that is no number: not measured", int(np.isnan(counted).sum()))

    def _fill_keys(self, columns: dict[str, pa.Array], rows: int) -> None:
        """What a row does not say of itself, whatever its neighbours say."""
        minibatch = columns.get("minibatch")
        self.without_minibatch += rows if minibatch is None else minibatch.null_count
        defaults = {"step": 0, "epoch": 0, "minibatch": 0, "version_rollout": 0, "finish_reason": UNKNOWN}
        for name, value in defaults.items():
            columns[name] = _filled(columns.get(name), pa.scalar(value, ROW_COLUMNS[name]), rows)
        newer_S = np.full(rows, self._newer_trainer)
        if "logp_recomputed" in columns:
            newer_S |= ~_lists.is_null(columns["logp_recomputed"])
        later = pa.array(columns["version_rollout"].to_numpy() + newer_S, pa.int32())
        columns["version_trainer"] = _filled(columns.get("version_trainer"), later, rows)
        if "prompt_id" not in columns or columns["prompt_id"].null_count:
            columns["prompt_id"] = _filled(
                columns.get("prompt_id"), pa.array(prompt_hash(columns[PROMPT_COLUMN])), rows
            )
        columns["sample_index"] = _numbered(columns.get("sample_index"), self._numbers, rows)
        self._numbers += rows

    def _first_of_its_key(self, table: pa.Table, where: str) -> np.ndarray:
        """A response that a dump holds twice (two ranks, a resumed run) would count twice."""
        keys = _keys(table).tolist()
        new_S = np.zeros(len(keys), dtype=bool)
        for row, key in enumerate(keys):
            new_S[row] = key not in self._seen
            self._seen.add(key)
        return self._tally.sift(
            {"responses that were there before (same step, prompt and sample index)": ~new_S}, where
        )

    def _count(self, table: pa.Table) -> None:
        self.rows += table.num_rows
        self.tokens += int(_lists.lengths_of(foreign.single(table.column("response_ids"))).sum())
        self.unfinished += pc.sum(pc.equal(table.column("finish_reason"), UNKNOWN)).as_py() or 0
        if "logp_trainer" in table.column_names:
            versions = (foreign.single(table.column(f"version_{side}")).to_numpy() for side in ("trainer", "rollout"))
            scored_S = ~_lists.is_null(foreign.single(table.column("logp_trainer")))
            self.scored += int(scored_S.sum())
            self.newer += int((scored_S & np.not_equal(*versions)).sum())
        self.steps |= set(np.unique(foreign.single(table.column("step")).to_numpy()).tolist())


def _keys(table: pa.Table) -> np.ndarray:
    return hash_keys(*(foreign.single(table.column(name)).to_numpy() for name in ROW_KEY))


def _known_columns(table: pa.Table) -> pa.Table:
    """The columns of a trace that are there, in its types, and the notes; one of nothing but nulls is not there."""
    names = [n for n in column_order() if n in table.column_names and table.column(n).type != pa.null()]
    given = {name: foreign.single(table.column(name)) for name in names}
    if "advantage" in given and "response_ids" in given:
        given["advantage"] = _advantages(given["advantage"], given["response_ids"])
    columns = {name: foreign.exact(column, arrow_type(name)) for name, column in given.items()}
    return pa.table(columns | {name: table.column(name) for name in _notes(table)})


def _advantages(column: pa.Array, tokens: pa.Array) -> pa.Array:
    """A value per token; a number, or a list of one, is the advantage of the whole response."""
    wanted_S = _lists.lengths_of(tokens)
    if not foreign.is_list(column.type):
        null_S = _lists.is_null(column)
        column = _lists.from_flat(column.drop_null(), (~null_S).astype(np.int64), null_S)
    given_S = _lists.lengths_of(column)
    lengths_S = np.where(given_S == 1, wanted_S, given_S)
    if np.array_equal(lengths_S, given_S):
        return column
    times_T = np.repeat(np.where(given_S == 1, wanted_S, 1), given_S)
    return _lists.from_flat(np.repeat(_lists.flat(column), times_T), lengths_S, _lists.is_null(column))


def _notes(table: pa.Table) -> list[str]:
    return [name for name in table.column_names if name.startswith(NOTE)]


def _only(table: pa.Table, keep_S: np.ndarray) -> pa.Table:
    return table if keep_S.all() else table.filter(pa.array(keep_S))


def _usual_width(lists: Sequence[pa.Array], lengths_S: np.ndarray) -> int:
    """The K that most rows have per token, the smallest of several; 0 where no row has any."""
    widths = [np.empty(0, np.int64)]
    for column in lists:
        entries_S = _lists.lengths_of(column)
        whole_S = (entries_S > 0) & (lengths_S > 0) & (entries_S % np.maximum(lengths_S, 1) == 0)
        widths.append(entries_S[whole_S] // lengths_S[whole_S])
    found, counts = np.unique(np.concatenate(widths), return_counts=True)
    return int(found[counts.argmax()]) if len(found) else 0


def all_true_where_null(mask: pa.Array | None, lengths_S: np.ndarray) -> pa.Array:
    """A mask of these lengths, true throughout in rows that have none."""
    values_T = np.ones(int(lengths_S.sum()), dtype=bool)
    if mask is not None:
        values_T[np.repeat(~_lists.is_null(mask), lengths_S)] = _lists.flat(mask)
    return _lists.from_flat(values_T, lengths_S)


def _filled(column: pa.Array | None, values: pa.Array | pa.Scalar, rows: int) -> pa.Array:
    """A column with these values, or this one, in the rows that have none."""
    return pc.coalesce(pa.nulls(rows, values.type) if column is None else column, values)


def _numbered(column: pa.Array | None, first: int, rows: int) -> pa.Array:
    """Rows without a number get that of their place, counted from `first`; another one where a neighbour has it."""
    number_S = np.arange(first, first + rows, dtype=np.int32)
    if column is None:
        return pa.array(number_S)
    missing_S, given = _lists.is_null(column), column.drop_null().to_numpy()
    taken_S = missing_S & np.isin(number_S, given)
    number_S[taken_S] = np.setdiff1d(number_S[~missing_S], given)[: taken_S.sum()]
    return _filled(column, pa.array(number_S), rows)


def text_key(text: str) -> int:
    """63 bits of a text, the same in every file and on every rank: what a prompt is called that has a name."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def prompt_hash(prompts: pa.Array) -> np.ndarray:
    """63 bits of the token ids of each prompt: equal prompts are one prompt, in every step and every file."""
    lengths_S = _lists.lengths_of(prompts)
    offset_S1 = _lists.offsets_of(lengths_S)
    position_T = np.arange(offset_S1[-1]) - np.repeat(offset_S1[:-1], lengths_S)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hash_keys(position_T, _lists.flat(prompts)))])
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
    """Cut sequences into prompt and response: the columns of the response, and which rows are still there.

    `ids`, `mask` (booleans) and `columns` hold a value per position of the sequence; positions from `length_S` on are
    padding. The response begins with the first position of the mask, and keeps the holes that the mask has later.
    """
    total_S = _lists.lengths_of(ids)
    stop_S = total_S if length_S is None else length_S
    bad_S = {NO_IDS: _lists.holds_null(ids), TOO_LONG: stop_S > total_S}
    for name, column in {"loss mask": mask, **columns}.items():
        bad_S[UNEQUAL.format(name=name)] = (_lists.lengths_of(column) != total_S) & ~_lists.is_null(column)
    bad_S[NO_MASK] = _lists.holds_null(mask)
    keep_S = tally.sift(bad_S, where)
    ids, mask, stop_S = ids.filter(pa.array(keep_S)), mask.filter(pa.array(keep_S)), stop_S[keep_S]
    columns = {name: column.filter(pa.array(keep_S)) for name, column in columns.items()}

    total_S = _lists.lengths_of(ids)
    first_S, last_S = _lists.ends_of(_lists.flat(mask), total_S)
    fits_S = tally.sift({NO_MASK: first_S < 0, BEYOND: last_S >= stop_S}, where)
    keep_S[np.flatnonzero(keep_S)[~fits_S]] = False
    cutter = _Cutter(total_S, np.where(fits_S, first_S, 0), np.where(fits_S, stop_S, 0), fits_S)
    found = {"prompt_ids": cutter.prompt(ids), "response_ids": cutter.response(ids), "loss_mask": cutter.response(mask)}
    found |= {name: cutter.response(column) for name, column in columns.items()}
    if "logp_rollout" in columns:
        found[NOTE + SHIFTED] = pa.array(cutter.shifted(columns["logp_rollout"]).astype(np.int64))
    return found, keep_S


class _Cutter:
    """Which positions of sequences laid flat are prompt, and which response."""

    def __init__(self, total_S: np.ndarray, first_S: np.ndarray, stop_S: np.ndarray, keep_S: np.ndarray) -> None:
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
        values_T = _lists.flat(column)
        if null_S.any():  # rows without this column: their places are there, but hold nothing
            filled = np.full(int(self._total_S.sum()), np.nan, values_T.dtype)
            filled[np.repeat(~null_S, self._total_S)] = values_T
            values_T = filled
        found = _lists.from_flat(values_T[self._response_T], lengths_S)
        if not null_S.any():
            return found
        return pc.if_else(pa.array(~null_S[self._keep_S]), found, pa.nulls(len(found), found.type))

    def shifted(self, logp: pa.Array) -> np.ndarray:
        """Kept rows whose last prompt position has a log-probability while the last of the response has none."""
        found_S = np.zeros(len(logp), dtype=bool)
        sure_S = self._keep_S & (self._first_S > 0)
        if not _lists.is_null(logp).any():
            values_T = _lists.flat(logp)
            before = values_T[(self._start_S + self._first_S - 1)[sure_S]]
            last = values_T[(self._start_S + self._stop_S - 1)[sure_S]]
            found_S[sure_S] = (before != 0) & (last == 0)
        return found_S[self._keep_S]
