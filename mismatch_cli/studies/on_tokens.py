"""Two traces on the same tokens: trainer against trainer, rollout against rollout, and a clip under both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.estimate import SHARE, Estimate
from mismatch_cli.metrics.gaps import TokenGaps, token_gaps
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.metrics.sums import WIDE_BAND, GroupSums
from mismatch_cli.studies.pairing import SCORED, Responses
from mismatch_cli.trace.columns import table_to_batch
from mismatch_cli.trace.reader import Trace, open_shard

METRICS_SHOWN = (
    "abs_d_mean", "abs_d_p50", "abs_d_p99", "abs_d_max", "d_mean", "tv_binary_mean", "tv_binary_max",
    "ratio_outside_0.8_1.28",
)  # fmt: skip
# Where both traces lie in one batch: ours under the names of rollout and trainer, theirs under the two others.
_OURS = Pair("ours", "our current policy / our reference", "logp_rollout_T", "logp_trainer_T")
_THEIRS = Pair("theirs", "their current policy / their reference", "logp_recomputed_T", "logp_trainer_repeat_T")
_CURRENT = Pair("current", "their current policy / ours", _OURS.current, _THEIRS.current)
_REFERENCE = Pair("reference", "their reference / ours", _OURS.reference, _THEIRS.reference)
_COLUMNS = (_OURS.reference, _OURS.current, _THEIRS.reference, _THEIRS.current)


@dataclass
class OnTokens:
    """The current policies of two traces against each other, their references, and how often a clip decides otherwise.

    All over tokens that count in both traces.
    """

    current: MismatchSummary = field(default_factory=lambda: MismatchSummary(_CURRENT))
    reference: MismatchSummary = field(default_factory=lambda: MismatchSummary(_REFERENCE))
    flips: GroupSums = field(default_factory=lambda: GroupSums(2))
    masked_in_one: int = 0  # tokens that the loss mask of one trace has and that of the other lacks

    def update(self, joined: TokenBatch) -> None:
        """Add responses that hold the columns of both traces."""
        self.current.update(joined)
        self.reference.update(joined)
        for ours in token_gaps(joined, _OURS, required=_COLUMNS):
            theirs = TokenGaps(joined, _THEIRS, ours.first, ours.last, _COLUMNS)
            sums_S2 = np.stack([ours.responses.length_S, ours.responses.sum(_side(ours) != _side(theirs))], axis=1)
            self.flips.update(ours.group_S, sums_S2.astype(np.float64))

    @property
    def clip_flips(self) -> Estimate:
        """Share of tokens whose ratio lies below, in or above [0.8, 1.28] in one trace, and elsewhere in the other."""
        return self.flips.result(_share, self.current.exact.prompts.result(), {"clip_flips": SHARE})["clip_flips"]

    def to_dict(self) -> dict[str, Any]:
        """As docs/compare.md describes it."""
        return {
            "tokens": self.current.exact.counts.tokens,
            "masked_in_one": self.masked_in_one,
            "current": _shown(self.current),
            "reference": _shown(self.reference),
            "clip_flips": self.clip_flips.to_dict(),
        }


def compare_on_tokens(
    traces: tuple[Trace, Trace], ours: Responses, kept_S: np.ndarray, partner_S: np.ndarray, pair: Pair
) -> OnTokens:
    """Read the first trace in order, and of the other the row groups where the partners of its responses lie.

    A row group of each is held at a time. Where both are in the same order each is read once, however many there are.
    """
    found, fetch, first = OnTokens(), _Fetch(traces[1]), 0
    for table in traces[0].tables(SCORED):
        rows = first + np.flatnonzero(kept_S[first : first + table.num_rows])
        if len(rows):
            mine = table_to_batch(table.take(rows - first))
            theirs = table_to_batch(fetch(partner_S[rows]))
            found.masked_in_one += int((mine.loss_mask_T != theirs.loss_mask_T).sum())
            found.update(_joined(mine, theirs, pair, ours.prompt_S[rows]))
        first += table.num_rows
    return found


class _Fetch:
    """Rows of a trace by their number, from whatever row groups they lie in."""

    def __init__(self, trace: Trace) -> None:
        self._places = list(_row_groups(trace))
        self._first_G = np.concatenate([[0], np.cumsum([rows for _, _, rows in self._places])])
        self._table = lru_cache(maxsize=1)(self._read)

    def __call__(self, row_S: np.ndarray) -> pa.Table:
        group_S = np.searchsorted(self._first_G, row_S, side="right") - 1
        parts = [self._table(g).take(row_S[group_S == g] - self._first_G[g]) for g in np.unique(group_S)]
        in_parts = np.argsort(group_S, kind="stable")
        return pa.concat_tables(parts, promote_options="default").take(np.argsort(in_parts))

    def _read(self, group: int) -> pa.Table:
        path, number, _ = self._places[group]
        shard = open_shard(path)
        present = [name for name in shard.schema_arrow.names if name in SCORED]
        return shard.read_row_group(number, columns=present, use_threads=False).replace_schema_metadata(None)


def _row_groups(trace: Trace) -> Iterator[tuple[Path, int, int]]:
    for path in trace.shards:
        metadata = open_shard(path).metadata
        for number in range(metadata.num_row_groups):
            yield path, number, metadata.row_group(number).num_rows


def _joined(mine: TokenBatch, theirs: TokenBatch, pair: Pair, prompt_S: np.ndarray) -> TokenBatch:
    """One batch with the two policies of both; a token counts where both loss masks have it."""
    reference_T, their_reference_T = (getattr(batch, pair.reference) for batch in (mine, theirs))
    counts_T = mine.loss_mask_T & theirs.loss_mask_T & reference_T.isfinite() & their_reference_T.isfinite()
    return replace(
        mine,
        prompt_id_S=torch.from_numpy(prompt_S),
        loss_mask_T=counts_T,
        logp_rollout_T=reference_T,
        logp_trainer_T=getattr(mine, pair.current),
        logp_recomputed_T=their_reference_T,
        logp_trainer_repeat_T=getattr(theirs, pair.current),
    )


def _side(gaps: TokenGaps) -> np.ndarray:
    """−1 below the band of a clip, 1 above, 0 in it: which advantages it blocks."""
    low, high = WIDE_BAND
    return (gaps.ratio_N > high).astype(np.int8) - (gaps.ratio_N < low).astype(np.int8)


def _share(sums_x2: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"clip_flips": sums_x2[..., 1] / sums_x2[..., 0]}


def _shown(summary: MismatchSummary) -> dict[str, Any]:
    estimates = summary.estimates()
    return {key: estimates[key].to_dict() for key in METRICS_SHOWN}
