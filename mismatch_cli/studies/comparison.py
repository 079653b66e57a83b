"""What two or more traces have in common, the same metrics of each, and the difference from the
first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from math import comb
from pathlib import Path
from typing import ClassVar

import numpy as np

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import shorten_apart, shorten_paths
from mismatch_cli.metrics.differences import GAP, MetricDifference, SummaryEstimates, differences
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pair_summary import PairSummary
from mismatch_cli.metrics.pairs import PAIRS, Pair, pairs_in
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.metrics.volatility import D_BINS
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.processes.workers.executor import Executor
from mismatch_cli.processes.workers.portions import Portion
from mismatch_cli.processes.workers.reading import executor
from mismatch_cli.studies.comparison_result import (
    ComparedTrace,
    ComparisonResult,
    Differs,
    TraceDifference,
)
from mismatch_cli.studies.exploration.explored import Exploration
from mismatch_cli.studies.exploration.two_runs import ComparedRun, explore_two
from mismatch_cli.studies.mismatch import COLUMNS, without_unknown
from mismatch_cli.studies.pairing import (
    Pairing,
    RecognisedResponses,
    RecognitionPass,
    TraceResponses,
    compared_rows,
    pair_up,
    partner_rows,
)
from mismatch_cli.studies.settings_compared import NAMES, SettingDifference, settings_diff
from mismatch_cli.studies.shared_tokens import (
    CommonTokenMask,
    PartnerPass,
    Partners,
    SharedTokens,
    take_rows,
)
from mismatch_cli.studies.study import Study, name_of, who_is_compared
from mismatch_cli.studies.unusable import refuse_unmeasured
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import RowGroup, Trace

CHANCE = 0.05  # the share of metrics that differ by more than noise between equal traces


@dataclass(frozen=True)
class ComparisonPlotData:
    """`exceedance` has, per trace, |d| in nats and the share of tokens above it: [2, edges]."""

    STUDY: ClassVar[str] = "comparison"

    result: ComparisonResult
    subject: str = ""  # what is compared, in one line
    exceedance: tuple[np.ndarray, ...] = ()

    @property
    def names(self) -> list[str]:
        """The traces' names in figures."""
        return [trace.run for trace in self.result.traces]

    @cached_property
    def by_trace(self) -> dict[str, PairSummary]:
        """Each trace's summary, by the run's name."""
        return {trace.run: trace.summary for trace in self.result.traces}


@dataclass(frozen=True)
class MeasuredTrace:
    """One trace: which of its responses are compared, and what was measured on them."""

    name: str
    run: str  # its folder's name, with as many parents as distinguish the traces
    trace: Trace
    responses: TraceResponses
    compared_S: np.ndarray  # bool, in the order of the trace's files
    summary: MismatchSummary

    @cached_property
    def result(self) -> PairSummary:
        """The summary as `report` shows it."""
        return without_unknown(self.summary.result(), self.about.source)

    @cached_property
    def about(self) -> About:
        return About.of([self.trace], int(np.count_nonzero(~self.responses.measured_S)))

    @property
    def estimates(self) -> SummaryEstimates:
        """The summary with what its intervals are made of; what the report does not know is not
        compared either.
        """
        estimates = SummaryEstimates(self.summary)
        for key, shown in self.result.metrics.items():
            if shown.value is None:
                estimates.estimates[key] = Estimate(None, note=shown.note)
        return estimates

    @property
    def num_compared(self) -> int:
        return int(np.count_nonzero(self.compared_S))


@dataclass(frozen=True)
class TraceComparison:
    """Another trace compared with the first one."""

    other: MeasuredTrace
    pairing: Pairing
    differences: dict[str, MetricDifference]
    on_tokens: SharedTokens | None  # if both hold the same responses


