"""What every algorithm blocks on one set of tokens, as `clipstats --json` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_cli.metrics.clipping.approximation import Approximations
from mismatch_cli.metrics.clipping.bad_updates import BadUpdatesSummary
from mismatch_cli.metrics.clipping.overlap import OverlapCounts
from mismatch_cli.metrics.clipping.sweeps import SweepTables
from mismatch_cli.metrics.clipping.theory import TheoryTerms
from mismatch_cli.metrics.clipping.token_table import TokensBySign
from mismatch_cli.metrics.estimate import Estimate


@dataclass(frozen=True)
class BySign:
    """A share of all tokens with A ≠ 0, of those with A > 0 and of those with A < 0.

    Without advantages `all` has no value, and the others are as if A had that sign.
    """

    all: Estimate
    positive: Estimate
    negative: Estimate

    def of(self, sign: str) -> Estimate:
        """The share by the name of its field."""
        estimate: Estimate = getattr(self, sign)
        return estimate

    @property
    def is_above_0(self) -> bool:
        """Whether one of the shares is above 0."""
        return any(share.value for share in (self.all, self.positive, self.negative))


@dataclass(frozen=True)
class LostUpdate(BySign):
    """The lost update, and the parts of all of it that the mask and the cap of the weight take."""

    masked: Estimate
    capped: Estimate


@dataclass(frozen=True)
class BlockedInBin:
    """What an algorithm blocks in a bin of μ."""

    mu_low: float
    mu_high: float
    tokens: int
    blocked: BySign


@dataclass(frozen=True)
class BlockedAtPositions:
    """What an algorithm blocks at some positions in the response."""

    first: int
    last: int
    tokens: int
    blocked: BySign


@dataclass(frozen=True)
class BlockedInSteps:
    """What an algorithm blocks in some successive steps, with means over blocked and kept tokens;
    entropies in nats.
    """

    first: int
    last: int
    tokens: int
    blocked: BySign
    blocked_rare: Estimate
    mu_blocked: Estimate
    mu_kept: Estimate
    entropy_blocked: Estimate
    entropy_kept: Estimate


@dataclass(frozen=True)
class AlgorithmRow:
    """An algorithm, and what it blocks of the judged tokens; entropies in nats."""

    name: str
    anchor: str  # rollout, recomputed, both or none
    blocked_when: str
    weight: str
    source: str
    weighs_by_ratio: bool
    blocked: BySign
    lost: LostUpdate
    blocked_rare: Estimate  # of tokens with A > 0 and μ < 0.1
    responses_touched: Estimate  # of responses with a judged token
    mu_blocked: Estimate
    mu_kept: Estimate
    entropy_blocked: Estimate
    entropy_kept: Estimate
    by_mu: Sequence[BlockedInBin]
    by_position: Sequence[BlockedAtPositions]
    by_step: Sequence[BlockedInSteps]
    blocked_tokens: TokensBySign

    @property
    def strictness(self) -> float:
        """The share of tokens that it blocks; without advantages, summed over both signs."""
        if self.blocked.all.value is not None:
            return self.blocked.all.value
        return (self.blocked.positive.value or 0.0) + (self.blocked.negative.value or 0.0)


@dataclass(frozen=True)
class JudgedCounts:
    """How much was judged, and why the rest was not."""

    tokens: int
    positive: int
    negative: int
    zero_advantage: int
    masked: int
    not_measured: int
    out_of_support: int
    responses: int
    prompts: int
    prompts_exact: bool  # beyond 65,536 prompts their number is an estimate
    steps: int
    lacking: Mapping[str, int]  # responses left out, by the column that they lack


@dataclass(frozen=True)
class EqualThreshold:
    """The threshold of a family of masks that blocks as many tokens as an algorithm."""

    algorithm: str
    blocked: Estimate
    family: str
    threshold: Estimate


@dataclass(frozen=True)
class SameStrictness:
    """An algorithm beside the threshold of each other family that blocks as many tokens."""

    algorithm: str
    settings: str  # its thresholds in words
    family: str | None  # its own; None if its mask is of none, or it has several
    thresholds: Mapping[str, Estimate]  # by family


@dataclass(frozen=True)
class ClippingNumbers:
    """Everything counted about algorithms on one set of tokens."""

    counts: JudgedCounts
    algorithms: Sequence[AlgorithmRow]
    same_mask: Sequence[Sequence[str]]  # algorithms that decide alike on every token
    overlap: OverlapCounts
    bad_updates: BadUpdatesSummary
    sweeps: SweepTables
    equivalents: Sequence[EqualThreshold]
    approximation: Approximations
    theory: TheoryTerms | None  # None unless asked for, or without a reward
