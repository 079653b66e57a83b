"""Which responses of two traces are the same, and which of them are compared.

A prompt is identified by its token ids, a response by those of its prompt and its own, not by their
numbering. Each response costs 33 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise, permutations
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from mismatch_cli.base.arrays import Segments
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.pairs import PAIR_COLUMNS, Pair
from mismatch_cli.processes.workers.portions import Portion
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.columns import ALWAYS_READ, PROMPT_COLUMN, ROW_KEY
from mismatch_cli.trace.foreign_values import single
from mismatch_cli.trace.reader import RowGroup

MOST = 0.5  # if more than this share of both traces is common, only the common part is compared
PairedBy = Literal["tokens", "prompts", "none"]
SCORED = (*ALWAYS_READ, *PAIR_COLUMNS)


@dataclass(frozen=True)
class TraceResponses:
    """The responses of a trace, in the order of its files."""

    prompt_S: np.ndarray  # int64, a hash of the prompt's token ids
    content_S: np.ndarray  # uint64, a hash of prompt and response
    row_S: np.ndarray  # uint64, a hash of the row key
    measured_S: np.ndarray  # bool, at least one token has both log-probabilities
    missing_S: np.ndarray  # uint64, a hash of the places of tokens that lack one; 0 for none

    @classmethod
    def joined(cls, parts: Sequence[TraceResponses]) -> TraceResponses:
        """The responses of all parts, one part after the other."""
        columns = zip(*(vars(part).values() for part in (_NO_RESPONSES, *parts)), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.prompt_S)

    @property
    def num_measured(self) -> int:
        return int(self.measured_S.sum())

    @property
    def measured_prompts(self) -> np.ndarray:
        """The hashes of prompts with a measured response, each once."""
        return np.unique(self.prompt_S[self.measured_S])


_NO_RESPONSES = TraceResponses(
    prompt_S=np.zeros(0, dtype=np.int64),
    content_S=np.zeros(0, dtype=np.uint64),
    row_S=np.zeros(0, dtype=np.uint64),
    measured_S=np.zeros(0, dtype=np.bool_),
    missing_S=np.zeros(0, dtype=np.uint64),
)


@dataclass
class RecognisedResponses(Accumulator):
    """The responses of each trace by its number, in lists per portion and row group."""

    responses: dict[int, list[list[TraceResponses]]]

    def merge(self, other: RecognisedResponses) -> None:
        for number, portions in other.responses.items():
            self.responses.setdefault(number, []).extend(portions)


@dataclass(frozen=True)
class RecognitionPass:
    """The pass that reads the responses of each portion, and where the pair was measured."""

    pair: Pair
    columns: ClassVar[Sequence[str]] = SCORED

    def begin(self, portion: Portion) -> RecognisedResponses:
        return RecognisedResponses({portion.trace: [[]]})

    def read(
        self, recognised: RecognisedResponses, portion: Portion, groups: Iterator[RowGroup]
    ) -> None:
        (of_portion,) = recognised.responses[portion.trace]
        for group in groups:
            of_portion.append(_recognise(group, self.pair))


@dataclass(frozen=True)
class Pairing:
    """How another trace is paired with the first one."""

    by: PairedBy
    partner_S: np.ndarray  # each response's index in the other trace, −1 if that lacks it
    shared_prompts: np.ndarray  # hashes of the prompts in both

    @property
    def shared_responses(self) -> int:
        return int(np.count_nonzero(self.partner_S >= 0))


def pair_up(first: TraceResponses, other: TraceResponses) -> Pairing:
    """Pair by tokens if most responses of both traces are the same, else by prompts if most
    prompts are.
    """
    partner_S = _partners(first, other)
    prompts, other_prompts = first.measured_prompts, other.measured_prompts
    shared_prompts = np.intersect1d(prompts, other_prompts, assume_unique=True)
    by: PairedBy = "none"
    if np.count_nonzero(partner_S >= 0) > MOST * max(first.num_measured, other.num_measured):
        by = "tokens"
    elif len(shared_prompts) > MOST * max(len(prompts), len(other_prompts)):
        by = "prompts"
    return Pairing(by, partner_S, shared_prompts)


def compared_rows(
    responses: Sequence[TraceResponses], pairings: Sequence[Pairing]
) -> list[np.ndarray]:
    """Which responses of each trace are compared: those that all paired traces share; bool, in file
    order.

    Raises a `MismatchError` if each trace shares something with the first, but all of them have
    nothing in common.
    """
    first = responses[0]
    compared_S = first.measured_S.copy()
    for pairing in pairings:
        if pairing.by == "tokens":
            compared_S &= pairing.partner_S >= 0
        elif pairing.by == "prompts":
            compared_S &= np.isin(first.prompt_S, pairing.shared_prompts)
    if not compared_S.any():
        raise MismatchError("These traces have no responses in common. Compare them two at a time.")
    compared = [compared_S]
    for other, pairing in zip(responses[1:], pairings, strict=True):
        other_S = other.measured_S.copy()
        if pairing.by == "tokens":
            other_S[:] = False
            other_S[pairing.partner_S[compared_S]] = True
        elif pairing.by == "prompts":
            other_S &= np.isin(other.prompt_S, first.prompt_S[compared_S])
        compared.append(other_S)
    return compared


def partner_rows(
    responses: Sequence[TraceResponses], pairings: Sequence[Pairing], compared: Sequence[np.ndarray]
) -> list[dict[int, np.ndarray]]:
    """For each trace, the rows of its responses in the other traces, by their numbers; −1 for none.

    Empty where nothing has to be looked up: all traces that are paired by tokens measured the same
    tokens, or there is none.
    """
    rows = {0: np.flatnonzero(compared[0])}
    for number, pairing in enumerate(pairings, start=1):
        if pairing.by == "tokens":
            rows[number] = pairing.partner_S[rows[0]]
    partners: list[dict[int, np.ndarray]] = [{} for _ in responses]
    missing_R = responses[0].missing_S[rows[0]]
    if all(np.array_equal(responses[n].missing_S[rows[n]], missing_R) for n in rows):
        return partners
    for number, other in permutations(rows, 2):
        partner_S = np.full(len(responses[number]), -1, dtype=np.int64)
        partner_S[rows[number]] = rows[other]
        partners[number][other] = partner_S
    return partners


def _partners(first: TraceResponses, other: TraceResponses) -> np.ndarray:
    """The index of each response's partner, −1 for none: equal responses with equal row keys match
    first, then the remaining equal ones in file order.
    """
    partner_S = np.full(len(first), -1, dtype=np.int64)
    rows, other_rows = np.flatnonzero(first.measured_S), np.flatnonzero(other.measured_S)
    with_row_keys = hash_keys(first.content_S, first.row_S), hash_keys(other.content_S, other.row_S)
    contents = first.content_S, other.content_S
    for key_S, other_key_S in (with_row_keys, contents):
        matched, partners = _match(key_S[rows], other_key_S[other_rows])
        partner_S[rows[matched]] = other_rows[partners]
        rows, other_rows = np.delete(rows, matched), np.delete(other_rows, partners)
    return partner_S


def _match(keys: np.ndarray, other_keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of equal keys; the n-th occurrence of a key matches the other's n-th."""
    # Numbered, keys are unique, so that each of several equal responses gets its own partner.
    numbered = hash_keys(keys, _occurrence(keys))
    other_numbered = hash_keys(other_keys, _occurrence(other_keys))
    _, matched, partners = np.intersect1d(
        numbered, other_numbered, assume_unique=True, return_indices=True
    )
    return matched, partners


