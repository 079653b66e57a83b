"""What two or more traces have in common, the same metrics of each, and the difference from the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
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
from mismatch_cli.studies.exploration.two_runs import explore_two
from mismatch_cli.studies.mismatch import COLUMNS, without_unknown
from mismatch_cli.studies.pairing import (
    CommonTokenMask,
    Pairing,
    PartnerPass,
    Partners,
    RecognisedResponses,
    RecognitionPass,
    SharedTokens,
    TraceResponses,
    common_tokens,
    compared_rows,
    pair_up,
    take_rows,
)
from mismatch_cli.studies.settings_compared import NAMES, SettingDifference, settings_diff
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
    kept_S: np.ndarray  # bool, in the order of the trace's files
    summary: MismatchSummary

    @cached_property
    def result(self) -> PairSummary:
        """The summary as `report` shows it."""
        return without_unknown(self.summary.result(), self.about.source)

    @cached_property
    def about(self) -> About:
        return About.of([self.trace], int(np.count_nonzero(~self.responses.measured_S)))

    @property
    def measured(self) -> SummaryEstimates:
        """The summary with what its intervals are made of; what the report does not know is not
        compared either.
        """
        measured = SummaryEstimates(self.summary)
        for key, estimate in self.result.metrics.items():
            if estimate.value is None:
                measured.estimates[key] = Estimate(None, note=estimate.note)
        return measured


@dataclass(frozen=True)
class TraceComparison:
    """Another trace compared with the first one."""

    side: MeasuredTrace
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
    def sides(self) -> tuple[MeasuredTrace, ...]:
        return (self.first, *(comparison.side for comparison in self.others))

    @property
    def typed(self) -> tuple[Path, ...]:
        """Each trace's path, as you type it."""
        return tuple(name_of(side.trace) for side in self.sides)

    @cached_property
    def result(self) -> ComparisonResult:
        """What `compare --json` prints."""
        return ComparisonResult(
            arguments=self.arguments,
            pair=self.pair.name,
            traces=[_trace(side) for side in self.sides],
            comparisons=[_difference(self, comparison) for comparison in self.others],
        )

    def settings_of(self, comparison: TraceComparison) -> list[SettingDifference]:
        """The settings in which another trace differs from the first, likeliest causes first."""
        manifests = (side.trace.manifest for side in (self.first, comparison.side))
        return settings_diff(*manifests, at_equal_weights=self.pair.name == "mismatch")

    @property
    def explored_responses(self) -> int:
        paired = [comparison.pairing.by for comparison in self.others]
        explored = self.sides[:1] if paired == ["tokens"] else self.sides
        if paired not in (["tokens"], ["prompts"]):
            return 0
        return sum(int(np.count_nonzero(side.kept_S)) for side in explored)

    def exploration(
        self, on_responses: Callable[[int], None] = lambda _: None
    ) -> Exploration | None:
        """The tokens of two traces that are paired; None for others."""
        if len(self.others) > 1:
            return None
        (other,), sides = self.others, self.sides
        explored = explore_two(
            self.pair,
            [side.trace for side in sides],
            [side.responses for side in sides],
            [side.kept_S for side in sides],
            other.pairing,
            on_responses,
        )
        settings = (row for row in self.settings_of(other) if not row.harmless)
        names = tuple(side.run for side in sides)
        return explored and replace(
            explored,
            traces=names[: len(explored.traces)],
            runs=names,
            settings=tuple(_apart(row) for row in settings),
        )

    @cached_property
    def plot_data(self) -> ComparisonPlotData:
        """What the plots draw: the numbers of the JSON, and the distribution of |d| in each
        trace.
        """
        who = [f"{side.run}: {who_is_compared(side.trace.manifest)}" for side in self.sides]
        cells = [side.summary.exact.cells.d.total for side in self.sides]
        return ComparisonPlotData(
            self.result, " · ".join(who), tuple(exceedance(counts) for counts in cells)
        )


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

    Raises a `UsageError` if a trace lacks the pair, and a `MismatchError` if nothing was scored.
    """
    pair = _common_pair(traces, pair_name)
    with executor(workers, traces) as reader:
        recognised = reader.reduced(reader.portions, lambda _: RecognitionPass(pair), on_responses)
        found = _ResponsesByTrace.of(traces, reader.portions, recognised)
        pairings = [pair_up(found.responses[0], other) for other in found.responses[1:]]
        kept = compared_rows(found.responses, pairings)
        partners = common_tokens(found.responses, pairings, kept)
        measuring = partial(_measuring, pair, found, kept, partners, traces)
        summaries = [
            reader.reduced(portions, measuring, on_responses) for portions in found.portions
        ]
        runs = run_names([trace.run_folder for trace in traces])
        sides = [
            MeasuredTrace(*side)
            for side in zip(NAMES, runs, traces, found.responses, kept, summaries, strict=False)
        ]
        first, measured = sides[0], sides[0].measured
        others = []
        for side, pairing in zip(sides[1:], pairings, strict=True):
            on_tokens, same_tokens = None, pairing.by == "tokens"
            if same_tokens:
                on_tokens = _on_tokens(
                    reader, pair, found, np.where(first.kept_S, pairing.partner_S, -1), side.trace
                )
            found_differences = differences(measured, side.measured, same_tokens=same_tokens)
            others.append(TraceComparison(side, pairing, found_differences, on_tokens))
    return ComparisonAnalysis(pair, first, tuple(others), tuple(arguments))


@dataclass(frozen=True)
class _ResponsesByTrace:
    """The responses of each trace, and which of them are in each portion."""

    responses: list[TraceResponses]
    portions: list[list[Portion]]
    rows: dict[Portion, slice]

    @classmethod
    def of(
        cls, traces: Sequence[Trace], every: Sequence[Portion], recognised: RecognisedResponses
    ) -> _ResponsesByTrace:
        """Sort what was recognised by trace; raises a `MismatchError` for a trace without scored
        tokens.
        """
        responses: list[TraceResponses] = []
        portions: list[list[Portion]] = [[] for _ in traces]
        rows: dict[Portion, slice] = {}
        for portion in every:
            portions[portion.trace].append(portion)
        for number, trace in enumerate(traces):
            parts = [TraceResponses.joined(groups) for groups in recognised.responses[number]]
            responses.append(TraceResponses.joined(parts))
            if not responses[-1].measured_S.any():
                refuse_unmeasured([trace], 0, 0)
            ends = accumulate(map(len, parts))
            placed = zip(portions[number], parts, ends, strict=True)
            rows |= {portion: slice(end - len(part), end) for portion, part, end in placed}
        return cls(responses, portions, rows)


@dataclass(frozen=True)
class _ComparedPass:
    """The pass that makes the summary of the compared responses, with prompts identified by
    their tokens.
    """

    pair: Pair
    kept_S: np.ndarray  # of the portion
    prompt_S: np.ndarray
    on_common_tokens: CommonTokenMask
    columns: ClassVar[Sequence[str]] = COLUMNS

    def begin(self, _portion: Portion) -> MismatchSummary:
        return MismatchSummary(self.pair)

    def read(self, found: MismatchSummary, _portion: Portion, groups: Iterator[RowGroup]) -> None:
        first = 0
        for group in groups:
            rows = np.flatnonzero(self.kept_S[first : first + group.table.num_rows])
            if len(rows):
                batch = self.on_common_tokens(take_rows(group, rows), first + rows)
                found.update(replace(batch, prompt_id_S=self.prompt_S[first + rows]))
            first += group.table.num_rows


def _measuring(
    pair: Pair,
    found: _ResponsesByTrace,
    kept: Sequence[np.ndarray],
    partners: Sequence[Mapping[int, np.ndarray]],
    traces: Sequence[Trace],
    portion: Portion,
) -> _ComparedPass:
    rows = found.rows[portion]
    of_portion = tuple(
        Partners.of(traces[other], partner_S).of_some(rows)
        for other, partner_S in partners[portion.trace].items()
    )
    return _ComparedPass(
        pair,
        kept[portion.trace][rows],
        found.responses[portion.trace].prompt_S[rows],
        CommonTokenMask(pair, of_portion),
    )


def _on_tokens(
    reader: Executor, pair: Pair, found: _ResponsesByTrace, partner_S: np.ndarray, other: Trace
) -> SharedTokens:
    partners, prompt_S = Partners.of(other, partner_S), found.responses[0].prompt_S
    rows = found.rows
    return reader.reduced(
        found.portions[0], lambda p: PartnerPass(pair, prompt_S[rows[p]], partners.of_some(rows[p]))
    )


def _common_pair(traces: Sequence[Trace], asked: str | None) -> Pair:
    """The requested pair, else the first that every trace has: the gap at equal weights before
    the total one.
    """
    for trace in traces:
        trace.require_ids("compare pairs responses by")
    having = [_pairs_in(trace) for trace in traces]
    if asked is None:
        common = [name for name in ("mismatch", "total") if all(name in names for names in having)]
        if not common:
            lacking = next(
                t
                for t, names in zip(traces, having, strict=True)
                if not {"mismatch", "total"} & names
            )
            raise MismatchError(
                f"{lacking.folder} was not scored by a trainer. {lacking.how_to_score}"
            )
        return PAIRS[common[0]]
    for trace, names in zip(traces, having, strict=True):
        if asked not in names:
            raise UsageError(
                f"{trace.folder} has no {asked} pair. It has: "
                f"{', '.join(sorted(names)) or 'none (not scored)'}."
            )
    return PAIRS[asked]


def _pairs_in(trace: Trace) -> set[str]:
    columns = trace.columns()
    if "logp_trainer" not in columns:
        return set()
    return {"total", *pairs_in([trace])} | (
        {"floor"} if "logp_trainer_repeat" in columns else set()
    )


def run_names(folders: Sequence[Path]) -> list[str]:
    """Each folder's last name, with as many parents as distinguish them; a letter if none do."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{part[-1]} ({letter})" for letter, part in zip(NAMES, parts, strict=False)]


