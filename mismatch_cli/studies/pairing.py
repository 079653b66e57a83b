"""Which responses of two traces are the same, and the policies of both on the same tokens.

A prompt is identified by its token ids, a response by those of its prompt and its own, not by their
numbering. Each response costs 33 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from mismatch_cli.base.arrays import Segments
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import SHARE, Estimate
from mismatch_cli.metrics.gaps import TokenGaps, token_gaps
from mismatch_cli.metrics.pairs import PAIR_COLUMNS, Pair
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.metrics.sums import WIDE_BAND, GroupSums
from mismatch_cli.processes.workers.portions import Portion
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.columns import ALWAYS_READ, PROMPT_COLUMN, ROW_KEY
from mismatch_cli.trace.foreign_values import single
from mismatch_cli.trace.reader import RowGroup, Trace, table_to_batch
from mismatch_cli.trace.shards import open_shard, read_group

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
        none = cls(
            *(np.zeros(0, dtype=kind) for kind in (np.int64, *[np.uint64] * 2, np.bool_, np.uint64))
        )
        parts = [none, *parts]
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0]))
        )

    def __len__(self) -> int:
        return len(self.prompt_S)


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
        self, found: RecognisedResponses, portion: Portion, groups: Iterator[RowGroup]
    ) -> None:
        (of_portion,) = found.responses[portion.trace]
        of_portion += [_recognised(group, self.pair) for group in groups]


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
    shared_prompts = np.intersect1d(
        first.prompt_S[first.measured_S], other.prompt_S[other.measured_S]
    )
    most_responses = MOST * max(int(r.measured_S.sum()) for r in (first, other))
    most_prompts = MOST * max(len(np.unique(r.prompt_S[r.measured_S])) for r in (first, other))
    by: PairedBy = "none"
    if np.count_nonzero(partner_S >= 0) > most_responses:
        by = "tokens"
    elif len(shared_prompts) > most_prompts:
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
    kept_S = first.measured_S.copy()
    for pairing in pairings:
        if pairing.by == "tokens":
            kept_S &= pairing.partner_S >= 0
        elif pairing.by == "prompts":
            kept_S &= np.isin(first.prompt_S, pairing.shared_prompts)
    if not kept_S.any():
        raise MismatchError("These traces have no responses in common. Compare them two at a time.")
    kept = [kept_S]
    for other, pairing in zip(responses[1:], pairings, strict=True):
        kept.append(other.measured_S.copy())
        if pairing.by == "tokens":
            kept[-1][:] = False
            kept[-1][pairing.partner_S[kept_S]] = True
        elif pairing.by == "prompts":
            kept[-1] &= np.isin(other.prompt_S, first.prompt_S[kept_S])
    return kept


def _partners(first: TraceResponses, other: TraceResponses) -> np.ndarray:
    """Match equal responses with equal row keys first, then the remaining equal ones in file
    order.
    """
    partner_S = np.full(len(first), -1, dtype=np.int64)
    first_rows, other_rows = np.flatnonzero(first.measured_S), np.flatnonzero(other.measured_S)
    for keys in (
        lambda r, index: hash_keys(r.content_S[index], r.row_S[index]),
        lambda r, index: r.content_S[index],
    ):
        found, at = _join(keys(first, first_rows), keys(other, other_rows))
        partner_S[first_rows[found]] = other_rows[at]
        first_rows, other_rows = np.delete(first_rows, found), np.delete(other_rows, at)
    return partner_S


def _join(first_keys: np.ndarray, other_keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of equal keys; the n-th occurrence of a key matches the n-th on the other side."""
    numbered, other_numbered = (
        hash_keys(keys, _occurrence(keys)) for keys in (first_keys, other_keys)
    )
    _, found, at = np.intersect1d(numbered, other_numbered, assume_unique=True, return_indices=True)
    return found, at


def _occurrence(keys: np.ndarray) -> np.ndarray:
    """How many equal keys precede each one."""
    order = np.argsort(keys, kind="stable")
    in_order, number = keys[order], np.empty(len(keys), dtype=np.int64)
    number[order] = np.arange(len(keys)) - np.searchsorted(in_order, in_order)
    return number