def _occurrence(keys: np.ndarray) -> np.ndarray:
    """How many equal keys precede each one."""
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    number = np.empty(len(keys), dtype=np.int64)
    number[order] = np.arange(len(keys)) - np.searchsorted(sorted_keys, sorted_keys)
    return number


def _recognise(group: RowGroup, pair: Pair) -> TraceResponses:
    table = group.table
    prompts = _digests(table.column(PROMPT_COLUMN), [b""] * table.num_rows)
    contents = _digests(table.column("response_ids"), prompts)
    row_key = [np.from_dlpack(single(table.column(name))) for name in ROW_KEY]
    measured_S, missing_S = _measured_and_missing(group.batch, pair)
    return TraceResponses(
        prompt_S=np.frombuffer(b"".join(prompts), dtype=np.int64),
        content_S=np.frombuffer(b"".join(contents), dtype=np.uint64),
        row_S=hash_keys(*row_key),
        measured_S=measured_S,
        missing_S=missing_S,
    )


def _measured_and_missing(batch: TokenBatch, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Whether each response has a measured token, and a hash of the places of tokens that lack a
    log-probability or do not count.
    """
    missing_S = np.zeros(batch.num_responses, dtype=np.uint64)
    if not pair.measured_in(batch):
        return missing_S.astype(bool), missing_S
    measured_T = measured_tokens(batch, pair)
    missing_U = np.flatnonzero(~(measured_T & batch.loss_mask_T))
    response_U = np.searchsorted(batch.offset_S1, missing_U, side="right") - 1
    place_U = missing_U - batch.offset_S1[response_U]
    # A sum of mixed places does not depend on their order; it wraps at 2⁶⁴.
    np.add.at(missing_S, response_U, mix(place_U.astype(np.uint64)))
    return Segments(batch.offset_S1).sum(measured_T) > 0, missing_S


def measured_tokens(batch: TokenBatch, pair: Pair) -> np.ndarray:
    """Tokens with both log-probabilities; −∞ of the current policy is one."""
    reference_T = getattr(batch, pair.reference)
    current_T = getattr(batch, pair.current)
    return np.asarray(np.isfinite(reference_T) & ~np.isnan(current_T))


def _digests(column: pa.ChunkedArray, before: Sequence[bytes]) -> list[bytes]:
    """An 8-byte digest of each list of token ids, with the bytes before it as a prefix."""
    digests: list[bytes] = []
    for chunk in column.chunks:
        ids = np.from_dlpack(chunk.values)
        for start, stop in pairwise(np.from_dlpack(chunk.offsets)):
            digests.append(
                blake2b(before[len(digests)] + ids[start:stop].tobytes(), digest_size=8).digest()
            )
    return digests
