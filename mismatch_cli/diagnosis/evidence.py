"""What the checks see: the sample, counts over the whole trace, and what the manifest says about
sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from mismatch_cli.diagnosis.alignment import (
    Alignment,
    Exchanges,
    HeadCollector,
    Heads,
    align,
    find_exchanges,
)
from mismatch_cli.diagnosis.by_step import StepChange, find_step_change
from mismatch_cli.diagnosis.counts import Counts, ImprobableCopies, OwnColumns
from mismatch_cli.diagnosis.credit import Credit
from mismatch_cli.diagnosis.far_responses import Subset, find_far_responses
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from mismatch_cli.diagnosis.model import ModelAtHand
from mismatch_cli.diagnosis.origins import NOWHERE, Origin, Traces
from mismatch_cli.diagnosis.rare_gaps import STEP, is_rare
from mismatch_cli.diagnosis.readings import Readings
from mismatch_cli.diagnosis.sample import NO_LIMIT, Sample, SampleCollector
from mismatch_cli.limits.expected import Expected, expected_gap
from mismatch_cli.limits.manifest_sides import Family, family, sides_of_gap
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.lattice import Lattice
from mismatch_cli.metrics.own_scale import OwnScale
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.columns import PROMPT_COLUMN

Status = Literal["found", "clear", "untested"]
Row = tuple[str, float | int | str | None]  # label and number, as a page shows them


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    `effect` is the size of the fault, in the unit `measure`. `left_N` is what undoing the fault
    leaves of log π − log μ on each token that counts, in nats (NaN where it cannot be repaired and
    the token is dropped). `explains`, the share of the sample's Σ|log π − log μ| that this removes,
    is computed from it in the same way for every check, so checks leave it empty. Noise or a tail
    is a fault where it alone makes the gap larger than expected: `beyond_expected`. `evidence`
    holds labelled figures; `reason` says why a check was not possible or does not count, `needs`
    what to type to make it possible. `where` names the responses of a fault in part of a trace; a
    check that knows them gives `part`, from which `diagnose` writes it.
    `at_most`: undoing the fault may remove what others make too, so `explains` is an upper bound.
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
    where: str = ""
    part: Subset | None = None
    left_N: np.ndarray | None = None
    explains: float | None = None
    beyond_expected: bool = False
    at_most: bool = False


def untested(check: str, reason: str, needs: str = "") -> Finding:
    return Finding(check, "untested", reason=reason, needs=needs)


@dataclass(frozen=True)
class Evidence:
    """One trace, or several pooled ones, as the checks see them."""

    pair: Pair
    sample: Sample
    counts: Counts
    lattice: Lattice
    scale: OwnScale
    own_columns: OwnColumns
    copies: ImprobableCopies
    credit: Credit
    heads: Heads
    # The sampling settings of the manifest; empty if it has none
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # The manifest, which names who sampled and who scored
    about: Mapping[str, Any] = field(default_factory=dict)
    # Log π of the sample's tokens at an earlier checkpoint; NaN = not scored
    earlier_logp_T: np.ndarray | None = None
    # The checks whose faults are no longer in the sample
    undone: tuple[str, ...] = ()
    # The trainer's model at the sampling weights, if it was named
    model: ModelAtHand | None = None
    traces: Traces = field(default_factory=Traces)

    @cached_property
    def alignment(self) -> Alignment:
        return align(self.sample)

    @cached_property
    def exchanges(self) -> Exchanges:
        return find_exchanges(self.heads)

    @cached_property
    def far_responses(self) -> Subset | None:
        """The responses with a far larger gap than the others, if there are two kinds."""
        return None if self.gap_is_rare else find_far_responses(self.sample, self.traces)

    @cached_property
    def step_change(self) -> StepChange | None:
        """The steps whose gap differs most from that of the others, by chance or not."""
        return None if self.gap_is_rare else find_step_change(self.sample)

    @cached_property
    def gap_is_rare(self) -> bool:
        """Whether few tokens have a gap, as steps of logits in 16 bits make it: `rare_gaps`."""
        sides = sides_of_gap(self.about)
        coldest = min(side.temperature for side in sides) or 1.0
        return any(side.is_16_bits for side in sides) and is_rare(self.sample, STEP / coldest)

    @property
    def subsets(self) -> tuple[Subset, ...]:
        """Responses that may have causes of their own: the far ones, and those of some steps; first
        those of which it is known what they share.
        """
        subsets = [] if self.far_responses is None else [self.far_responses]
        change = self.step_change
        if change is not None and change.is_found and not self.weights_differ:
            every_S = np.ones_like(change.inside_S)
            subsets.append(Subset(change.inside_S, every_S, change.where))
        return tuple(sorted(subsets, key=lambda subset: not subset.shared))

    @property
    def weights_differ(self) -> bool:
        """Whether the trainer's weights are newer than those that sampled."""
        return self.pair.name == "total"

    @cached_property
    def readings(self) -> Readings | None:
        """How each side read the responses, according to the loaded model; None without a model."""
        return None if self.model is None else Readings(self.sample, self.model)

    @cached_property
    def gap(self) -> Mean:
        """Mean |log π − log μ| over the tokens that count, nats."""
        return mean_over_prompts(np.abs(self.sample.d_N), self.sample.group_N)

    @cached_property
    def expected(self) -> Expected:
        """The gap that the trace would have without a fault, nats."""
        step = None
        # Rounded logits of the trace show their steps themselves; else the model at hand has them
        if self.model is not None and self.model.few and not self.scale.shows_steps:
            step = self.model.logit_step
        return expected_gap(self.about, self.scale, self.lattice.result(), step, self.gap.value)

    @property
    def family(self) -> Family:
        """`moe`, `dense`, or empty if the manifest does not say."""
        return family(self.about)

    @property
    def gap_is_too_large(self) -> bool:
        """Whether the gap is larger than expected, by two standard errors."""
        return self.gap.value - self._two_errors > self.expected.high

    @property
    def resolution(self) -> float:
        """The gap above which it is too large, nats per token: two standard errors above what is
        expected.
        """
        return self.expected.high + self._two_errors

    @property
    def _two_errors(self) -> float:
        """Two standard errors of the gap, nats; half of the gap for too few prompts."""
        gap = self.gap
        return 2 * gap.error if np.isfinite(gap.error) else gap.value / 2


