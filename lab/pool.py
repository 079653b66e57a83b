"""A healthy trace laid flat, with the numbers of faulty variants of the real model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.diagnosis.evidence import Evidence, EvidenceCollector
from mismatch_cli.limits.manifest_sides import temperatures_of
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.trace.columns import ROW_KEY
from mismatch_cli.trace.reader import table_to_batch

_TOKEN_COLUMNS = ("response_ids", "logp_rollout", "logp_trainer", "entropy_trainer")
_TOPK_COLUMNS = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer")


@dataclass
class Scores:
    """The numbers of a trainer variant for a pool's tokens."""

    logp_T: np.ndarray
    entropy_T: np.ndarray
    topk_logp_TK: np.ndarray | None = None

    def take(self, tokens: np.ndarray) -> Scores:
        topk_TK = None if self.topk_logp_TK is None else self.topk_logp_TK[tokens]
        return Scores(self.logp_T[tokens], self.entropy_T[tokens], topk_TK)


@dataclass
class Pool:
    """Responses laid flat: `_T` tokens, `_TK` tokens × ranks, `_S` responses."""

    offset_S1: np.ndarray
    rows: dict[str, Any]  # per response: prompt_id, sample_index, step, finish_reason, prompt_ids
    tokens: dict[str, np.ndarray]  # _T
    ranks: dict[str, np.ndarray]  # _TK
    variants: dict[str, Scores] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)  # of the manifest
    about: dict[str, Any] = field(default_factory=dict)  # the manifest
    adapter: str | None = None  # the folder of the trainer's, if it has one

    @classmethod
    def of(cls, table: pa.Table, most_responses: int | None = None) -> Pool:
        table = table.slice(0, most_responses).combine_chunks()
        offsets = np.concatenate(
            [[0], np.cumsum(table["response_ids"].combine_chunks().value_lengths().to_numpy())]
        )
        names = (*ROW_KEY, "finish_reason", "version_rollout", "version_trainer")
        rows = {name: np.array(table[name].to_pylist()) for name in names}
        rows["prompt_ids"] = np.empty(len(offsets) - 1, dtype=object)
        rows["prompt_ids"][:] = table["prompt_ids"].to_pylist()
        tokens, ranks = {}, {}
        for name in table.column_names:
            if name in (*_TOKEN_COLUMNS, *_TOPK_COLUMNS):
                # A column of Arrow is read-only, and faults are planted into these
                values = table[name].combine_chunks().flatten().to_numpy().copy()
                if name in _TOKEN_COLUMNS:
                    tokens[name] = values
                else:
                    ranks[name] = values.reshape(offsets[-1], -1)
        return cls(offsets, rows, tokens, ranks)

    @property
    def num_responses(self) -> int:
        return len(self.offset_S1) - 1

    @property
    def length_S(self) -> np.ndarray:
        return np.diff(self.offset_S1)

    @property
    def response_T(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_responses), self.length_S)

    @property
    def position_T(self) -> np.ndarray:
        return np.arange(int(self.offset_S1[-1])) - self.offset_S1[self.response_T]

    @property
    def sample_order_T(self) -> np.ndarray:
        """The pool's tokens in the order of its evidence: by step, prompt and sample."""
        keys = ("sample_index", "prompt_id", "step")
        place_S = np.argsort(np.lexsort([self.rows[name] for name in keys]))
        return np.argsort(place_S[self.response_T], kind="stable")

    @property
    def last_T(self) -> np.ndarray:
        return self.offset_S1[1:] - 1

    def take(self, index_S: np.ndarray) -> Pool:
        """Some responses, copied: planting into them does not change the pool."""
        tokens = np.concatenate(
            [np.arange(self.offset_S1[s], self.offset_S1[s + 1]) for s in index_S]
        )
        return Pool(
            np.concatenate([[0], np.cumsum(self.length_S[index_S])]),
            {name: values[index_S].copy() for name, values in self.rows.items()},
            {name: values[tokens].copy() for name, values in self.tokens.items()},
            {name: values[tokens].copy() for name, values in self.ranks.items()},
            {name: scores.take(tokens) for name, scores in self.variants.items()},
            self.sampling,
            self.about,
        )

    def table(self) -> pa.Table:
        """The columns of a trace."""
        offsets = pa.array(self.offset_S1, pa.int32())
        columns: dict[str, Any] = {}
        for name, values in self.rows.items():
            if name not in ("prompt_ids", "finish_reason"):
                columns[name] = pa.array(values)
        columns["finish_reason"] = pa.array(self.rows["finish_reason"].tolist(), pa.string())
        columns["prompt_ids"] = pa.array(list(self.rows["prompt_ids"]), pa.list_(pa.int32()))
        for name, values in self.tokens.items():
            columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
        for name, values_TK in self.ranks.items():
            width = values_TK.shape[1]
            columns[name] = pa.ListArray.from_arrays(
                pa.array(self.offset_S1 * width, pa.int32()), pa.array(values_TK.ravel())
            )
        return pa.table(columns)

    def use(self, variant: str, where_T: np.ndarray | None = None) -> None:
        """Replace the trainer's numbers with a variant's, on some tokens or on all."""
        scores = self.variants[variant]
        where_T = np.ones(len(scores.logp_T), dtype=bool) if where_T is None else where_T
        self.tokens["logp_trainer"][where_T] = scores.logp_T[where_T]
        if "entropy_trainer" in self.tokens:
            self.tokens["entropy_trainer"][where_T] = scores.entropy_T[where_T]
        if "topk_logp_trainer" in self.ranks and scores.topk_logp_TK is not None:
            self.ranks["topk_logp_trainer"][where_T] = scores.topk_logp_TK[where_T]

    def engine_uses(self, variant: str, where_T: np.ndarray | None = None) -> None:
        """Replace the engine's numbers with a variant's, keeping the engine's noise."""
        scores = self.variants[variant]
        where_T = np.ones(len(scores.logp_T), dtype=bool) if where_T is None else where_T
        pairs = [
            (self.tokens, "logp_", scores.logp_T),
            (self.ranks, "topk_logp_", scores.topk_logp_TK),
        ]
        for columns, name, logp in pairs:
            if f"{name}rollout" in columns and logp is not None:
                # The difference of the two sides, the noise of the engine, stays
                moved = columns[f"{name}rollout"] + (logp - columns[f"{name}trainer"])
                columns[f"{name}rollout"][where_T] = np.minimum(moved, 0)[where_T]


def some(pool: Pool, share: float, rng: np.random.Generator, longer_than: int = 0) -> np.ndarray:
    """A share of the responses that are long enough, at least two."""
    long_S = np.flatnonzero(pool.length_S > longer_than)
    return rng.choice(
        long_S, size=min(len(long_S), max(2, round(share * pool.num_responses))), replace=False
    )


def some_tokens(pool: Pool, share: float, rng: np.random.Generator) -> np.ndarray:
    """A share of the tokens, at least one."""
    count = int(pool.offset_S1[-1])
    return rng.choice(count, max(1, round(share * count)), False)


def gather_tables(
    tables: Iterable[pa.Table],
    pair: Pair,
    sampling: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> Evidence:
    """Evidence from tables with the columns of a trace."""
    collector = EvidenceCollector(pair, temperatures=temperatures_of(about or {}))
    for table in tables:
        collector.update(table, table_to_batch(table))
    return collector.evidence(sampling, about)
