"""Reads traces: the same batches for every command, in bounded memory, from one folder or several.

A table becomes a `TokenBatch` of flat buffers without a copy; nulls become NaN, and logp_trainer
also serves as logp_recomputed at equal weights. A log-probability above 0 is invalid: it becomes
NaN, and `diagnose` counts them. Values pass by DLPack, not by Arrow's `to_numpy`, which imports
pandas: half a second for every process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.columns import (
    ALWAYS_READ,
    COLUMNS,
    ID_COLUMNS,
    PROMPT_COLUMN,
    ROW_KEY,
    TOKEN_COLUMNS,
    TOPK_COLUMNS,
    length_column,
)
from mismatch_cli.trace.manifest import (
    Completeness,
    completeness,
    remedy,
    run_folder_of,
    shards_in,
    trace_folder,
)
from mismatch_cli.trace.recorder_notes import manifest_with_notes
from mismatch_cli.trace.routes import LAYER_COUNTS, MARGIN_BINS, MOST_LAYERS, NOT_MEASURED
from mismatch_cli.trace.shards import DamagedShard, Footer, footer_of, open_shard, read_group
from mismatch_cli.trace.stores import is_store
from mismatch_cli.trace.vocabulary import Vocabulary

_Item = TypeVar("_Item")
_NEVER_NULL = (*ROW_KEY, "version_rollout", "version_trainer", "prompt_ids", "response_ids")
_NOT_MEASURED = {"f": np.nan, "b": False, "i": -1, "u": NOT_MEASURED}  # by numpy's kind
_RENEW = "Record or import it again."
_RECOMPUTED_OF = {
    "logp_trainer_T": "logp_recomputed_T",
    "topk_logp_trainer_TK": "topk_logp_recomputed_TK",
}
# A list of these columns has one or more times so many counts, and at most so many times.
_ROUTE_COUNTS = {
    "route_layers": (len(LAYER_COUNTS), MOST_LAYERS),
    "route_margins": (2 * MARGIN_BINS, 1),
}
_FIELDS = {each.name for each in fields(TokenBatch)}
# A batch holds only the columns for which it has a field. The others stay in the table, so code
# that computes with one of them adds its field to `TokenBatch`.
_BATCH_COLUMNS = tuple(name for name in TOKEN_COLUMNS if f"{name}_T" in _FIELDS)
_BATCH_TOPK_COLUMNS = tuple(name for name in TOPK_COLUMNS if f"{name}_TK" in _FIELDS)
_THREADS = 32  # that request footers from a store
_FOOTERS_AT_A_TIME = 1024  # requested ahead of the reader


class RowGroup(NamedTuple):
    """The unit of reading: some rows of a shard, as recorded and flattened."""

    path: Path
    number: int  # in the shard
    table: pa.Table
    batch: TokenBatch


@dataclass(frozen=True)
class Trace:
    """A recorded trace: a folder with `manifest.json`, `vocab.parquet` and `shard-*.parquet`.

    With `skip_broken`, unreadable shards are left out as if they were missing; `broken` has the
    reason by the name of each. With `step`, only the rows of that step count.
    """

    folder: Path
    skip_broken: bool = field(default=False, compare=False)
    broken: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    step: int | None = None
    # The shards that may hold the step; None: all of the folder
    among: tuple[Path, ...] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, path: Path, *, skip_broken: bool = False) -> Trace:
        """Open a trace folder, or a run folder with one in `trace/`; a `MismatchError` says what
        is wrong.
        """
        trace = cls(trace_folder(path), skip_broken)
        # Reading the manifest and every footer refuses newer, damaged and foreign shards here.
        # A command would otherwise fail in the middle of its report.
        trace.completeness  # noqa: B018
        trace.leave_out({})
        return trace

    def of_step(self, step: int, among: Sequence[Path]) -> Trace:
        """The rows of one step, all of which are in these shards; avoids opening all of a
        growing trace.
        """
        # A step of a trace is a trace, in shards that hold rows of other steps too.
        # Code that reads a portion passes `step` along, or it would read, and cache, whole shards.
        return Trace(self.folder, self.skip_broken, step=step, among=tuple(among))

    def leave_out(self, broken: Mapping[str, str]) -> None:
        """Leave out broken shards, given by name with the reason; a `MismatchError` if none
        remains.
        """
        self.broken.update(broken)
        if self.broken and not self.shards:
            raise MismatchError(
                f"{self.folder} has no readable shard. {next(iter(self.broken.values()))}"
            )

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return manifest_with_notes(self.folder)

    @property
    def completeness(self) -> Completeness:
        """What the manifest promises compared with what can be read; a `MismatchError` if these
        contradict each other.

        For a single step, nothing is promised.
        """
        rows = {}
        columns = {}
        for path in self.shards:
            rows[path.name] = sum(self.footers[path].rows)
            columns[path.name] = self.footers[path].columns
        promised = self.manifest if self.step is None else {}
        return completeness(self.folder, promised, rows, columns, self.broken)

    @property
    def how_to_score(self) -> str:
        """The sentence that says how to add a trainer's log π to the trace."""
        return remedy(self.folder, self.manifest, unscored=True)

    @property
    def has_ids(self) -> bool:
        """Whether it has the token ids of prompts and responses, not log-probabilities only."""
        return {PROMPT_COLUMN, "response_ids"} <= self.columns()

    def require_ids(self, reads: str) -> None:
        """Raise a `MismatchError` for a trace of log-probabilities only; `reads` begins the
        sentence that ends with "token ids".
        """
        absent = sorted({PROMPT_COLUMN, "response_ids"} - self.columns())
        if absent:
            raise MismatchError(
                f"{self.folder} has no {' and no '.join(absent)}, only log-probabilities. {reads} "
                "token ids: import a dump that has them, or record the run."
            )

    @property
    def run_folder(self) -> Path:
        return run_folder_of(self.folder)

    @cached_property
    def footers(self) -> dict[Path, Footer]:
        """The footer of each shard, in order."""
        shards = shards_in(self.folder) if self.among is None else self.among
        footers: Iterator[Footer | None] = map(self._footer, shards)
        if is_store(self.folder):
            footers = _requested_together(self._footer, shards)
        # A long trace has many thousand shards, and most of them hold the same columns.
        # They share one set of names, so that a footer takes little memory.
        shared: dict[frozenset[str], frozenset[str]] = {}
        by_path = {}
        for path, footer in zip(shards, footers, strict=True):
            if footer is not None:
                names = shared.setdefault(footer.columns, footer.columns)
                by_path[path] = footer._replace(columns=names)
        return by_path

    def _footer(self, path: Path) -> Footer | None:
        """A shard's footer; None for a broken shard that is left out."""
        try:
            return footer_of(path)
        except DamagedShard as error:
            if not self.skip_broken:
                raise
            self.broken[path.name] = str(error)
            return None

    @property
    def shards(self) -> list[Path]:
        """The readable shards, in order."""
        return [path for path in self.footers if path.name not in self.broken]

    @property
    def num_responses(self) -> int:
        """Rows of all shards."""
        return self.completeness.responses

    @property
    def rows_without_recomputed(self) -> int:
        """How many rows have no log π′, according to the footers."""
        return sum(footer.rows_without_recomputed for footer in self.footers.values())

    @cached_property
    def top_k(self) -> int:
        """K, by the lists of the first response that has them; 0 if none has."""
        shards = [path for path in self.shards if "topk_ids" in self.footers[path].columns]
        for table in self.tables(("response_ids", "topk_ids"), shards):
            length_S = pc.list_value_length(table.column("response_ids")).to_pylist()
            entries_S = pc.list_value_length(table.column("topk_ids")).to_pylist()
            for length, entries in zip(length_S, entries_S, strict=True):
                if length and entries:
                    return int(entries // length)
        return 0

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self.folder)

    def columns(self) -> set[str]:
        """The columns that at least one shard holds."""
        return set().union(*(footer.columns for footer in self.footers.values()))

    def count(self, name: str) -> int:
        """A count that shards carry in their metadata, summed over the trace."""
        return sum(int(footer.counts.get(name.encode(), 0)) for footer in self.footers.values())

    def tables(
        self, columns: Sequence[str] | None = None, shards: Sequence[Path] | None = None
    ) -> Iterator[pa.Table]:
        """One table per row group, in shard order; only the requested columns that the shard
        has.
        """

        def read_tables(paths: Sequence[Path]) -> Iterator[pa.Table]:
            return _one_ahead(read for *_, read in self._row_group_reads(columns, paths))

        return self._skipping_broken(read_tables, shards)

    def chosen_tables(
        self, groups: Mapping[Path, Container[int]], columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        """The tables of some row groups, by their numbers in each shard, in shard order."""
        reads = self._row_group_reads([*ALWAYS_READ, *columns], list(groups))
        return _one_ahead(read for path, number, read in reads if number in groups[path])

    def batches(
        self, columns: Sequence[str] | None = None, shards: Sequence[Path] | None = None
    ) -> Iterator[TokenBatch]:
        """One `TokenBatch` per row group; always includes row keys, lengths and log μ."""
        return (group.batch for group in self.row_groups(columns, shards))

    def row_groups(
        self, columns: Sequence[str] | None = None, shards: Sequence[Path] | None = None
    ) -> Iterator[RowGroup]:
        """The same rows as `batches`, each batch with its table and its shard."""
        names = None if columns is None else [*ALWAYS_READ, *columns]

        def read_groups(paths: Sequence[Path]) -> Iterator[RowGroup]:
            return _one_ahead(
                partial(_flatten, *group) for group in self._row_group_reads(names, paths)
            )

        return self._skipping_broken(read_groups, shards)

    def _skipping_broken(
        self, read: Callable[[Sequence[Path]], Iterator[_Item]], shards: Sequence[Path] | None
    ) -> Iterator[_Item]:
        """What `read` makes of these shards, by default all; if broken ones are skipped, each
        shard counts as a whole or is left out.
        """
        paths = self.shards if shards is None else shards
        if not self.skip_broken:
            yield from read(paths)
            return
        for path in paths:
            try:
                # The list holds a whole shard before any of it is used.
                # Otherwise the first row groups of a shard would count, whose last one is broken.
                yield from list(read([path]))
            except DamagedShard as error:
                self.broken[path.name] = str(error)

    def _row_group_reads(
        self, columns: Sequence[str] | None, shards: Sequence[Path]
    ) -> Iterator[tuple[Path, int, Callable[[], pa.Table]]]:
        """A function that reads each row group, with its shard and its number there."""
        wanted = set(COLUMNS if columns is None else columns)
        for path in shards:
            shard = open_shard(path)
            present = [name for name in shard.schema_arrow.names if name in wanted]
            for number in range(shard.num_row_groups):
                yield path, number, partial(_read_rows, shard, number, present, path, self.step)


def _requested_together(request: Callable[[Path], _Item], paths: Sequence[Path]) -> Iterator[_Item]:
    """The answer for each path, in order; a store handles many requests at once."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(paths), _FOOTERS_AT_A_TIME):
            yield from threads.map(request, paths[start : start + _FOOTERS_AT_A_TIME])


def _one_ahead(reads: Iterator[Callable[[], _Item]]) -> Iterator[_Item]:
    """The results of these reads, in order: a thread prefetches the next while the caller works on
    the current one.

    Decoding releases the GIL, so a second core hides its time.
    """
    with ThreadPoolExecutor(1) as thread:
        following = None
        for read in reads:
            # The next read starts before the present one is handed out.
            ready, following = following, thread.submit(read)
            if ready is not None:
                yield ready.result()
        if following is not None:
            yield following.result()


def _read_rows(
    shard: pq.ParquetFile, number: int, columns: list[str], path: Path, step: int | None
) -> pa.Table:
    """A row group, or its rows of one step."""
    if step is None:
        return read_group(shard, number, columns, path)
    table = read_group(shard, number, list(dict.fromkeys((*columns, "step"))), path)
    # `pyarrow.compute` imports pandas for a Python value among its arguments, here the step.
    # numpy compares instead: the import takes half a second, and reading needs no pandas.
    of_step_S = np.from_dlpack(foreign_values.single(table.column("step"))) == step
    return table.filter(foreign_values.packed_flags(of_step_S)).select(columns)


def _flatten(path: Path, number: int, read: Callable[[], pa.Table]) -> RowGroup:
    table = read()
    try:
        return RowGroup(path, number, table, table_to_batch(table))
    except MismatchError as error:
        raise DamagedShard(f"{path}: {error}", path) from error


def table_to_batch(table: pa.Table) -> TokenBatch:
    """Flatten the rows of one table; a `MismatchError` if a token column does not have one value
    per token.
    """
    columns = {name: foreign_values.single(table.column(name)) for name in table.column_names}
    for name in _NEVER_NULL:
        if name in columns and columns[name].null_count:
            raise MismatchError(
                f"The trace is damaged: column {name} is empty in some rows. {_RENEW}"
            )
    if PROMPT_COLUMN in columns:
        _check_values(PROMPT_COLUMN, columns[PROMPT_COLUMN].flatten())
    _check_routes(columns)
    offset_S1 = _offsets(columns[length_column(columns)])
    lengths_S = np.diff(offset_S1)
    flat = {}
    for name in _BATCH_COLUMNS:
        if name in columns:
            flat[f"{name}_T"] = _token_column(name, columns[name], lengths_S, 1)
    top_k = _top_k(columns, lengths_S)
    for name in _BATCH_TOPK_COLUMNS:
        if top_k and name in columns:
            entries = _token_column(name, columns[name], lengths_S, top_k)
            flat[f"{name}_TK"] = entries.reshape(-1, top_k)
    flat.setdefault("loss_mask_T", np.ones(int(offset_S1[-1]), dtype=bool))
    _serve_recomputed(columns, lengths_S, flat)
    return _assemble(columns, offset_S1, flat)


def _assemble(
    columns: dict[str, pa.Array], offset_S1: np.ndarray, flat: dict[str, np.ndarray]
) -> TokenBatch:
    """A batch of columns that were checked; a column that was not measured is None."""
    absent = dict.fromkeys(f"{name}_T" for name in _BATCH_COLUMNS)
    absent |= dict.fromkeys(f"{name}_TK" for name in _BATCH_TOPK_COLUMNS)
    prompt_length_S = reward_S = None
    if PROMPT_COLUMN in columns:
        prompt_length_S = np.diff(_offsets(columns[PROMPT_COLUMN]))
    if "reward" in columns and columns["reward"].null_count < len(columns["reward"]):
        reward_S = _or_nan(columns["reward"])
    truncated = [reason == "length" for reason in columns["finish_reason"].to_pylist()]
    return TokenBatch(
        offset_S1=offset_S1,
        **{f"{name}_S": np.from_dlpack(columns[name]) for name in ROW_KEY},
        prompt_length_S=prompt_length_S,
        truncated_S=np.array(truncated, dtype=bool),
        reward_S=reward_S,
        **(absent | flat),  # type: ignore[arg-type]
    )


def _or_nan(array: pa.FloatArray) -> np.ndarray:
    """The values of a column with one per response; nulls become NaN."""
    filled = np.full(len(array), np.nan, dtype=np.float32)
    filled[foreign_values.unpacked_flags(array.is_valid())] = np.from_dlpack(array.drop_null())
    return filled


def _offsets(array: pa.ListArray) -> np.ndarray:
    """Where each list begins among the flat values, from 0 also in a slice of a longer array."""
    offsets = np.from_dlpack(array.offsets).astype(np.int64)
    return offsets - offsets[0]


def _token_column(name: str, array: pa.ListArray, lengths_S: np.ndarray, width: int) -> np.ndarray:
    """The flat values of a list column; null rows become the type's value for "not measured"."""
    expected_S = lengths_S * width
    measured_S = foreign_values.unpacked_flags(array.is_valid())
    if not np.array_equal(np.diff(_offsets(array))[measured_S], expected_S[measured_S]):
        raise MismatchError(
            f"The trace is damaged: column {name} does not have one value per token (or K of "
            f"them). {_RENEW}"
        )
    values = _flat_values(name, array)
    if measured_S.all():
        return values
    filled = np.full(expected_S.sum(), _NOT_MEASURED[values.dtype.kind], dtype=values.dtype)
    filled[np.repeat(measured_S, expected_S)] = values
    return filled


def _flat_values(name: str, array: pa.ListArray) -> np.ndarray:
    """The values of a list column, where possible a view of Arrow's buffer."""
    # `flatten` respects slices and skips what null rows may cover; `values` does neither.
    values = array.flatten()
    _check_values(name, values)
    if pa.types.is_boolean(values.type):
        return foreign_values.unpacked_flags(values)
    flat = np.from_dlpack(values)
    # A NaN makes the maximum NaN, and every comparison with it false.
    # The negation is true for it, so no value above 0 hides behind one.
    if "logp" in name and len(flat) and not flat.max() <= 0:
        return np.where(flat > 0, np.float32("nan"), flat)
    return flat


def _check_values(name: str, values: pa.Array) -> None:
    """Refuse nulls among the values, and invalid token ids."""
    if values.null_count:
        raise MismatchError(
            f"The trace is damaged: column {name} holds a null among its values. {_RENEW}"
        )
    if name in ID_COLUMNS:
        ids = np.from_dlpack(values)
        if len(ids) and not 0 <= ids.min() <= ids.max() <= foreign_values.MOST_ID:
            strange = ids[foreign_values.strange_ids(ids)][0]
            raise MismatchError(
                f"The trace is damaged: column {name} holds {strange}, which is not a token id. "
                f"{_RENEW}"
            )


def _check_routes(columns: dict[str, pa.Array]) -> None:
    """Refuse counts about routes of a different size from what readers expect, and the counts of
    one kind only.
    """
    present = _ROUTE_COUNTS.keys() & columns.keys()
    one_is_missing = len(present) < len(_ROUTE_COUNTS)
    for name in present:
        size, most = _ROUTE_COUNTS[name]
        counts = columns[name].flatten()
        lengths_S = np.diff(_offsets(columns[name]))
        wrong_S = (lengths_S % size != 0) | (lengths_S > most * size)
        has_negative = len(counts) and pc.min(counts).as_py() < 0
        if one_is_missing or wrong_S.any() or has_negative:
            raise MismatchError(
                f"The trace is damaged: column {name} does not hold the counts of routes. {_RENEW}"
            )
        _check_values(name, counts)


def _top_k(columns: dict[str, pa.Array], lengths_S: np.ndarray) -> int:
    """K, by the lengths: flattening a trace needs no manifest; 0 where no token id says which rank
    was sampled.
    """
    if "topk_ids" not in columns or "response_ids" not in columns:
        return 0
    measured_S = foreign_values.unpacked_flags(columns["topk_ids"].is_valid())
    tokens = int(lengths_S[measured_S].sum())
    if not tokens:
        return 0
    return len(columns["topk_ids"].flatten()) // tokens


def _serve_recomputed(
    columns: dict[str, pa.Array], lengths_S: np.ndarray, flat: dict[str, np.ndarray]
) -> None:
    """Where the trainer scored at the sampling weights, logp_trainer *is* logp_recomputed."""
    if "version_rollout" not in columns or "version_trainer" not in columns:
        return
    version_rollout_S = np.from_dlpack(columns["version_rollout"])
    equal_S = version_rollout_S == np.from_dlpack(columns["version_trainer"])
    for trainer, recomputed in _RECOMPUTED_OF.items():
        if trainer not in flat or not equal_S.any():
            continue
        if equal_S.all():
            flat[recomputed] = flat[trainer]  # the same buffer
            continue
        recorded = flat.get(recomputed, np.full_like(flat[trainer], np.nan))
        equal_T = np.repeat(equal_S, lengths_S)
        if recorded.ndim == 2:
            equal_T = equal_T[:, None]
        flat[recomputed] = np.where(equal_T, flat[trainer], recorded)
