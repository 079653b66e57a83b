"""The responses that every experiment reads: chosen once from a trace, in portions so that it may
stop early.

Each portion covers as many prompts as possible, so that an interval over prompts exists early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import hash_keys, prompt_groups
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.shards import open_shard

Key = tuple[int, int, int]
_PORTIONS = (1 / 4, 1 / 2, 1.0)  # share of the responses read by the end of each
_KEY = ("step", "prompt_id", "sample_index")
_COLUMNS = (
    "step",
    "epoch",
    "minibatch",
    "prompt_id",
    "sample_index",
    "version_rollout",
    "version_trainer",
    "reward",
    "finish_reason",
    "prompt_ids",
    "response_ids",
    "loss_mask",
    "logp_rollout",
    "rank_rollout",
    "logp_trainer",
    "entropy_trainer",
    "rank_trainer",
    "routes",
)


def choose(
    trace: Trace, most: int, version: int | None = None, *, equal: bool = False
) -> list[pa.Table]:
    """Up to `most` responses with log π and log μ, one table per portion; of all sampling versions,
    or of one.

    `equal`: log π is that at the weights that sampled, whichever column has it. One response of
    each prompt comes first, in an order that follows from their keys; a duplicated key counts once.
    Memory holds one row group at a time and the chosen responses. Raises a `MismatchError` if there
    are none.
    """
    columns = trace.columns()
    names = [name for name in (*_COLUMNS, "logp_recomputed") if name in columns]

    # The trace is read twice: once for keys alone, once for the rows that were chosen by them.
    def tables() -> Iterator[pa.Table]:
        for table in trace.tables(names):
            yield _usable(table, version, equal)

    key_SK = np.concatenate([_key_columns(table) for table in tables()])
    if not len(key_SK):
        raise MismatchError(
            f"{trace.folder} has no response with a trainer’s log π and prompt ids at weights "
            f"that a model here has. {trace.how_to_score}"
        )
    order = _order(key_SK)[:most]
    chosen = _take_rows(tables(), np.sort(order))
    # `chosen` keeps the order of the trace, in which row order[i] comes at the rank of its number.
    place_S = np.argsort(np.argsort(order))
    ends = {max(1, round(len(order) * share)) for share in _PORTIONS}
    cuts = [0, *sorted(ends | {len(order)})]
    return [chosen.take(np.sort(place_S[start:stop])) for start, stop in pairwise(cuts)]


def _key_columns(table: pa.Table) -> np.ndarray:
    """The key of each row, `[S, 3]`."""
    return np.stack([table[name].to_numpy() for name in _KEY], axis=1)


def versions(trace: Trace) -> list[int]:
    """The versions of the weights that sampled, in order."""
    from mismatch_cli.probe.rescore_plan import versions_of

    sampled: set[int] = set()
    for table in trace.tables(("version_rollout",)):
        sampled |= set(versions_of(table, "version_rollout", 0).tolist())
    return sorted(sampled)


def _usable(table: pa.Table, version: int | None, equal: bool) -> pa.Table:
    """The rows with everything an experiment needs."""
    # It imports torch, which readers must not.
    from mismatch_cli.probe.rescore_plan import versions_of

    if equal:
        table = _at_equal_weights(table)
    length_prompt = pc.fill_null(pc.list_value_length(table["prompt_ids"]), 0)
    length_response = pc.list_value_length(table["response_ids"])
    usable = pc.and_(pc.greater(length_response, 0), pc.greater(length_prompt, 0))
    for name in ("logp_rollout", "logp_trainer"):
        if name in table.column_names:
            usable = pc.and_(usable, table[name].is_valid())
        else:
            usable = pa.array(np.zeros(len(table), dtype=bool))
    if version is not None:
        usable = pc.and_(usable, pa.array(versions_of(table, "version_rollout", 0) == version))
    return _without_column(table.filter(usable), "logp_recomputed")


def _at_equal_weights(table: pa.Table) -> pa.Table:
    """The table with log π at the sampling weights in the trainer's column, null where it was
    not measured.
    """
    from mismatch_cli.probe.rescore_plan import versions_of
    from mismatch_cli.probe.score import with_columns

    batch = table_to_batch(table.combine_chunks())
    if batch.logp_recomputed_T is None:
        return _without_column(table, "logp_trainer")
    rows = np.split(batch.logp_recomputed_T, batch.offset_S1[1:-1])
    columns = {
        "logp_trainer": [None if np.isnan(row_T).all() else row_T for row_T in rows],
        "version_trainer": versions_of(table, "version_rollout", 0),
    }
    return with_columns(table, columns)


def _without_column(table: pa.Table, name: str) -> pa.Table:
    if name not in table.column_names:
        return table
    return table.drop_columns([name])


def _order(key_SK: np.ndarray) -> np.ndarray:
    """Row numbers: the first response of every prompt, then the second of each, …"""
    step_S, prompt_S, sample_S = key_SK.T
    hash_S = hash_keys(prompt_S, step_S, sample_S)
    by_prompt = np.lexsort((hash_S, prompt_S))
    # A number below all prompts comes first, so that the first row begins a prompt too.
    starts = np.flatnonzero(np.diff(prompt_S[by_prompt], prepend=prompt_S.min() - 1))
    turn_S = np.arange(len(key_SK)) - np.repeat(starts, np.diff([*starts, len(key_SK)]))
    order = by_prompt[np.lexsort((hash_S[by_prompt], turn_S))]
    _, first = np.unique(key_SK[order], axis=0, return_index=True)
    return order[np.sort(first)]


def _take_rows(tables: Iterator[pa.Table], rows: np.ndarray) -> pa.Table:
    """These rows of the concatenated tables; their numbers are sorted."""
    taken, start = [], 0
    for table in tables:
        stop = start + len(table)
        own = rows[(rows >= start) & (rows < stop)] - start
        if len(own):
            taken.append(table.take(own))
        start = stop
    return pa.concat_tables(taken, promote_options="default")


def _keys(batch: TokenBatch) -> Iterator[Key]:
    return zip(
        batch.step_S.tolist(),
        batch.prompt_id_S.tolist(),
        batch.sample_index_S.tolist(),
        strict=True,
    )


@dataclass(frozen=True)
class FixedTokens:
    """The chosen responses, laid flat in the order of the shards that hold them."""

    shards: Sequence[Path]
    portions: Sequence[int]  # responses in each
    keys: Mapping[Key, int]
    prompt_id_S: np.ndarray
    offset_S1: np.ndarray
    counts_T: np.ndarray  # bool, the tokens that the trainer learns from

    @classmethod
    def read(cls, folder: Path) -> FixedTokens:
        """Read the trace of the chosen responses, one shard per portion."""
        trace = Trace.open(folder)
        batches = [
            table_to_batch(open_shard(path).read().combine_chunks()) for path in trace.shards
        ]
        keys = [key for batch in batches for key in _keys(batch)]
        lengths = np.concatenate([np.diff(batch.offset_S1) for batch in batches])
        return cls(
            trace.shards,
            [batch.num_responses for batch in batches],
            {key: s for s, key in enumerate(keys)},
            np.concatenate([batch.prompt_id_S for batch in batches]),
            np.concatenate([[0], lengths.cumsum()]),
            np.concatenate([batch.loss_mask_T for batch in batches]),
        )

    @cached_property
    def group_S(self) -> np.ndarray:
        """The group of prompts of each response, for intervals."""
        return prompt_groups(self.prompt_id_S)

    @property
    def num_responses(self) -> int:
        return len(self.prompt_id_S)

    def known_to(self, columns: Iterable[np.ndarray]) -> FixedTokens:
        """The same responses without tokens for which a leg that read them has no finite number:
        all legs count the same tokens.

        Truncation excludes tokens under some settings (−∞), and an environment's tokens have no log
        μ (NaN).
        """
        unknown_T = np.zeros(len(self.counts_T), dtype=bool)
        for logp_T in columns:
            finite_T = np.isfinite(logp_T)
            # A response without any number was not read, which excludes none of its tokens.
            read_S = np.logical_or.reduceat(finite_T, self.offset_S1[:-1])
            unknown_T |= ~finite_T & np.repeat(read_S, np.diff(self.offset_S1))
        return replace(self, counts_T=self.counts_T & ~unknown_T)

    def flat(self, folder: Path, column: str) -> np.ndarray:
        """A column of another trace of the same responses, float64; NaN where it has none."""
        values_T = np.full(int(self.offset_S1[-1]), np.nan)
        for path in Trace.open(folder).shards:
            batch = table_to_batch(open_shard(path).read().combine_chunks())
            read_T: Any = getattr(batch, f"{column}_T")
            if read_T is None:
                continue
            # The trace may have fewer responses, in another order.
            for row, key in enumerate(_keys(batch)):
                s = self.keys[key]
                start, stop = self.offset_S1[s : s + 2]
                values_T[start:stop] = read_T[batch.offset_S1[row] : batch.offset_S1[row + 1]]
        return values_T
