"""Which responses of two traces are the same, by what they say and not by how they are numbered.

A prompt is known by its token ids, a response by those of its prompt and its own. Of each response 24 bytes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa

from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.gaps import Segments
from mismatch_cli.metrics.hashing import hash_keys
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.trace.columns import table_to_batch
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.schema import PROMPT_COLUMN, REQUIRED, ROW_KEY

MOST = 0.5  # what more than this share of both traces has in common is compared alone
PairedBy = Literal["tokens", "prompts", "none"]
SCORED = (*REQUIRED, "version_rollout", "version_trainer", "loss_mask", "logp_trainer", "logp_recomputed",
          "logp_trainer_repeat")  # fmt: skip


@dataclass(frozen=True)
class Responses:
    """The responses of a trace, in the order of its files."""

    prompt_S: np.ndarray  # int64, a hash of the prompt's token ids
    content_S: np.ndarray  # uint64, a hash of prompt and response
    row_S: np.ndarray  # uint64, a hash of the row key
    measured_S: np.ndarray  # bool, at least one token has both log-probabilities

    @classmethod
    def of(cls, trace: Trace, pair: Pair) -> Responses:
        """Read a trace once for its keys, and for where the pair was measured."""
        groups = [_keys(table, pair) for table in trace.tables(SCORED)]
        return cls(*(np.concatenate(column) for column in zip(*groups, strict=True)))

    def __len__(self) -> int:
        return len(self.prompt_S)


@dataclass(frozen=True)
class Pairing:
    """How another trace is paired with the first one."""

    by: PairedBy
    partner_S: np.ndarray  # of each response of the first: its index in the other, −1 where that lacks it
    shared_prompts: np.ndarray  # hashes of the prompts that both hold

    @property
    def shared_responses(self) -> int:
        return int(np.count_nonzero(self.partner_S >= 0))


def pair_up(first: Responses, other: Responses) -> Pairing:
    """By tokens where the same responses are most of both traces, else by prompts where the same prompts are."""
    partner_S = _partners(first, other)
    shared_prompts = np.intersect1d(first.prompt_S[first.measured_S], other.prompt_S[other.measured_S])
    by: PairedBy = "none"
    if _are_most(int(np.count_nonzero(partner_S >= 0)), *(int(r.measured_S.sum()) for r in (first, other))):
        by = "tokens"
    elif _are_most(len(shared_prompts), *(len(np.unique(r.prompt_S[r.measured_S])) for r in (first, other))):
        by = "prompts"
    return Pairing(by, partner_S, shared_prompts)


def compared_rows(responses: Sequence[Responses], pairings: Sequence[Pairing]) -> list[np.ndarray]:
    """Which responses of each trace are compared: those that all paired traces share; bool, in the order of files.

    Raises a `MismatchError` where more than two traces share something with the first, and nothing with each other.
    """
    first = responses[0]
    kept_S = first.measured_S.copy()
    for pairing in pairings:
        if pairing.by == "tokens":
            kept_S &= pairing.partner_S >= 0
        elif pairing.by == "prompts":
            kept_S &= np.isin(first.prompt_S, pairing.shared_prompts)
    if not kept_S.any():
        raise MismatchError("There is nothing that all of these traces hold. Compare them two at a time.")
    kept = [kept_S]
    for other, pairing in zip(responses[1:], pairings, strict=True):
        kept.append(other.measured_S.copy())
        if pairing.by == "tokens":
            kept[-1][:] = False
            kept[-1][pairing.partner_S[kept_S]] = True
        elif pairing.by == "prompts":
            kept[-1] &= np.isin(other.prompt_S, first.prompt_S[kept_S])
    return kept


def _are_most(shared: int, *totals: int) -> bool:
    return all(shared > MOST * total for total in totals)


def _partners(first: Responses, other: Responses) -> np.ndarray:
    """Equal responses under equal row keys belong together; those that are left, in the order of their files."""
    partner_S = np.full(len(first), -1, dtype=np.int64)
    ours, theirs = np.flatnonzero(first.measured_S), np.flatnonzero(other.measured_S)
    for keys in (lambda r, index: hash_keys(r.content_S[index], r.row_S[index]), lambda r, index: r.content_S[index]):
        found, at = _join(keys(first, ours), keys(other, theirs))
        partner_S[ours[found]] = theirs[at]
        ours, theirs = np.delete(ours, found), np.delete(theirs, at)
    return partner_S


def _join(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of equal keys; the n-th occurrence of a key meets the n-th of the other side."""
    once, others = (hash_keys(keys, _occurrence(keys)) for keys in (ours, theirs))
    _, found, at = np.intersect1d(once, others, assume_unique=True, return_indices=True)
    return found, at


def _occurrence(keys: np.ndarray) -> np.ndarray:
    """How many equal keys stand before each one."""
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    new = np.diff(in_order, prepend=~in_order[:1]) != 0
    begin = np.flatnonzero(new)
    number = np.empty(len(keys), dtype=np.int64)
    number[order] = np.arange(len(keys)) - np.repeat(begin, np.diff(begin, append=len(keys)))
    return number


def _keys(table: pa.Table, pair: Pair) -> tuple[np.ndarray, ...]:
    prompts = _digests(table.column(PROMPT_COLUMN), [b""] * table.num_rows)
    contents = _digests(table.column("response_ids"), prompts)
    row_S = hash_keys(*(table.column(name).to_numpy() for name in ROW_KEY))
    batch = table_to_batch(table)
    measured_S = np.zeros(table.num_rows, dtype=bool)
    if pair.measured_in(batch):
        reference_T, current_T = (getattr(batch, name).numpy() for name in (pair.reference, pair.current))
        known_T = np.isfinite(reference_T) & ~np.isnan(current_T)
        measured_S = Segments(batch.offset_S1.numpy()).sum(known_T) > 0
    return (
        np.frombuffer(b"".join(prompts), dtype=np.int64),
        np.frombuffer(b"".join(contents), dtype=np.uint64),
        row_S,
        measured_S,
    )


def _digests(column: pa.ChunkedArray, before: Sequence[bytes]) -> list[bytes]:
    """8 bytes for each list of token ids, after what stands before it."""
    digests: list[bytes] = []
    for chunk in column.chunks:
        ids = chunk.values.to_numpy()
        for start, stop in pairwise(chunk.offsets.to_numpy()):
            digests.append(blake2b(before[len(digests)] + ids[start:stop].tobytes(), digest_size=8).digest())
    return digests
