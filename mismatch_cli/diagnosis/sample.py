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
_RESPONSE_COLUMNS = ("prompt_id_S", "sample_index_S", "step_S", "truncated_S", "prompt_length_S")
_TOKEN_COLUMNS = ("response_ids_T", "loss_mask_T")
_TOPK_COLUMNS = ("topk_ids_TK", "topk_logq_TK", "topk_logp_TK")
_ALL_TOKEN_COLUMNS = (
    "logq_T", "logp_T", *_TOKEN_COLUMNS, "topk_logq_TK", "topk_logp_TK", "topk_d_T",
    "entropy_T", "seen_T", "topk_seen_TK",
)  # fmt: skip
_ORIGIN = "origin "  # before the names of such columns
CERTAIN = -0.01  # nats: the log-probability of a token that nothing moves
_U_MOST = 10.0  # typical gaps: cap on one token in means that a few tokens must not dominate
_LEVELS, _TOKENS_PER_LEVEL = 32, 64  # of log μ, at most; at least
_TYPICAL = 0.8  # quantile of |d|


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
        position_N = self.position_T[self.index_N]
        if axis == "response" or self.prompt_length_S is None:
            return position_N
        return position_N + self.prompt_length_S[self.response_N]

    @cached_property
    def last_T(self) -> np.ndarray:
        """Whether a token ends its response."""
        return self.position_T == self.length_S[self.response_T] - 1

    @cached_property
    def index_N(self) -> np.ndarray:
        """Where the tokens that count are among all tokens."""
        return np.flatnonzero(self.counts_T)

    @property
    def num_counted(self) -> int:
        return len(self.index_N)

    @property
    def response_N(self) -> np.ndarray:
        return self.response_T[self.index_N]

    @property
    def logq_N(self) -> np.ndarray:
        return self.logq_T[self.index_N]

    @property
    def logp_N(self) -> np.ndarray:
        return self.logp_T[self.index_N]

    @cached_property
    def d_N(self) -> np.ndarray:
        """log π − log μ, nats."""
        return self.logp_N - self.logq_N

    @property
    def abs_d_T(self) -> np.ndarray:
        """|d| of every token, even those that do not count; NaN where one side was not measured."""
        with np.errstate(invalid="ignore"):
            return np.abs(self.logp_T - self.logq_T)

    @cached_property
    def group_S(self) -> np.ndarray:
        """The prompt group of each response, one of 128, over which errors are estimated."""
        return prompt_groups(self.prompt_id_S)

    @cached_property
    def group_N(self) -> np.ndarray:
        return self.group_S[self.response_N]

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
        """0 or 1 for each token that counts, by its prompt group."""
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
        abs_d_N = np.abs(self.d_N)
        typical_N = np.empty(len(abs_d_N))
        if not len(abs_d_N):
            return typical_N
        # Gaps are divided by this, and half of a level may have none
        smallest = max(1e-3 * float(abs_d_N.mean()), 1e-9)
        by_logq = np.argsort(self.logq_N, kind="stable")
        levels = max(1, min(_LEVELS, len(by_logq) // _TOKENS_PER_LEVEL))
        for level in np.array_split(by_logq, levels):
            typical_N[level] = max(float(np.quantile(abs_d_N[level], _TYPICAL)), smallest)
        return typical_N

    def left_without(self, drop_T: np.ndarray) -> np.ndarray:
        """log π − log μ of the tokens that count, NaN for those that are dropped."""
        return np.where(drop_T[self.index_N], np.nan, self.d_N)

    def with_gap(self, left_N: np.ndarray) -> Sample:
        """A copy with another log π − log μ, nats, on the tokens that count; NaN removes a token.

        Drops the trainer's top-K columns, which would still be as recorded.
        """
        logp_T = self.logp_T.copy()
        logp_T[self.index_N] = self.logq_N + left_N
        counts_T = self.counts_T.copy()
        counts_T[self.index_N] = np.isfinite(left_N)
        return replace(self, logp_T=logp_T, counts_T=counts_T, topk_logp_TK=None)

    def only(self, chosen_T: np.ndarray) -> Sample:
        """A copy in which other tokens do not count."""
        return replace(self, counts_T=self.counts_T & chosen_T)

    def with_tokens_of(self, other: Sample, inside_T: np.ndarray) -> Sample:
        """A copy that has the trainer's values of another sample in some tokens."""
        return replace(
            self,
            logp_T=np.where(inside_T, other.logp_T, self.logp_T),
            counts_T=np.where(inside_T, other.counts_T, self.counts_T),
            topk_logp_TK=None,
        )

    def spans(self) -> Iterator[slice]:
        """The tokens of each response."""
        return starmap(slice, pairwise(self.offset_S1.tolist()))


NO_LIMIT = 2**64  # above every hash


class SampleCollector(Accumulator):
    """Keeps the responses with the smallest hashes, up to a number of tokens: the same responses
    for any sharding.

    Hashes of `limit` or above can no longer be kept. A `limit` may be passed in if everything below
    it is complete.
    """

    def __init__(self, pair: Pair, most_tokens: int = MOST_TOKENS, limit: int = NO_LIMIT) -> None:
        self._pair = pair
        self._most_tokens = most_tokens
        self.limit = limit
        self._rows: list[tuple[int, dict[str, Any]]] = []  # hash and columns of a response
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
        hash_S = hash_keys(batch.prompt_id_S, batch.sample_index_S, batch.step_S, seed=2)
        columns = self._columns(batch)
        columns |= {f"{_ORIGIN}{name}": value_S for name, value_S in origin_S.items()}
        below_S = hash_S < np.uint64(min(self.limit, NO_LIMIT - 1))
        for s in np.flatnonzero(below_S).tolist():
            start, stop = batch.offset_S1[s : s + 2].tolist()
            # The limit may have fallen in this loop
            if stop > start and int(hash_S[s]) < self.limit:
                row = _response_of(columns, s, slice(start, stop))
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

    def _columns(self, batch: TokenBatch) -> dict[str, np.ndarray]:
        """The columns of a batch that the sample keeps and that were measured."""
        names = (*_RESPONSE_COLUMNS, *_TOKEN_COLUMNS)
        columns = {name: getattr(batch, name) for name in names}
        columns["logq_T"] = getattr(batch, self._pair.reference)
        columns["logp_T"] = getattr(batch, self._pair.current)
        columns["entropy_T"] = batch.entropy_trainer_T
        if self._pair.topk_measured_in(batch):
            columns["topk_logq_TK"] = getattr(batch, str(self._pair.topk_reference))
            columns["topk_logp_TK"] = getattr(batch, str(self._pair.topk_current))
            columns["topk_ids_TK"] = batch.topk_ids_TK
        columns = {name: column for name, column in columns.items() if column is not None}
        if "topk_ids_TK" in columns:
            # The sampled token may be of a rank beyond those that the sample keeps
            sampled_TK = columns["topk_ids_TK"] == columns["response_ids_T"][:, None]
            logp_T = _value_of_rank(sampled_TK, columns["topk_logp_TK"])
            columns["topk_d_T"] = logp_T - _value_of_rank(sampled_TK, columns["topk_logq_TK"])
            for name in _TOPK_COLUMNS:
                columns[name] = columns[name][:, :TOP_K]
        return columns

    def _shrink(self) -> None:
        """Drop the responses with the largest hashes; one stays, however long it is."""
        self._rows.sort(key=lambda row: row[0])
        tokens, responses = 0, 0
        for _, row in self._rows:
            length = len(row["logq_T"])
            if tokens and tokens + length > self._most_tokens:
                break
            tokens += length
            responses += 1
        if responses < len(self._rows):
            self.limit = self._rows[responses][0]
        self._rows = self._rows[:responses]
        self._tokens = tokens

    def result(self) -> Sample:
        """The sample, in the order of steps, prompts and samples."""
        self._shrink()
        rows = sorted(
            [row for _, row in self._rows],
            key=lambda row: tuple(int(row[n]) for n in ("step_S", "prompt_id_S", "sample_index_S")),
        )
        # This is the slowest step, so only the final sample takes it
        for row in rows:
            if {"prompt_ids", "response_ids_T"} <= row.keys():
                ids_T, topk_ids_TK = row["response_ids_T"], row.get("topk_ids_TK")
                row |= seen_before(row["prompt_ids"], ids_T, topk_ids_TK)
        by_response = {name: _response_column(name, rows) for name in _RESPONSE_COLUMNS}
        by_token = {name: _token_column(name, rows) for name in _ALL_TOKEN_COLUMNS}
        logq_T = np.asarray(by_token.pop("logq_T"), dtype=np.float64)
        logp_T = np.asarray(by_token.pop("logp_T"), dtype=np.float64)
        mask_T = np.asarray(by_token.pop("loss_mask_T"), dtype=bool)
        return Sample(
            offset_S1=np.cumsum([0, *(len(row["logq_T"]) for row in rows)]),
            logq_T=logq_T,
            logp_T=logp_T,
            counts_T=mask_T & np.isfinite(logq_T) & np.isfinite(logp_T),
            origin_S=_origin_columns(rows),
            **by_response,  # type: ignore[arg-type]
            **by_token,  # type: ignore[arg-type]
        )


def _response_of(columns: Mapping[str, np.ndarray], s: int, tokens: slice) -> dict[str, Any]:
    """The columns of one response, copied: a view would keep its whole table in memory."""
    response = {}
    for name, column in columns.items():
        is_by_token = name.endswith(("_T", "_TK"))
        response[name] = column[tokens].copy() if is_by_token else column[s]
    return response


def _value_of_rank(sampled_TK: np.ndarray, logp_TK: np.ndarray) -> np.ndarray:
    """The value of the marked rank; NaN if none is marked."""
    return np.where(sampled_TK.any(axis=1), np.where(sampled_TK, logp_TK, 0).sum(axis=1), np.nan)


def _origin_columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What is on record of every response, by the names of `origins`."""
    columns: dict[str, np.ndarray] = {}
    for name in rows[0] if rows else ():
        if name.startswith(_ORIGIN):
            value_S = _response_column(name, rows)
            if value_S is not None:
                columns[name.removeprefix(_ORIGIN)] = value_S
    return columns


def _response_column(name: str, rows: list[dict[str, Any]]) -> np.ndarray | None:
    """One value for each response; None if any lacks it."""
    values = [row[name] for row in rows if name in row]
    return np.array(values) if len(values) == len(rows) else None


def _token_column(name: str, rows: list[dict[str, Any]]) -> np.ndarray | None:
    """The tokens of all responses, NaN for those without the column; None if all lack it."""
    if not rows:
        return np.zeros(0)
    example = next((row[name] for row in rows if name in row), None)
    if example is None:
        return None
    missing = False if example.dtype == bool else np.nan
    columns = []
    for row in rows:
        shape = (len(row["logq_T"]), *example.shape[1:])
        columns.append(row[name] if name in row else np.full(shape, missing, example.dtype))
    return np.concatenate(columns)


def seen_before(
    prompt: np.ndarray, response_ids_T: np.ndarray, topk_ids_TK: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Whether the sampled ids and the recorded ranks occur in the prompt or earlier in the
    response.
    """
    context = np.concatenate([prompt, response_ids_T])
    ids_U, first_U = np.unique(context, return_index=True)
    now_T = len(prompt) + np.arange(len(response_ids_T))
    columns = {"seen_T": first_U[np.searchsorted(ids_U, response_ids_T)] < now_T}
    if topk_ids_TK is not None:
        # An id that is above all of the context would be searched for beyond its end
        at_TK = np.minimum(np.searchsorted(ids_U, topk_ids_TK), len(ids_U) - 1)
        is_in_context_TK = ids_U[at_TK] == topk_ids_TK
        columns["topk_seen_TK"] = is_in_context_TK & (first_U[at_TK] < now_T[:, None])
    return columns