@dataclass(frozen=True)
class ComparisonAnalysis(Study):
    """The first trace, and each of the others compared with it."""

    STUDY, FORMAT = "comparison", "mismatch-cli comparison"

    pair: Pair
    first: MeasuredTrace
    others: tuple[TraceComparison, ...]
    arguments: tuple[str, ...] = ()  # as typed, without the traces

    @property
    def measured(self) -> tuple[MeasuredTrace, ...]:
        """All traces, the first one first."""
        return (self.first, *(comparison.other for comparison in self.others))

    @property
    def typed(self) -> tuple[Path, ...]:
        """Each trace's path, as you type it."""
        return tuple(name_of(measured.trace) for measured in self.measured)

    @cached_property
    def result(self) -> ComparisonResult:
        """What `compare --json` prints."""
        return ComparisonResult(
            arguments=self.arguments,
            pair=self.pair.name,
            traces=list(map(_trace_result, self.measured)),
            comparisons=[_difference_result(self, comparison) for comparison in self.others],
        )

    def settings_of(self, comparison: TraceComparison) -> list[SettingDifference]:
        """The settings in which another trace differs from the first, likeliest causes first."""
        return settings_diff(
            self.first.trace.manifest,
            comparison.other.trace.manifest,
            at_equal_weights=self.pair.name == "mismatch",
        )

    @property
    def explored_responses(self) -> int:
        if len(self.others) > 1:
            return 0
        (comparison,) = self.others
        if comparison.pairing.by == "none":
            return 0
        # Paired by tokens, a response and its partner are explored as one.
        if comparison.pairing.by == "tokens":
            return self.first.num_compared
        return self.first.num_compared + comparison.other.num_compared

    def exploration(
        self, on_responses: Callable[[int], None] = lambda _: None
    ) -> Exploration | None:
        """The tokens of two traces that are paired; None for others."""
        if len(self.others) > 1:
            return None
        (comparison,) = self.others
        runs = [
            ComparedRun(measured.trace, measured.responses, measured.compared_S)
            for measured in self.measured
        ]
        explored = explore_two(self.pair, runs, comparison.pairing, on_responses)
        if explored is None:
            return None
        names = tuple(measured.run for measured in self.measured)
        settings = [row for row in self.settings_of(comparison) if not row.harmless]
        return replace(
            explored,
            traces=names[: len(explored.traces)],
            runs=names,
            settings=tuple(map(_shorten_values, settings)),
        )

    @cached_property
    def plot_data(self) -> ComparisonPlotData:
        """What the plots draw: the numbers of the JSON, and the distribution of |d| in each
        trace.
        """
        subjects = []
        exceedances = []
        for measured in self.measured:
            subjects.append(f"{measured.run}: {who_is_compared(measured.trace.manifest)}")
            exceedances.append(exceedance(measured.summary.exact.cells.d.total))
        return ComparisonPlotData(self.result, " · ".join(subjects), tuple(exceedances))


def analyse_comparison(
    traces: Sequence[Trace],
    pair_name: str | None = None,
    *,
    arguments: Sequence[str] = (),
    workers: Workers = ALONE,
    on_responses: Callable[[int], None] = lambda _: None,
) -> ComparisonAnalysis:
    """Read each trace twice, for its keys and for its metrics, and a third time to compare tokens
    directly.

    Raises a `UsageError` if a trace lacks the pair, and a `MismatchError` if nothing was scored, or
    no token is in all traces.
    """
    pair = _common_pair(traces, pair_name)
    with executor(workers, traces) as reader:
        recognised = reader.reduced(reader.portions, lambda _: RecognitionPass(pair), on_responses)
        plan = _Plan.of(pair, reader, recognised)
        summaries = [
            reader.reduced(portions, plan.measuring_pass, on_responses)
            for portions in plan.portions
        ]
        first, *others = plan.measured_traces(summaries)
        first_estimates = first.estimates
        comparisons = []
        for other, pairing in zip(others, plan.pairings, strict=True):
            on_tokens = None
            if pairing.by == "tokens":
                on_tokens = reader.reduced(
                    plan.portions[0], plan.passes_over_shared(pairing, other.trace)
                )
            metrics = differences(
                first_estimates, other.estimates, same_tokens=on_tokens is not None
            )
            comparisons.append(TraceComparison(other, pairing, metrics, on_tokens))
    return ComparisonAnalysis(pair, first, tuple(comparisons), tuple(arguments))