def _recognised(group: RowGroup, pair: Pair) -> TraceResponses:
    table, batch = group.table, group.batch
    prompts = _digests(table.column(PROMPT_COLUMN), [b""] * table.num_rows)
    contents = _digests(table.column("response_ids"), prompts)
    row_S = hash_keys(*(np.from_dlpack(single(table.column(name))) for name in ROW_KEY))
    return TraceResponses(
        np.frombuffer(b"".join(prompts), dtype=np.int64),
        np.frombuffer(b"".join(contents), dtype=np.uint64),
        row_S,
        *_measured_S(batch, pair),
    )


def _measured_S(batch: TokenBatch, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Whether a response has a measured token, and a hash of the places of those that lack one."""
    missing_S = np.zeros(batch.num_responses, dtype=np.uint64)
    if not pair.measured_in(batch):
        return missing_S.astype(bool), missing_S
    known_T = _measured_T(batch, pair)
    missing = np.flatnonzero(~(known_T & batch.loss_mask_T))
    response = np.searchsorted(batch.offset_S1, missing, side="right") - 1
    np.add.at(missing_S, response, mix((missing - batch.offset_S1[response]).astype(np.uint64)))
    return Segments(batch.offset_S1).sum(known_T) > 0, missing_S


def _measured_T(batch: TokenBatch, pair: Pair) -> np.ndarray:
    """Tokens with both log-probabilities; −∞ of the current policy is one."""
    reference_T, current_T = (getattr(batch, name) for name in (pair.reference, pair.current))
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


METRICS_SHOWN = (
    "abs_d_mean", "abs_d_p50", "abs_d_p99", "abs_d_max", "d_mean", "tv_binary_mean",
    "tv_binary_max",
    "ratio_outside_0.8_1.28",
)  # fmt: skip
# Both traces in one batch: ours in the columns of rollout and trainer, theirs in the two others.
OURS = Pair("ours", "our current policy / our reference", "logp_rollout_T", "logp_trainer_T")
THEIRS = Pair(
    "theirs", "their current policy / their reference", "logp_recomputed_T", "logp_trainer_repeat_T"
)
_CURRENT = Pair("current", "their current policy / ours", OURS.current, THEIRS.current)
_REFERENCE = Pair("reference", "their reference / ours", OURS.reference, THEIRS.reference)
_COLUMNS = (OURS.reference, OURS.current, THEIRS.reference, THEIRS.current)


@dataclass(frozen=True, kw_only=True)
class TokenComparison:
    """The policies of two traces on the tokens that count in both, the first trace as μ."""

    tokens: int
    masked_in_one: int  # tokens in the loss mask of only one of the traces
    current: Mapping[str, Estimate]  # the metrics of `METRICS_SHOWN`, by key
    reference: Mapping[str, Estimate]
    clip_flips: Estimate  # share of tokens


@dataclass
class SharedTokens(Accumulator):
    """The current policies of two traces compared, their references, and how often a clip decides
    differently.

    Everything is over tokens that count in both traces.
    """

    current: MismatchSummary = field(default_factory=lambda: MismatchSummary(_CURRENT))
    reference: MismatchSummary = field(default_factory=lambda: MismatchSummary(_REFERENCE))
    flips: GroupSums = field(default_factory=lambda: GroupSums(2))
    masked_in_one: int = 0  # tokens in the loss mask of only one of the traces

    def update(self, joined: TokenBatch) -> None:
        """Add responses that hold the columns of both traces."""
        self.current.update(joined)
        self.reference.update(joined)
        for gaps in token_gaps(joined, OURS, required=_COLUMNS):
            other_gaps = TokenGaps(joined, THEIRS, gaps.first, gaps.last, _COLUMNS)
            sums_S2 = np.stack(
                [gaps.responses.length_S, gaps.responses.sum(_side(gaps) != _side(other_gaps))],
                axis=1,
            )
            self.flips.update(gaps.group_S, sums_S2.astype(np.float64))

    @property
    def clip_flips(self) -> Estimate:
        """Share of tokens whose ratio is below, in or above [0.8, 1.28] in one trace and
        elsewhere in the other.
        """
        return self.flips.result(
            _share, self.current.exact.prompts.result(), {"clip_flips": SHARE}
        )["clip_flips"]

    def result(self) -> TokenComparison:
        """What docs/json/compare.md describes."""
        return TokenComparison(
            tokens=self.current.exact.counts.tokens,
            masked_in_one=self.masked_in_one,
            current=_shown(self.current),
            reference=_shown(self.reference),
            clip_flips=self.clip_flips,
        )


@dataclass(frozen=True)
class Partners:
    """The locations of some responses' partners: a row group of another trace, and a row in it."""

    groups: Mapping[int, tuple[Path, int]]  # a shard, and the number of the row group in it
    group_S: np.ndarray  # −1: the response is not compared
    row_S: np.ndarray

    @classmethod
    def of(cls, trace: Trace, partner_S: np.ndarray) -> Partners:
        """Locate partners by their row numbers in the whole trace; −1 for none."""
        # Broken shards have no recognised rows
        rows = {path: trace.footers[path].rows for path in trace.shards}
        groups = [
            (path, number)
            for path, rows_of_shard in rows.items()
            for number in range(len(rows_of_shard))
        ]
        rows_G = [count for rows_of_shard in rows.values() for count in rows_of_shard]
        first_G = np.concatenate([[0], np.cumsum(rows_G)])
        group_S = np.searchsorted(first_G, partner_S, side="right") - 1
        return cls(dict(enumerate(groups)), group_S, partner_S - first_G[group_S])

    def of_some(self, responses: slice) -> Partners:
        """The locations for some of the responses, with only the row groups that they need."""
        group_S = self.group_S[responses]
        groups = {
            number: self.groups[number] for number in np.unique(group_S).tolist() if number >= 0
        }
        return Partners(groups, group_S, self.row_S[responses])


@dataclass(frozen=True)
class CommonTokenMask:
    """Masks the tokens of a portion that one of the other traces did not measure."""

    pair: Pair
    partners: tuple[Partners, ...]

    def __call__(self, batch: TokenBatch, rows: np.ndarray) -> TokenBatch:
        """`rows`: those of the batch's responses in the portion."""
        mask_T = batch.loss_mask_T
        for partners in self.partners:
            theirs = table_to_batch(_Fetch(partners)(rows))
            mask_T = mask_T & theirs.loss_mask_T & _measured_T(theirs, self.pair)
        return replace(batch, loss_mask_T=mask_T)


def common_tokens(
    responses: Sequence[TraceResponses], pairings: Sequence[Pairing], kept: Sequence[np.ndarray]
) -> list[dict[int, np.ndarray]]:
    """For each trace, the rows of its responses in the other traces, by their numbers; −1 for none.

    Empty where nothing has to be looked up: all traces that are paired by tokens measured the same
    tokens, or there is none.
    """
    compared = np.flatnonzero(kept[0])
    rows = {0: compared}
    rows |= {n: p.partner_S[compared] for n, p in enumerate(pairings, 1) if p.by == "tokens"}
    missing = [responses[number].missing_S[row] for number, row in rows.items()]
    if all(np.array_equal(missing[0], other) for other in missing[1:]):
        return [{} for _ in responses]
    partners: list[dict[int, np.ndarray]] = [{} for _ in responses]
    for number, own in rows.items():
        for other in rows.keys() - {number}:
            partner_S = np.full(len(responses[number]), -1, dtype=np.int64)
            partner_S[own] = rows[other]
            partners[number][other] = partner_S
    return partners


@dataclass(frozen=True)
class PartnerPass:
    """The pass over the first trace: its responses, each with its partner's row in another trace.

    It holds one row group of each trace at a time. If both are in the same order, each row group is
    read once.
    """

    pair: Pair
    prompt_S: np.ndarray  # of each response of the portion: a hash of its prompt
    partners: Partners
    columns: ClassVar[Sequence[str]] = SCORED

    def begin(self, _portion: Portion) -> SharedTokens:
        return SharedTokens()

    def read(self, found: SharedTokens, _portion: Portion, groups: Iterator[RowGroup]) -> None:
        first, partners_of = 0, _Fetch(self.partners)
        for group in groups:
            rows = np.flatnonzero(self.partners.group_S[first : first + group.table.num_rows] >= 0)
            if len(rows):
                batch, partners = take_rows(group, rows), table_to_batch(partners_of(first + rows))
                found.masked_in_one += int((batch.loss_mask_T != partners.loss_mask_T).sum())
                found.update(_joined(batch, partners, self.pair, self.prompt_S[first + rows]))
            first += group.table.num_rows


def take_rows(group: RowGroup, rows: np.ndarray) -> TokenBatch:
    """Some rows of a row group, laid flat."""
    return (
        group.batch if len(rows) == group.table.num_rows else table_to_batch(group.table.take(rows))
    )


class _Fetch:
    """Fetches rows of a trace from their row groups, and keeps the last row group."""

    def __init__(self, partners: Partners) -> None:
        self._partners, self._table = partners, lru_cache(maxsize=1)(_read)

    def __call__(self, rows: np.ndarray) -> pa.Table:
        group_S, row_S = self._partners.group_S[rows], self._partners.row_S[rows]
        parts = [
            self._table(*self._partners.groups[g]).take(row_S[group_S == g])
            for g in np.unique(group_S).tolist()
        ]
        in_parts = np.argsort(group_S, kind="stable")
        return pa.concat_tables(parts, promote_options="default").take(np.argsort(in_parts))


class PartnerJoin:
    """Joins their partners to responses: one batch with the two policies of both traces, as in
    `OURS` and `THEIRS`.

    A token counts if it does in both traces. Prompts keep their ids.
    """

    def __init__(self, pair: Pair, partners: Partners) -> None:
        self._pair, self._partners_of = pair, _Fetch(partners)

    def __call__(self, batch: TokenBatch, rows: np.ndarray) -> TokenBatch:
        """`rows`: those of the batch's responses, each of which has a partner."""
        partners = table_to_batch(self._partners_of(rows))
        joined = _joined(batch, partners, self._pair, batch.prompt_id_S)
        measured_T = _measured_T(joined, OURS) & _measured_T(joined, THEIRS)
        return replace(joined, loss_mask_T=joined.loss_mask_T & measured_T)


def _read(path: Path, group: int) -> pa.Table:
    shard = open_shard(path)
    present = [name for name in shard.schema_arrow.names if name in SCORED]
    return read_group(shard, group, present, path).replace_schema_metadata(None)


def _joined(
    batch: TokenBatch, partners: TokenBatch, pair: Pair, prompt_S: np.ndarray
) -> TokenBatch:
    """One batch with the two policies of both traces; a token counts if it is in both loss
    masks.
    """
    reference_T, their_reference_T = (getattr(side, pair.reference) for side in (batch, partners))
    counts_T = (
        batch.loss_mask_T
        & partners.loss_mask_T
        & np.isfinite(reference_T)
        & np.isfinite(their_reference_T)
    )
    return replace(
        batch,
        prompt_id_S=prompt_S,
        loss_mask_T=counts_T,
        logp_rollout_T=reference_T,
        logp_trainer_T=getattr(batch, pair.current),
        logp_recomputed_T=their_reference_T,
        logp_trainer_repeat_T=getattr(partners, pair.current),
    )


def _side(gaps: TokenGaps) -> np.ndarray:
    """−1 below the clip range, 1 above, 0 in it: which advantages it blocks."""
    low, high = WIDE_BAND
    return (gaps.ratio_N > high).astype(np.int8) - (gaps.ratio_N < low).astype(np.int8)


def _share(sums_x2: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"clip_flips": sums_x2[..., 1] / sums_x2[..., 0]}


def _shown(summary: MismatchSummary) -> dict[str, Estimate]:
    estimates = summary.estimates()
    return {key: estimates[key] for key in METRICS_SHOWN}
