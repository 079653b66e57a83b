"""The responses that a diagnosis looks at: whole responses, chosen by hash, as many as fit into
memory.

Letters: `_T` every token of the sample, laid flat; `_S` its responses; `_N` the tokens that count:
in the loss mask, with a finite log-probability on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, starmap
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.hashing import GROUPS, hash_keys, prompt_groups
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch

WITHOUT_IDS, WITHOUT_PROMPTS = "the trace has no token ids", "the trace has no prompts"
MOST_TOKENS = 2**18
TOP_K = 8  # ranks to keep: enough for slopes and grids
_TOKEN_COLUMNS = ("response_ids_T", "loss_mask_T")
_TOPK_COLUMNS = ("topk_ids_TK", "topk_logq_TK", "topk_logp_TK")
_U_MOST = 10.0  # typical gaps: cap on one token in means that a few tokens must not dominate


@dataclass(frozen=True)
class Sample:
    """Whole responses, with the two policies of a pair; None where a column was not measured."""

    offset_S1: np.ndarray
    prompt_id_S: np.ndarray
    sample_index_S: np.ndarray
    step_S: np.ndarray
    prompt_length_S: np.ndarray | None
    truncated_S: np.ndarray
    response_ids_T: np.ndarray | None
    logq_T: np.ndarray  # float64, nats, the reference: the rollout
    logp_T: np.ndarray  # float64, nats, the current policy: the trainer
    counts_T: np.ndarray  # bool
    topk_logq_TK: np.ndarray | None
    topk_logp_TK: np.ndarray | None
    # Log π − log μ of the sampled token from the top-K columns; NaN = not in them
    topk_d_T: np.ndarray | None = None
    entropy_T: np.ndarray | None = None  # nats, of the trainer
    # Bool: the token occurs in the prompt or earlier in the response
    seen_T: np.ndarray | None = None
    topk_seen_TK: np.ndarray | None = None
    # What else is on record of a response, as `origins` names it
    origin_S: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_responses(self) -> int:
        return len(self.offset_S1) - 1

    @cached_property
    def length_S(self) -> np.ndarray:
        return np.diff(self.offset_S1)

    @cached_property
    def response_T(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_responses), self.length_S)

    @cached_property
    def position_T(self) -> np.ndarray:
        """From 0, in the response."""
        return np.arange(len(self.logq_T)) - self.offset_S1[self.response_T]

    def axis_N(self, axis: str) -> np.ndarray:
        """The position of the tokens that count, from 0: in the "response", or in the "context"
        with its prompt, as far as prompts are known.
        """
        position_N = self.position_T[self.kept]
        if axis == "response" or self.prompt_length_S is None:
            return position_N
        return position_N + self.prompt_length_S[self.response_T[self.kept]]

    @cached_property
    def last_T(self) -> np.ndarray:
        """Whether a token ends its response."""
        return self.position_T == self.length_S[self.response_T] - 1

    @cached_property
    def kept(self) -> np.ndarray:
        """Indices of the tokens that count."""
        return np.flatnonzero(self.counts_T)

    @cached_property
    def d_N(self) -> np.ndarray:
        """log π − log μ, nats."""
        return self.logp_T[self.kept] - self.logq_T[self.kept]

    @property
    def abs_d_T(self) -> np.ndarray:
        """|d| of every token, even those that do not count; NaN where one side was not measured."""
        with np.errstate(invalid="ignore"):
            return np.abs(self.logp_T - self.logq_T)

    @cached_property
    def group_S(self) -> np.ndarray:
        """The prompt group of each response, one of 32, over which errors are estimated."""
        return prompt_groups(self.prompt_id_S)

    @cached_property
    def group_N(self) -> np.ndarray:
        return self.group_S[self.response_T[self.kept]]

    @cached_property
    def half_G(self) -> np.ndarray:
        """0 or 1 for each prompt group, for what is fitted on one half and used on the other.

        Groups are dealt by their tokens, the largest first, to the half that has fewer.
        """
        count_G = np.bincount(self.group_N, minlength=GROUPS)
        half_G = np.zeros(GROUPS, dtype=np.int64)
        tokens = [0, 0]
        for group in np.argsort(-count_G, kind="stable").tolist():
            half_G[group] = int(tokens[1] < tokens[0])
            tokens[half_G[group]] += int(count_G[group])
        return half_G

    @property
    def half_N(self) -> np.ndarray:
        """The half of each token that counts."""
        return np.asarray(self.half_G[self.group_N])

    @cached_property
    def u_N(self) -> np.ndarray:
        """|d| in units of what is typical at this log μ, at most 10: noise grows as μ falls."""
        return np.minimum(np.abs(self.d_N) / self.typical_N, _U_MOST)

    @cached_property
    def typical_N(self) -> np.ndarray:
        """The 80 % quantile of |d| among tokens with similar log μ, nats; half of them may have
        no gap at all.
        """
        abs_d_N, order = np.abs(self.d_N), np.argsort(self.logq_T[self.kept], kind="stable")
        typical_N = np.empty(len(abs_d_N))
        smallest = max(1e-3 * float(abs_d_N.mean()), 1e-9) if len(abs_d_N) else 1.0
        for part in np.array_split(order, max(1, min(_LEVELS, len(order) // _TOKENS_PER_LEVEL))):
            typical_N[part] = (
                max(float(np.quantile(abs_d_N[part], _TYPICAL)), smallest)
                if len(part)
                else smallest
            )
        return typical_N

    def left_without(self, drop_T: np.ndarray) -> np.ndarray:
        """log π − log μ of the tokens that count, NaN for those that are dropped."""
        return np.where(drop_T[self.kept], np.nan, self.d_N)

    def with_gap(self, left_N: np.ndarray) -> Sample:
        """A copy with another log π − log μ, nats, on the tokens that count; NaN removes a token.

        Drops the trainer's top-K columns, which would still be as recorded.
        """
        logp_T, counts_T = self.logp_T.copy(), self.counts_T.copy()
        logp_T[self.kept] = self.logq_T[self.kept] + left_N
        counts_T[self.kept] = np.isfinite(left_N)
        return replace(self, logp_T=logp_T, counts_T=counts_T, topk_logp_TK=None)

    def only(self, chosen_T: np.ndarray) -> Sample:
        """A copy in which other tokens do not count."""
        return replace(self, counts_T=self.counts_T & chosen_T)

    def with_part(self, in_it_T: np.ndarray, part: Sample) -> Sample:
        """A copy with the trainer's values of another one in some tokens."""
        return replace(
            self,
            logp_T=np.where(in_it_T, part.logp_T, self.logp_T),
            counts_T=np.where(in_it_T, part.counts_T, self.counts_T),
            topk_logp_TK=None,
        )

    def spans(self) -> Iterator[slice]:
        """The tokens of each response."""
        return starmap(slice, pairwise(self.offset_S1.tolist()))