class HashLimits(NamedTuple):
    """Hashes at or above which a response is not kept, since enough smaller ones have been seen."""

    sample: int = NO_LIMIT
    heads: int = NO_LIMIT
    copies: int = NO_LIMIT
    credit: int = NO_LIMIT


class EvidenceCollector(Accumulator):
    """Gathers evidence from traces in memory that does not grow with their length."""

    SETTINGS = ("pair",)

    def __init__(
        self,
        pair: Pair,
        limits: HashLimits = HashLimits(),
        temperatures: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """`temperatures`: of the reference policy and of the current one."""
        self.pair = pair
        self.counts = Counts()
        self.lattice = Lattice()
        self.own_columns = OwnColumns()
        self.scale = OwnScale(pair, temperatures)
        self.sample = SampleCollector(pair, limit=limits.sample)
        self.heads = HeadCollector(pair, limit=limits.heads)
        self.copies = ImprobableCopies(limit=limits.copies)
        self.credit = Credit(limit=limits.credit)

    @property
    def limits(self) -> HashLimits:
        """Limits to pass to the next portions, which may skip everything above them."""
        return HashLimits(self.sample.limit, self.heads.limit, self.copies.limit, self.credit.limit)

    def update(self, table: pa.Table, batch: TokenBatch, origin: Origin = NOWHERE) -> None:
        """Add one table of a file, as recorded and laid flat; skips it if the pair was not
        measured.
        """
        if not self.pair.measured_in(batch):
            return
        self.counts.update(table, batch, self.pair)
        self.own_columns.update(batch)
        self.copies.update(batch)
        self.credit.update(batch)
        self.heads.update(batch)
        prompt_ids = None
        if PROMPT_COLUMN in table.column_names:
            prompt_ids = table.column(PROMPT_COLUMN).combine_chunks()
        self.sample.update(batch, prompt_ids, origin.columns(table, batch))
        for gaps in token_gaps(batch, self.pair):
            self.lattice.update(gaps)
            self.scale.update(gaps)

    def evidence(
        self,
        sampling: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        traces: Traces = Traces(),
    ) -> Evidence:
        """The evidence gathered, with what the manifests say."""
        return Evidence(
            self.pair,
            self.sample.result(),
            self.counts,
            self.lattice,
            self.scale,
            self.own_columns,
            self.copies,
            self.credit,
            self.heads.result(),
            sampling,
            about or {},
            traces=traces,
        )