@dataclass(frozen=True)
class _Plan:
    """What is compared: the responses of each trace, their pairing with the first trace, and the
    passes that measure them.
    """

    pair: Pair
    traces: Sequence[Trace]
    portions: list[list[Portion]]  # of each trace
    rows: Mapping[Portion, slice]  # its responses, among those of its trace
    responses: list[TraceResponses]  # of each trace
    pairings: list[Pairing]  # of each trace but the first
    compared: list[np.ndarray]  # of each trace: bool, in file order
    partners: list[dict[int, np.ndarray]]  # as `partner_rows` says

    @classmethod
    def of(cls, pair: Pair, reader: Executor, recognised: RecognisedResponses) -> _Plan:
        """Sort the responses recognised in the reader's portions by trace, and pair them up.

        Raises a `MismatchError` for a trace without scored tokens.
        """
        portions: list[list[Portion]] = []
        rows: dict[Portion, slice] = {}
        responses: list[TraceResponses] = []
        for number, trace in enumerate(reader.traces):
            own = [portion for portion in reader.portions if portion.trace == number]
            own_responses = list(map(TraceResponses.joined, recognised.responses[number]))
            first = 0
            for portion, in_portion in zip(own, own_responses, strict=True):
                rows[portion] = slice(first, first + len(in_portion))
                first += len(in_portion)
            portions.append(own)
            responses.append(TraceResponses.joined(own_responses))
            if not responses[-1].measured_S.any():
                refuse_unmeasured([trace], 0, 0)
        pairings = [pair_up(responses[0], other) for other in responses[1:]]
        compared = compared_rows(responses, pairings)
        partners = partner_rows(responses, pairings, compared)
        return cls(pair, reader.traces, portions, rows, responses, pairings, compared, partners)

    def measuring_pass(self, portion: Portion) -> _MeasuringPass:
        """The pass that measures the compared responses of a portion of any trace."""
        rows = self.rows[portion]
        partners = []
        for other, partner_S in self.partners[portion.trace].items():
            partners.append(Partners.of(self.traces[other], partner_S).of_some(rows))
        return _MeasuringPass(
            self.pair,
            self.compared[portion.trace][rows],
            self.responses[portion.trace].prompt_S[rows],
            CommonTokenMask(self.pair, tuple(partners)),
        )

    def measured_traces(self, summaries: Sequence[MismatchSummary]) -> list[MeasuredTrace]:
        """The traces with the summaries of their compared responses.

        Raises a `MismatchError` if no token of a trace is compared.
        """
        for trace, summary in zip(self.traces, summaries, strict=True):
            if not summary.exact.counts.tokens:
                raise MismatchError(
                    f"No token of {trace.folder} can be compared: in it, or in a trace with the "
                    "same responses, each is masked or lacks a log-probability of one side."
                )
        runs = run_names([trace.run_folder for trace in self.traces])
        # There are more letters than traces.
        columns = zip(
            NAMES, runs, self.traces, self.responses, self.compared, summaries, strict=False
        )
        return list(starmap(MeasuredTrace, columns))

    def passes_over_shared(
        self, pairing: Pairing, other: Trace
    ) -> Callable[[Portion], PartnerPass]:
        """The passes over portions of the first trace that compare its tokens with another's."""
        partners = Partners.of(other, np.where(self.compared[0], pairing.partner_S, -1))
        prompt_S = self.responses[0].prompt_S

        def pass_over(portion: Portion) -> PartnerPass:
            rows = self.rows[portion]
            return PartnerPass(self.pair, prompt_S[rows], partners.of_some(rows))

        return pass_over


@dataclass(frozen=True)
class _MeasuringPass:
    """The pass that makes the summary of the compared responses, with prompts identified by
    their tokens.
    """

    pair: Pair
    compared_S: np.ndarray  # of the portion
    prompt_S: np.ndarray
    on_common_tokens: CommonTokenMask
    columns: ClassVar[Sequence[str]] = COLUMNS

    def begin(self, _portion: Portion) -> MismatchSummary:
        return MismatchSummary(self.pair)

    def read(self, summary: MismatchSummary, _portion: Portion, groups: Iterator[RowGroup]) -> None:
        first = 0
        for group in groups:
            rows = np.flatnonzero(self.compared_S[first : first + group.table.num_rows])
            if len(rows):
                batch = self.on_common_tokens(take_rows(group, rows), first + rows)
                summary.update(replace(batch, prompt_id_S=self.prompt_S[first + rows]))
            first += group.table.num_rows


