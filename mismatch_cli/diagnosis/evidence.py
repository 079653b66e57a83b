"""What the checks see: the sample, the counts of the whole trace, and what the manifest says about the sampling."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from mismatch_cli.diagnosis.alignment import Alignment, Exchanges, HeadCollector, Heads, align, find_exchanges
from mismatch_cli.diagnosis.counts import Copies, Counts, OwnColumns
from mismatch_cli.diagnosis.grouped import Mean, mean_over_prompts
from mismatch_cli.diagnosis.model import ModelAtHand
from mismatch_cli.diagnosis.readings import Readings
from mismatch_cli.diagnosis.sample import Sample, SampleCollector
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.lattice import Lattice
from mismatch_cli.metrics.pairs import PAIRS, Pair, pairs_in
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.verdict.reference import Family, Usual, family, usual_gap

Status = Literal["found", "clear", "untested"]
Row = tuple[str, float | int | str | None]  # a figure with its label


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    `effect` is how large the fault is, in the words of `measure`. `left_N` is what undoing the fault leaves of
    log π − log μ on each token that counts, nats (NaN where nothing can be put right and the token goes); from it comes
    `explains`, the share of the sample's Σ|log π − log μ| that goes: on equal terms for every check, so no check fills
    it in. `evidence` are figures with their labels, `reason` why a check was not possible or does not count, `needs`
    what to type to make it possible.
    """

    check: str
    status: Status
    effect: float | None = None
    measure: str = ""
    sentence: str = ""
    evidence: tuple[Row, ...] = ()
    reason: str = ""
    needs: str = ""
    cause: str = ""
    change: str = ""
    left_N: np.ndarray | None = None
    explains: float | None = None

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "left_N"}
        return values | {"evidence": [{"label": label, "value": value} for label, value in self.evidence]}


def untested(check: str, reason: str, needs: str = "") -> Finding:
    return Finding(check, "untested", reason=reason, needs=needs)


@dataclass(frozen=True)
class Evidence:
    """One trace, or several pooled ones, as the checks see it."""

    pair: Pair
    sample: Sample
    counts: Counts
    lattice: Lattice
    own_columns: OwnColumns
    copies: Copies
    heads: Heads
    sampling: Mapping[str, Any] = field(default_factory=dict)  # of the manifest; empty where it does not say
    about: Mapping[str, Any] = field(default_factory=dict)  # the manifest: who sampled, who scored
    earlier_logp_T: np.ndarray | None = None  # log π of the sample's tokens at an earlier checkpoint; NaN = not scored
    model: ModelAtHand | None = None  # the trainer's model at the weights that sampled, where it was named

    @cached_property
    def alignment(self) -> Alignment:
        return align(self.sample)

    @cached_property
    def exchanges(self) -> Exchanges:
        return find_exchanges(self.heads)

    @cached_property
    def readings(self) -> Readings | None:
        """What the model at hand says of how each side read the responses; None without one."""
        return None if self.model is None else Readings(self.sample, self.model)

    @cached_property
    def gap(self) -> Mean:
        """Mean |log π − log μ| over the tokens that count, nats."""
        return mean_over_prompts(np.abs(self.sample.d_N), self.sample.group_N)

    @property
    def usual(self) -> Usual:
        """The gap that the precisions of the trace usually make, nats."""
        return usual_gap(self.about)

    @property
    def family(self) -> Family:
        """`moe`, `dense`, or empty where the manifest does not tell."""
        return family(self.about)

    @property
    def gap_is_too_large(self) -> bool:
        """Whether the gap is surely far above what the precisions of the trace make."""
        gap = self.gap
        return bool(gap.value - (2 * gap.error if np.isfinite(gap.error) else gap.value / 2) > self.usual.far_above)


def gather(traces: Sequence[Trace], on_responses: Callable[[int], None] = lambda _: None) -> Evidence:
    """Read traces once, in memory that does not depend on their length."""
    pair = PAIRS[pairs_in(traces)[0]]
    about = traces[0].manifest
    sampling = about.get("config", {}).get("sampling") or {}
    tables = (table for trace in traces for table in trace.tables())
    evidence = gather_tables(tables, pair, sampling, about, on_responses=on_responses)
    if not evidence.sample.counts_T.any():
        raise MismatchError(
            f"{traces[0].folder} holds no token with log-probabilities of both sides. {traces[0].how_to_score}"
        )
    return evidence


def gather_tables(
    tables: Iterable[pa.Table],
    pair: Pair,
    sampling: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
    on_responses: Callable[[int], None] = lambda _: None,
) -> Evidence:
    """The same from tables in the columns of a trace."""
    collector, counts, lattice = SampleCollector(pair), Counts(), Lattice()
    own_columns, copies, heads = OwnColumns(), Copies(), HeadCollector(pair)
    for table in tables:
        batch = table_to_batch(table)
        if pair.measured_in(batch):
            counts.update(table, batch, pair)
            own_columns.update(batch)
            copies.update(batch)
            heads.update(batch)
            collector.update(batch, table.column("prompt_ids").combine_chunks())
            for gaps in token_gaps(batch, pair):
                lattice.update(gaps)
        on_responses(batch.num_responses)
    whole = (counts, lattice, own_columns, copies, heads.result())
    return Evidence(pair, collector.result(), *whole, sampling, about or {})
