"""The responses that every experiment reads: chosen once from a trace, in portions that an experiment may stop between.

Each portion has responses of as many prompts as there are, so that an interval over prompts exists early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.errors import MismatchError
from mismatch_cli.hashing import hash_keys, prompt_groups
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.shards import open_shard

Key = tuple[int, int, int]
_PORTIONS = (1 / 4, 1 / 2, 1.0)  # of the responses that are read, at the end of each
_KEPT = (
    *("step", "epoch", "minibatch", "prompt_id", "sample_index", "version_rollout", "version_trainer", "reward"),
    *("finish_reason", "prompt_ids", "response_ids", "loss_mask", "logp_rollout", "rank_rollout", "logp_trainer"),
    *("entropy_trainer", "rank_trainer", "routes"),
)


def choose(trace: Trace, most: int, version: int | None) -> list[pa.Table]:
    """Up to `most` responses with log π and log μ, a table a portion; of all versions, or of one that sampled.

    One of each prompt comes first, in an order that follows from their keys. Raises a `MismatchError` where none is.
    """
    names = [name for name in _KEPT if name in trace.columns()]
    table = pa.concat_tables([t.select(names) for t in trace.tables(names)], promote_options="default")
    table = table.filter(_usable(table, version))
    if not len(table):
        raise MismatchError(
            f"{trace.folder} holds no response with log π of a trainer and the ids of its prompt, at weights that a "
            f"model here has. {trace.how_to_score}"
        )
    order = _order(table)[:most]
    ends = [max(1, round(len(order) * part)) for part in _PORTIONS]
    cuts = [0, *sorted({*ends, len(order)})]
    return [table.take(np.sort(order[start:stop])) for start, stop in pairwise(cuts)]


def _usable(table: pa.Table, version: int | None) -> pa.ChunkedArray:
    """Which rows have everything that an experiment needs."""
    usable = pc.greater(pc.list_value_length(table["response_ids"]), 0)
    usable = pc.and_(usable, pc.greater(pc.fill_null(pc.list_value_length(table["prompt_ids"]), 0), 0))
    for name in ("logp_rollout", "logp_trainer"):
        known = table[name].is_valid() if name in table.column_names else pa.array(np.zeros(len(table), dtype=bool))
        usable = pc.and_(usable, known)
    if version is not None and "version_rollout" in table.column_names:
        usable = pc.and_(usable, pc.equal(pc.fill_null(table["version_rollout"], 0), version))
        if "version_trainer" in table.column_names:
            usable = pc.and_(usable, pc.equal(pc.fill_null(table["version_trainer"], version), version))
    return usable


def _order(table: pa.Table) -> np.ndarray:
    """Rows: the first response of every prompt, then the second of each, …; a key that stands twice counts once."""
    columns = {name: table[name].to_numpy() for name in ("step", "prompt_id", "sample_index")}
    hash_S = hash_keys(columns["prompt_id"], columns["step"], columns["sample_index"])
    by_prompt = np.lexsort((hash_S, columns["prompt_id"]))
    prompt_S = columns["prompt_id"][by_prompt]
    starts = np.flatnonzero(np.diff(prompt_S, prepend=prompt_S[0] - 1))
    turn_S = np.arange(len(prompt_S)) - np.repeat(starts, np.diff([*starts, len(prompt_S)]))
    order = by_prompt[np.lexsort((hash_S[by_prompt], turn_S))]
    seen: set[Key] = set()
    keys = [tuple(int(columns[name][row]) for name in columns) for row in order]
    return np.array([row for row, key in zip(order, keys, strict=True) if not (key in seen or seen.add(key))])  # type: ignore[func-returns-value, arg-type]


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
        """From the trace of what was chosen, a shard a portion."""
        trace = Trace.open(folder)
        batches = [table_to_batch(open_shard(path).read().combine_chunks()) for path in trace.shards]
        keys = [key for batch in batches for key in zip(batch.step_S.tolist(), batch.prompt_id_S.tolist(),
                                                        batch.sample_index_S.tolist(), strict=True)]  # fmt: skip
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

    def flat(self, folder: Path, column: str) -> np.ndarray:
        """A column of another trace of the same responses, float64; NaN where it does not have one."""
        values_T = np.full(int(self.offset_S1[-1]), np.nan)
        for path in Trace.open(folder).shards:
            batch = table_to_batch(open_shard(path).read().combine_chunks())
            found_T: Any = getattr(batch, f"{column}_T")
            if found_T is None:
                continue
            keys = zip(batch.step_S.tolist(), batch.prompt_id_S.tolist(), batch.sample_index_S.tolist(), strict=True)
            for row, key in enumerate(keys):
                s = self.keys[key]
                values_T[self.offset_S1[s] : self.offset_S1[s + 1]] = found_T[
                    batch.offset_S1[row] : batch.offset_S1[row + 1]
                ]
        return values_T