def _common_pair(traces: Sequence[Trace], pair_name: str | None) -> Pair:
    """The requested pair, else the first that every trace has: the gap at equal weights before
    the total one.
    """
    for trace in traces:
        trace.require_ids("compare pairs responses by")
    pairs_by_trace = list(map(_pairs_in, traces))
    if pair_name is None:
        common = set.intersection(*pairs_by_trace)
        for name in ("mismatch", "total"):
            if name in common:
                return PAIRS[name]
        # Every scored trace has the total pair.
        unscored = traces[pairs_by_trace.index(set())]
        raise MismatchError(
            f"{unscored.folder} was not scored by a trainer. {unscored.how_to_score}"
        )
    for trace, names in zip(traces, pairs_by_trace, strict=True):
        if pair_name not in names:
            raise UsageError(
                f"{trace.folder} has no {pair_name} pair. It has: "
                f"{', '.join(sorted(names)) or 'none (not scored)'}."
            )
    return PAIRS[pair_name]


def _pairs_in(trace: Trace) -> set[str]:
    columns = trace.columns()
    if "logp_trainer" not in columns:
        return set()
    names = {"total", *pairs_in([trace])}
    if "logp_trainer_repeat" in columns:
        names.add("floor")
    return names


def run_names(folders: Sequence[Path]) -> list[str]:
    """Each folder's last name, with as many parents as distinguish them; a letter if none do."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    # One folder was named twice
    return [f"{part[-1]} ({letter})" for letter, part in zip(NAMES, parts, strict=False)]


def _trace_result(measured: MeasuredTrace) -> ComparedTrace:
    return ComparedTrace(
        name=measured.name,
        run=measured.run,
        folder=shorten_paths(str(measured.trace.folder)),
        about=measured.about,
        responses=len(measured.responses),
        compared_responses=measured.num_compared,
        prompts=len(np.unique(measured.responses.prompt_S)),
        summary=measured.result,
    )


def _difference_result(
    analysis: ComparisonAnalysis, comparison: TraceComparison
) -> TraceDifference:
    metrics = comparison.differences
    pairing = comparison.pairing
    answers = {key: difference.more_than_noise for key, difference in metrics.items()}
    tested, more_than_noise = _count_answers(answers)
    return TraceDifference(
        trace=comparison.other.name,
        against=analysis.first.name,
        pairing=pairing.by,
        shared_responses=pairing.shared_responses,
        shared_prompts=len(pairing.shared_prompts),
        tested=tested,
        more_than_noise=more_than_noise,
        expected_by_chance=CHANCE * tested,
        differs=_what_differs(answers),
        metrics=metrics,
        on_tokens=comparison.on_tokens.result() if comparison.on_tokens else None,
        settings=list(map(_shorten_values, analysis.settings_of(comparison))),
    )


def _what_differs(answers: Mapping[str, bool | None]) -> Differs:
    """`gap` if its mean differs by more than noise; `metrics` if more metrics do than in 19 of 20
    comparisons of equal traces, were metrics independent; else `noise`, or `untested` if nothing
    has an interval.
    """
    tested, more_than_noise = _count_answers(answers)
    if any(answers.get(key) for key in GAP):
        return "gap"
    if not tested:
        return "untested"
    if more_than_noise and _chance_of(more_than_noise, tested) < CHANCE:
        return "metrics"
    return "noise"


def _count_answers(answers: Mapping[str, bool | None]) -> tuple[int, int]:
    """How many metrics have an interval of their difference, and how many differ by more than
    noise.
    """
    by_answer = Counter(answers.values())
    return by_answer[True] + by_answer[False], by_answer[True]


def _chance_of(marked: int, tested: int) -> float:
    """The probability that so many tests or more differ by chance, a binomial tail."""
    return sum(
        comb(tested, k) * CHANCE**k * (1 - CHANCE) ** (tested - k)
        for k in range(marked, tested + 1)
    )


def _shorten_values(row: SettingDifference) -> SettingDifference:
    """The setting with values as they are shown."""
    first, other = shorten_apart(row.first, row.other)
    return replace(row, first=first, other=other)


_EVERY = 32  # bins of 0.1 % are finer than a picture shows


def exceedance(counts_Bx: np.ndarray) -> np.ndarray:
    """Edges of |d|, 3 % apart, and the share of tokens beyond each, from the histograms of d by
    bin of μ.
    """
    counts_x = D_BINS.fold(counts_Bx.sum(axis=0))
    at_least_x = counts_x[::-1].cumsum()[::-1]
    # Bin 0 has the gaps that count as 0. Beyond the largest gap there is nothing to draw.
    occupied = np.flatnonzero(at_least_x[1::_EVERY]) * _EVERY + 1
    edges = D_BINS.positive.edges[0][occupied]
    return np.stack([edges, at_least_x[occupied] / max(1, counts_x.sum())])
