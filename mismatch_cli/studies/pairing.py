"""Which responses of two traces are the same, and the policies of both on the same tokens.

A prompt is identified by its token ids, a response by those of its prompt and its own, not by their
numbering. Each response costs 33 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise, permutations
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


def _partners(first: TraceResponses, other: TraceResponses) -> np.ndarray:
    """The index of each response's partner, −1 for none: equal responses with equal row keys match
    first, then the remaining equal ones in file order.
    """
    partner_S = np.full(len(first), -1, dtype=np.int64)
    rows, other_rows = np.flatnonzero(first.measured_S), np.flatnonzero(other.measured_S)
    keys_and_rows = hash_keys(first.content_S, first.row_S), hash_keys(other.content_S, other.row_S)
    for key_S, other_key_S in (keys_and_rows, (first.content_S, other.content_S)):
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
    measured_T = _measured_T(batch, pair)
    missing_U = np.flatnonzero(~(measured_T & batch.loss_mask_T))
    response_U = np.searchsorted(batch.offset_S1, missing_U, side="right") - 1
    place_U = missing_U - batch.offset_S1[response_U]
    # A sum of mixed places does not depend on their order; it wraps at 2⁶⁴.
    np.add.at(missing_S, response_U, mix(place_U.astype(np.uint64)))
    return Segments(batch.offset_S1).sum(measured_T) > 0, missing_S


def _measured_T(batch: TokenBatch, pair: Pair) -> np.ndarray:
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
            their_gaps = TokenGaps(joined, THEIRS, gaps.first, gaps.last, _COLUMNS)
            flips_N = _clip_side(gaps) != _clip_side(their_gaps)
            sums_S2 = np.stack([gaps.responses.length_S, gaps.responses.sum(flips_N)], axis=1)
            self.flips.update(gaps.group_S, sums_S2.astype(np.float64))

    @property
    def clip_flips(self) -> Estimate:
        """Share of tokens whose ratio is below, in or above [0.8, 1.28] in one trace and
        elsewhere in the other.
        """
        prompts = self.current.exact.prompts.result()
        return self.flips.result(_share, prompts, {"clip_flips": SHARE})["clip_flips"]

    def result(self) -> TokenComparison:
        """What docs/json/compare.md describes."""
        return TokenComparison(
            tokens=self.current.exact.counts.tokens,
            masked_in_one=self.masked_in_one,
            current=_shown_metrics(self.current),
            reference=_shown_metrics(self.reference),
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
        groups: list[tuple[Path, int]] = []
        rows_G: list[int] = []
        # Broken shards are left out of `shards`, and have no recognised rows
        for path in trace.shards:
            for number, rows in enumerate(trace.footers[path].rows):
                groups.append((path, number))
                rows_G.append(rows)
        first_G = np.concatenate([[0], np.cumsum(rows_G)])
        group_S = np.searchsorted(first_G, partner_S, side="right") - 1
        return cls(dict(enumerate(groups)), group_S, partner_S - first_G[group_S])

    def of_some(self, responses: slice) -> Partners:
        """The locations for some of the responses, with only the row groups that they need."""
        group_S = self.group_S[responses]
        needed = np.unique(group_S[group_S >= 0]).tolist()
        groups = {number: self.groups[number] for number in needed}
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
            theirs = _PartnerReader(partners).read(rows)
            mask_T = mask_T & theirs.loss_mask_T & _measured_T(theirs, self.pair)
        return replace(batch, loss_mask_T=mask_T)


def common_tokens(
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

    def read(self, shared: SharedTokens, _portion: Portion, groups: Iterator[RowGroup]) -> None:
        first = 0
        reader = _PartnerReader(self.partners)
        for group in groups:
            rows = np.flatnonzero(self.partners.group_S[first : first + group.table.num_rows] >= 0)
            if len(rows):
                batch = take_rows(group, rows)
                partners = reader.read(first + rows)
                shared.masked_in_one += int((batch.loss_mask_T != partners.loss_mask_T).sum())
                shared.update(_joined(batch, partners, self.pair, self.prompt_S[first + rows]))
            first += group.table.num_rows


def take_rows(group: RowGroup, rows: np.ndarray) -> TokenBatch:
    """Some rows of a row group, laid flat."""
    if len(rows) == group.table.num_rows:
        return group.batch
    return table_to_batch(group.table.take(rows))


class _PartnerReader:
    """Reads partners from their row groups, and holds the last row group."""

    def __init__(self, partners: Partners) -> None:
        self._partners = partners
        self._read_group = lru_cache(maxsize=1)(_read_scored)

    def read(self, rows: np.ndarray) -> TokenBatch:
        """The partners of some responses, in the order of these."""
        group_S = self._partners.group_S[rows]
        row_S = self._partners.row_S[rows]
        tables = []
        for group in np.unique(group_S).tolist():
            table = self._read_group(*self._partners.groups[group])
            tables.append(table.take(row_S[group_S == group]))
        by_group = pa.concat_tables(tables, promote_options="default")
        place_S = np.argsort(np.argsort(group_S, kind="stable"))
        return table_to_batch(by_group.take(place_S))


class PartnerJoin:
    """Joins their partners to responses: one batch with the two policies of both traces, as in
    `OURS` and `THEIRS`.

    A token counts if it does in both traces. Prompts keep their ids.
    """

    def __init__(self, pair: Pair, partners: Partners) -> None:
        self._pair = pair
        self._reader = _PartnerReader(partners)

    def __call__(self, batch: TokenBatch, rows: np.ndarray) -> TokenBatch:
        """`rows`: those of the batch's responses, each of which has a partner."""
        joined = _joined(batch, self._reader.read(rows), self._pair, batch.prompt_id_S)
        measured_T = _measured_T(joined, OURS) & _measured_T(joined, THEIRS)
        return replace(joined, loss_mask_T=joined.loss_mask_T & measured_T)


def _read_scored(path: Path, group: int) -> pa.Table:
    shard = open_shard(path)
    columns = [name for name in shard.schema_arrow.names if name in SCORED]
    return read_group(shard, group, columns, path).replace_schema_metadata(None)


def _joined(
    batch: TokenBatch, partners: TokenBatch, pair: Pair, prompt_S: np.ndarray
) -> TokenBatch:
    """One batch with the two policies of both traces; a token counts if it is in both loss
    masks.
    """
    reference_T = getattr(batch, pair.reference)
    their_reference_T = getattr(partners, pair.reference)
    counts_T = batch.loss_mask_T & partners.loss_mask_T
    is_measured_T = np.isfinite(reference_T) & np.isfinite(their_reference_T)
    return replace(
        batch,
        prompt_id_S=prompt_S,
        loss_mask_T=counts_T & is_measured_T,
        logp_rollout_T=reference_T,
        logp_trainer_T=getattr(batch, pair.current),
        logp_recomputed_T=their_reference_T,
        logp_trainer_repeat_T=getattr(partners, pair.current),
    )


def _clip_side(gaps: TokenGaps) -> np.ndarray:
    """Where the ratio of each token is: −1 below the clip range, 1 above, 0 in it. That decides
    which advantages it blocks.
    """
    low, high = WIDE_BAND
    return (gaps.ratio_N > high).astype(np.int8) - (gaps.ratio_N < low).astype(np.int8)


def _share(sums_x2: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"clip_flips": sums_x2[..., 1] / sums_x2[..., 0]}


def _shown_metrics(summary: MismatchSummary) -> dict[str, Estimate]:
    estimates = summary.estimates()
    return {key: estimates[key] for key in METRICS_SHOWN}