def _trace(side: MeasuredTrace) -> ComparedTrace:
    return ComparedTrace(
        name=side.name,
        run=side.run,
        folder=shorten_paths(str(side.trace.folder)),
        about=side.about,
        responses=len(side.responses),
        compared_responses=int(np.count_nonzero(side.kept_S)),
        prompts=len(np.unique(side.responses.prompt_S)),
        summary=side.result,
    )


def _difference(analysis: ComparisonAnalysis, comparison: TraceComparison) -> TraceDifference:
    metrics, pairing = comparison.differences, comparison.pairing
    answers = {key: difference.more_than_noise for key, difference in metrics.items()}
    tested = sum(answer is not None for answer in answers.values())
    return TraceDifference(
        trace=comparison.side.name,
        against=analysis.first.name,
        pairing=pairing.by,
        shared_responses=pairing.shared_responses,
        shared_prompts=len(pairing.shared_prompts),
        tested=tested,
        more_than_noise=sum(answer is True for answer in answers.values()),
        expected_by_chance=CHANCE * tested,
        differs=_what_differs(answers),
        metrics=metrics,
        on_tokens=comparison.on_tokens.result() if comparison.on_tokens else None,
        settings=[_apart(row) for row in analysis.settings_of(comparison)],
    )


def _what_differs(answers: Mapping[str, bool | None]) -> Differs:
    """`gap` if its mean differs by more than noise; `metrics` if more metrics do than in 19 of 20
    comparisons of equal traces, were metrics independent; else `noise`, or `untested` if nothing
    has an interval.
    """
    marked = sum(answer is True for answer in answers.values())
    tested = sum(answer is not None for answer in answers.values())
    if any(answers.get(key) for key in GAP):
        return "gap"
    at_least = sum(
        comb(tested, k) * CHANCE**k * (1 - CHANCE) ** (tested - k)
        for k in range(marked, tested + 1)
    )
    return "metrics" if marked and at_least < CHANCE else "noise" if tested else "untested"


def _apart(row: SettingDifference) -> SettingDifference:
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
    occupied = np.flatnonzero(at_least_x[1::_EVERY]) * _EVERY + 1  # bin 0 counts as 0
    return np.stack(
        [D_BINS.positive.edges[0][occupied], at_least_x[occupied] / max(1, counts_x.sum())]
    )
