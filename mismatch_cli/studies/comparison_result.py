"""The result of a comparison, as docs/json/compare.md describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mismatch_cli.metrics.differences import MetricDifference
from mismatch_cli.metrics.pair_summary import PairSummary
from mismatch_cli.studies.pairing import PairedBy
from mismatch_cli.studies.settings_compared import SettingDifference
from mismatch_cli.studies.shared_tokens import TokenComparison
from mismatch_cli.trace.origin import About

Differs = Literal["gap", "metrics", "noise", "untested"]


@dataclass(frozen=True, kw_only=True)
class ComparedTrace:
    """A trace, and the summary of its compared responses."""

    name: str  # a letter
    run: str  # its folder's name, with as many parents as distinguish the traces
    folder: str
    about: About
    responses: int
    compared_responses: int
    prompts: int  # identified by their token ids
    summary: PairSummary

    @property
    def left_out(self) -> int:
        """Scored responses without a match in another trace."""
        return self.responses - self.compared_responses - self.about.unscored_responses

    @property
    def per_prompt(self) -> float:
        """Compared responses to a prompt, on average."""
        return self.summary.counts.responses / self.summary.counts.prompts


@dataclass(frozen=True, kw_only=True)
class TraceDifference:
    """How another trace differs from the first."""

    trace: str  # its name
    against: str  # that of the first
    pairing: PairedBy
    shared_responses: int
    shared_prompts: int
    tested: int  # metrics whose difference has an interval
    more_than_noise: int  # of them
    expected_by_chance: float
    differs: Differs
    metrics: Mapping[str, MetricDifference]  # of the catalog, by key
    on_tokens: TokenComparison | None  # if both hold the same responses
    settings: Sequence[SettingDifference]

    @property
    def is_different(self) -> bool:
        """Whether chance does not explain the metrics that differ."""
        return self.differs in ("gap", "metrics")

    @property
    def suspects(self) -> Sequence[SettingDifference]:
        """Settings that affect a log-probability, likeliest first."""
        return [row for row in self.settings if not row.harmless]


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """What docs/json/compare.md describes."""

    arguments: Sequence[str]
    pair: str
    traces: Sequence[ComparedTrace]
    comparisons: Sequence[TraceDifference]  # of each other trace with the first

    @property
    def first(self) -> ComparedTrace:
        return self.traces[0]

    @property
    def others(self) -> Sequence[tuple[ComparedTrace, TraceDifference]]:
        """Each other trace with its differences."""
        return list(zip(self.traces[1:], self.comparisons, strict=True))

    def named_by_run(self) -> ComparisonResult:
        """This result with the names of runs instead of letters."""
        run_of = {trace.name: trace.run for trace in self.traces}
        traces = [replace(trace, name=trace.run) for trace in self.traces]
        comparisons = []
        for row in self.comparisons:
            comparisons.append(replace(row, trace=run_of[row.trace], against=run_of[row.against]))
        return replace(self, traces=traces, comparisons=comparisons)
