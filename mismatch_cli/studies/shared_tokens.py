"""The policies of two traces on the same tokens: how far they differ, and the pass that joins them.

Each response of the first trace is read with its partner, which may be anywhere in the other trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import SHARE, Estimate
from mismatch_cli.metrics.gaps import TokenGaps, token_gaps
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.metrics.sums import WIDE_BAND, GroupSums
from mismatch_cli.processes.workers.portions import Portion
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.pairing import SCORED, measured_tokens
from mismatch_cli.trace.reader import RowGroup, Trace, table_to_batch
from mismatch_cli.trace.shards import open_shard, read_group

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
            mask_T = mask_T & theirs.loss_mask_T & measured_tokens(theirs, self.pair)
        return replace(batch, loss_mask_T=mask_T)


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
        # Rows come group by group: this is the place of each response's partner among them.
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
        measured_T = measured_tokens(joined, OURS) & measured_tokens(joined, THEIRS)
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