_LEVELS, _TOKENS_PER_LEVEL = 32, 64
_TYPICAL = 0.8


_ORIGIN = "origin "  # before the names of such columns
NO_LIMIT = 2**64  # above every hash


class SampleCollector(Accumulator):
    """Keeps the responses with the smallest hashes, up to a number of tokens: the same responses
    for any sharding.

    Hashes of `limit` or above can no longer be kept. A `limit` may be passed in if everything below
    it is complete.
    """

    def __init__(self, pair: Pair, most_tokens: int = MOST_TOKENS, limit: int = NO_LIMIT) -> None:
        self._pair, self._most_tokens, self.limit = pair, most_tokens, limit
        self._rows: list[tuple[int, dict[str, Any]]] = []
        self._tokens = 0

    def update(
        self,
        batch: TokenBatch,
        prompt_ids: pa.ListArray | None = None,
        origin_S: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Add one table; its prompts show which tokens have been seen before, and `origin_S` where
        its responses are from.
        """
        if not self._pair.measured_in(batch):
            return
        keys = (batch.prompt_id_S, batch.sample_index_S, batch.step_S)
        hash_S = hash_keys(*keys, seed=2)
        columns, offset_S1 = self._columns(batch, origin_S), batch.offset_S1
        for s in np.flatnonzero(hash_S < np.uint64(min(self.limit, NO_LIMIT - 1))).tolist():
            start, stop = int(offset_S1[s]), int(offset_S1[s + 1])
            # The limit may have fallen in this loop
            if stop > start and int(hash_S[s]) < self.limit:
                row = {
                    n: v[start:stop].copy() if n.endswith(("_T", "_TK")) else v[s]
                    for n, v in columns.items()
                }
                if prompt_ids is not None:
                    row["prompt_ids"] = np.from_dlpack(prompt_ids[s].values).copy()
                self._rows.append((int(hash_S[s]), row))
                self._tokens += stop - start
            if self._tokens > 2 * self._most_tokens:
                self._shrink()

    def merge(self, other: SampleCollector) -> None:
        """Add what another collector kept of later rows; for equal hashes, the earlier row comes
        first.
        """
        # A side that reached its limit has dropped the rest for good: keep nothing that either side
        # would have dropped, or which responses are in the sample depends on the sharding.
        earlier = [row for row in self._rows if row[0] <= other.limit]
        self._rows = earlier + [row for row in other._rows if row[0] < self.limit]
        self.limit = min(self.limit, other.limit)
        self._shrink()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only what may be kept."""
        self._shrink()
        return super().__getstate__()

    def _columns(
        self, batch: TokenBatch, origin_S: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        columns = self._of_batch(batch)
        return columns | {f"{_ORIGIN}{name}": values_S for name, values_S in origin_S.items()}

    def _of_batch(self, batch: TokenBatch) -> dict[str, np.ndarray]:
        names = (*_ROW_COLUMNS, "prompt_length_S", *_TOKEN_COLUMNS)
        found = {name: getattr(batch, name) for name in names}
        found |= {
            "logq_T": getattr(batch, self._pair.reference),
            "logp_T": getattr(batch, self._pair.current),
            "entropy_T": batch.entropy_trainer_T,
        }
        if self._pair.topk_measured_in(batch):
            topk = {
                "topk_logq_TK": self._pair.topk_reference,
                "topk_logp_TK": self._pair.topk_current,
            }
            found |= {name: getattr(batch, str(column)) for name, column in topk.items()}
            found |= {"topk_ids_TK": batch.topk_ids_TK}
        columns = {name: column for name, column in found.items() if column is not None}
        if "topk_ids_TK" in columns:
            sampled_TK = columns["topk_ids_TK"] == columns["response_ids_T"][:, None]
            columns["topk_d_T"] = _at(sampled_TK, columns["topk_logp_TK"]) - _at(
                sampled_TK, columns["topk_logq_TK"]
            )
        return columns | {
            name: columns[name][:, :TOP_K] for name in _TOPK_COLUMNS if name in columns
        }

    def _shrink(self) -> None:
        self._rows.sort(key=lambda row: row[0])
        tokens, kept = 0, 0
        for _, row in self._rows:
            if tokens and tokens + len(row["logq_T"]) > self._most_tokens:
                break
            tokens, kept = tokens + len(row["logq_T"]), kept + 1
        if kept < len(self._rows):
            self.limit = self._rows[kept][0]
        self._rows, self._tokens = self._rows[:kept], tokens

    def result(self) -> Sample:
        """The sample, in the order of steps, prompts and samples."""
        self._shrink()
        rows = [row for _, row in self._rows]
        rows.sort(key=lambda r: (int(r["step_S"]), int(r["prompt_id_S"]), int(r["sample_index_S"])))
        for row in rows:  # only for rows that are kept: this is the slowest step
            row |= _seen(row)
        flat = {name: _joined([row.get(name) for row in rows], rows) for name in _ALL_TOKEN_COLUMNS}
        per_row = {n: np.array([row[n] for row in rows]) for n in _ROW_COLUMNS}
        logq_T, logp_T = (
            np.asarray(flat.pop(name), dtype=np.float64) for name in ("logq_T", "logp_T")
        )
        mask_T = np.asarray(flat.pop("loss_mask_T"), dtype=bool)
        return Sample(
            offset_S1=np.cumsum([0, *(len(row["logq_T"]) for row in rows)]),
            logq_T=logq_T,
            logp_T=logp_T,
            counts_T=mask_T & np.isfinite(logq_T) & np.isfinite(logp_T),
            origin_S=_origins(rows),
            prompt_length_S=_if_all_have("prompt_length_S", rows),
            **per_row,
            **flat,  # type: ignore[arg-type]
        )


def _origins(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What is on record of every response."""
    names = [name for name in (rows[0] if rows else ()) if name.startswith(_ORIGIN)]
    return {
        name.removeprefix(_ORIGIN): values_S
        for name in names
        if (values_S := _if_all_have(name, rows)) is not None
    }


def _if_all_have(name: str, rows: list[dict[str, Any]]) -> np.ndarray | None:
    values = [row[name] for row in rows if name in row]
    return np.array(values) if len(values) == len(rows) else None


def _at(sampled_TK: np.ndarray, logp_TK: np.ndarray) -> np.ndarray:
    """The value of the marked rank; NaN if none is marked."""
    return np.where(sampled_TK.any(axis=1), np.where(sampled_TK, logp_TK, 0).sum(axis=1), np.nan)


_ROW_COLUMNS = ("prompt_id_S", "sample_index_S", "step_S", "truncated_S")
_ALL_TOKEN_COLUMNS = (
    "logq_T", "logp_T", *_TOKEN_COLUMNS, "topk_logq_TK", "topk_logp_TK", "topk_d_T",
    "entropy_T", "seen_T", "topk_seen_TK",
)  # fmt: skip


def _joined(parts: list[np.ndarray | None], rows: list[dict[str, np.ndarray]]) -> np.ndarray | None:
    """One array, NaN for responses without the column; None if all lack it."""
    known = [part for part in parts if part is not None]
    if not known:
        return np.zeros(0) if not rows else None
    shape = known[0].shape[1:]
    missing = False if known[0].dtype == bool else np.nan
    filled = [
        part if part is not None else np.full((len(row["logq_T"]), *shape), missing, known[0].dtype)
        for part, row in zip(parts, rows, strict=True)
    ]
    return np.concatenate(filled)


def _seen(row: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Which of a row's tokens were seen before, if it has ids."""
    if not {"prompt_ids", "response_ids_T"} <= row.keys():
        return {}
    return seen_before(row["prompt_ids"], row["response_ids_T"], row.get("topk_ids_TK"))


def seen_before(
    prompt: np.ndarray, response_ids_T: np.ndarray, topk_ids_TK: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Whether the sampled ids and the recorded ranks occur in the prompt or earlier in the
    response.
    """
    context = np.concatenate([prompt, response_ids_T])
    ids_U, first_U = np.unique(context, return_index=True)
    now_T = len(prompt) + np.arange(len(response_ids_T))
    found = {"seen_T": first_U[np.searchsorted(ids_U, response_ids_T)] < now_T}
    if topk_ids_TK is not None:
        at_TK = np.minimum(np.searchsorted(ids_U, topk_ids_TK), len(ids_U) - 1)
        found["topk_seen_TK"] = (ids_U[at_TK] == topk_ids_TK) & (first_U[at_TK] < now_T[:, None])
    return found
