"""The summary of a pair of policies, as summary.json has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_cli.base.json_form import beside, beside_if_any, left_out_if_none
from mismatch_cli.metrics.estimate import Estimate


@dataclass(frozen=True)
class TokenTotals:
    """How much a pair covers: tokens that count, and why the others do not."""

    tokens: int
    masked: int
    not_measured: int
    out_of_support: int
    responses: int
    prompts: int
    prompts_exact: bool  # beyond 65,536 prompts their number is an estimate


@dataclass(frozen=True)
class Noise:
    """A metric of the trainer against itself in another batch shape."""

    floor: float | None
    times_floor: float | str | None  # the gap in multiples of it, or why there are none
    times_floor_range: Sequence[float] | None = left_out_if_none()  # of a noise of few tokens


@dataclass(frozen=True)
class MetricEstimate(Estimate):
    """A metric of a pair, beside its noise where that was measured."""

    noise: Noise | None = beside_if_any()


@dataclass(frozen=True)
class ProbabilityBin:
    """A bin of μ, and how its tokens scatter: the metrics of `VOLATILITY`."""

    mu_low: float
    mu_high: float
    tokens: int
    metrics: Mapping[str, Estimate] = beside()


@dataclass(frozen=True)
class ProfileRow:
    """The gap at some distances from an end of the response, or in some turns."""

    first: int
    last: int | None  # None: no end
    tokens: int
    abs_d_mean: Estimate
    tv_binary_mean: Estimate
    d_mean: Estimate
    length_mean: Estimate | None = left_out_if_none()  # of a turn
    turns: int | None = left_out_if_none()  # how many were counted


@dataclass(frozen=True)
class LengthRow:
    """Σd of the responses in an octave of length."""

    first: int
    last: int
    sequences: int
    d_sum_mean: Estimate
    d_sum_sd: Estimate


@dataclass(frozen=True)
class Sequences:
    """Σd of whole responses, by their length."""

    by_length: Sequence[LengthRow]


@dataclass(frozen=True)
class StepRow:
    """The mass of the top K on both sides in some steps."""

    first: int
    last: int
    tokens: int
    masses: Mapping[str, Estimate] = beside()


@dataclass(frozen=True)
class PairSummary:
    """Everything measured on a pair; the metrics are those of the catalog, by key."""

    pair: str
    counts: TokenTotals
    metrics: Mapping[str, MetricEstimate]
    volatility: Sequence[ProbabilityBin]
    positions: Sequence[ProfileRow]
    from_end: Sequence[ProfileRow]
    turns: Sequence[ProfileRow]
    sequence: Sequences
    by_step: Sequence[StepRow]
