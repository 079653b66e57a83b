"""One pass over traces: the summary of every pair of policies, and the samples that plots and
tables need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import exp, inf
from typing import Any, ClassVar, TypeVar

import numpy as np

from mismatch_cli.limits.assess import LEADING, Assessment, assess
from mismatch_cli.limits.expected import Expected, expected_gap
from mismatch_cli.limits.manifest_sides import temperatures_of
from mismatch_cli.limits.suspects import Suspect, suspects
from mismatch_cli.metrics.accumulator import Accumulator, columns_read
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.metrics.lattice import Lattice, LatticeLine
from mismatch_cli.metrics.own_scale import OwnScale
from mismatch_cli.metrics.pair_summary import MetricEstimate, Noise, PairSummary
from mismatch_cli.metrics.pairs import PAIRS, Pair, pairs_in
from mismatch_cli.metrics.retained_rows import (
    RetainedResponse,
    RetainedToken,
    ScatterSample,
    WorstRows,
    WorstTokens,
)
from mismatch_cli.metrics.route_flips import RouteFlips, RoutingSummary
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.processes.workers.portions import Portion
from mismatch_cli.processes.workers.reading import run_pass
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.algorithm_support import Support
from mismatch_cli.studies.clipping import collect_first_pass
from mismatch_cli.studies.exploration.explore import explore
from mismatch_cli.studies.exploration.explored import Exploration
from mismatch_cli.studies.study import (
    FINISH_UNKNOWN,
    Study,
    check_poolable,
    folders_of,
    name_of,
    subject_of,
)
from mismatch_cli.studies.unusable import refuse_unmeasured
from mismatch_cli.trace.origin import About, Imported
from mismatch_cli.trace.reader import RowGroup, Trace

COLUMNS = columns_read(MismatchSummary, RouteFlips)
WORST = 10  # tokens and responses that a page shows
_FEW_NOISE_TOKENS = 2000  # with fewer, the noise itself is only known within a factor
_NONE = np.zeros(0, dtype=np.float32)
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class PlotData:
    """`_N` are the tokens of the sample, `_S` its responses; log-probabilities in nats.

    The reference policy takes the role of μ, the current one that of π: `logq_N` and `logp_N`.
    """

    STUDY: ClassVar[str] = "mismatch"

    summary: PairSummary
    # What is compared, in one line below each figure, so that a copied picture explains itself
    subject: str = ""
    logq_N: np.ndarray = field(default_factory=lambda: _NONE)
    # -inf: outside the current policy's support
    logp_N: np.ndarray = field(default_factory=lambda: _NONE)
    tv_topk_N: np.ndarray | None = None  # NaN: not measured
    length_S: np.ndarray = field(default_factory=lambda: _NONE)  # tokens
    sequence_d_S: np.ndarray = field(default_factory=lambda: _NONE)  # Σ (log π − log μ), nats
    lattice_steps: tuple[float, ...] = ()  # the logit rounding steps δ that the data shows, in nats
    routing: RoutingSummary | None = None  # of a mixture of experts

    @classmethod
    def of(
        cls,
        summary: PairSummary,
        sample: Mapping[str, Mapping[str, Sequence[float]]],
        lattice_steps: Iterable[float] = (),
        subject: str = "",
    ) -> PlotData:
        """Make plot data from the results of `MismatchSummary`, `ScatterSample` and `Lattice`."""
        tokens, responses = sample["tokens"], sample["responses"]
        tv_topk_N = np.asarray(tokens["tv_topk"], dtype=np.float32)
        has_topk = not np.isnan(tv_topk_N).all()
        return cls(
            summary=summary,
            subject=subject,
            logq_N=np.asarray(tokens["logp_reference"], dtype=np.float32),
            logp_N=np.asarray(tokens["logp_current"], dtype=np.float32),
            tv_topk_N=tv_topk_N if has_topk else None,
            length_S=np.asarray(responses["length"], dtype=np.int64),
            sequence_d_S=np.asarray(responses["d_sum"], dtype=np.float64),
            lattice_steps=tuple(lattice_steps),
        )

    @property
    def by_trace(self) -> dict[str, PairSummary]:
        """The summary under the name of its only trace."""
        return {"": self.summary}

    def metric(self, key: str) -> Estimate:
        """A metric of the summary; without a value where it is missing."""
        return self.summary.metrics.get(key) or Estimate(None)


@dataclass(frozen=True, kw_only=True)
class MismatchResult:
    """What docs/json/summary.md describes; the first pair is the one that a report is about."""

    traces: Sequence[str]
    about: About
    pairs: Mapping[str, PairSummary]
    floor: PairSummary | None  # the trainer against itself
    routing: RoutingSummary | None
    lattice: Sequence[LatticeLine]
    expected: Expected
    worst: WorstRows
    verdict: Assessment
    suspects: Sequence[Suspect]

    @property
    def main(self) -> PairSummary:
        return next(iter(self.pairs.values()))

    @property
    def total(self) -> PairSummary | None:
        """The pair with staleness, if there is one."""
        return self.pairs.get("total")


@dataclass
class MismatchAnalysis(Study):
    """Summaries by pair name, the noise, and samples of the first pair."""

    STUDY, FORMAT = "mismatch", "mismatch-cli summary"

    traces: Sequence[Trace]
    pairs: dict[str, MismatchSummary]
    worst: list[WorstTokens]  # one per trace: keys are unique within a trace only
    floor: MismatchSummary
    scatter: ScatterSample
    lattice: Lattice
    scale: OwnScale
    routing: RouteFlips
    unscored_responses: int

    @property
    def manifest(self) -> dict[str, Any]:
        return self.traces[0].manifest

    @property
    def main_pair(self) -> Pair:
        """The pair of plots and worst tokens: the first one."""
        return PAIRS[next(iter(self.pairs))]

    @cached_property
    def result(self) -> MismatchResult:
        """What `--json` prints and `summary.json` holds; documented in docs/json/summary.md."""
        about = About.of(self.traces, self.unscored_responses)
        floor = None
        if self.floor.exact.counts.tokens:
            floor = self.floor.result()
        pairs = {}
        for name, summary in self.pairs.items():
            pairs[name] = without_unknown(_with_noise(summary.result(), floor), about.source)
        main = pairs[self.main_pair.name]
        expected = self._expected(main.metrics[LEADING].value)
        verdict = assess(
            {name: pair.metrics for name, pair in pairs.items()},
            about.manifest,
            tokens=main.counts.tokens,
            floor=floor.metrics if floor else None,
            expected=expected,
        )
        return MismatchResult(
            traces=folders_of(self.traces),
            about=about,
            pairs=pairs,
            floor=floor,
            routing=self._routing,
            lattice=self.lattice.result(),
            expected=expected,
            worst=_worst_of_all(self.worst),
            verdict=verdict,
            suspects=self._suspects,
        )

    def _expected(self, gap: float | None) -> Expected:
        """The gap of the first pair that the traces would have without a fault, nats."""
        return expected_gap(self.manifest, self.scale, self.lattice.result(), gap=gap)

    @property
    def explored_responses(self) -> int:
        return sum(trace.num_responses for trace in self.traces if trace.has_ids)

    def exploration(
        self, on_responses: Callable[[int], None] = lambda _: None
    ) -> Exploration | None:
        """The tokens of a page, and which of all tokens two algorithms would block."""
        support = Support.of_paper(self.traces)
        explore_tokens = partial(explore, self.traces, self.main_pair, on_responses=on_responses)
        if support is None:  # no algorithm can judge the trace, but it still has tokens
            return explore_tokens((), Needs(False, False, 0), {})
        batch_values = collect_first_pass(self.traces, support)
        return explore_tokens(support.judged, support.needs, batch_values, support.judged)

    @property
    def _routing(self) -> RoutingSummary | None:
        """Where trainer and engine chose different experts; None for a dense model, or if it was
        not recorded.
        """
        side = self.manifest.get("recomputed") or self.manifest.get("trainer") or {}
        return self.routing.result(self.pairs[self.main_pair.name].exact.prompts.result(), side)

    @property
    def _suspects(self) -> tuple[Suspect, ...]:
        """Settings of the first trace that are known to cause gaps; several traces share them."""
        return suspects(self.manifest, str(name_of(self.traces[0])), self.main_pair.name)

    @cached_property
    def plot_data(self) -> PlotData:
        """What the plots draw: the first pair of a summary, and its samples."""
        pair = self.result.main
        data = PlotData.of(
            pair,
            self.scatter.result(),
            [line.spacing for line in self.result.lattice],
            subject_of(self.manifest, pair.counts.tokens),
        )
        return replace(data, routing=self.result.routing)


class Measurement(Accumulator):
    """What is kept of the tokens of some traces: summaries by pair name, the noise, samples,
    worst tokens.
    """

    def __init__(self, pairs: Sequence[str], temperatures: tuple[float, float]) -> None:
        """`temperatures`: of the rollout and of the trainer."""
        self.pairs = {name: MismatchSummary(PAIRS[name]) for name in pairs}
        self.floor = MismatchSummary(PAIRS["floor"])
        self.scatter = ScatterSample()
        self.lattice = Lattice()
        self.routing = RouteFlips()
        self.scale = OwnScale(PAIRS[pairs[0]], temperatures)
        self.worst: dict[int, WorstTokens] = {}  # by the number of the trace
        self.unscored_responses = 0

    def update(self, batch: TokenBatch, worst: WorstTokens) -> None:
        """Add a batch; samples and worst tokens are those of the first pair."""
        main, *others = self.pairs.values()
        if not any(summary.pair.measured_in(batch) for summary in self.pairs.values()):
            self.unscored_responses += batch.num_responses
            return
        # The first pair computes the gap of a token once, for itself and all that come with it.
        main.update(batch, self.scatter, worst, self.lattice, self.routing, self.scale)
        for summary in [*others, self.floor]:
            summary.update(batch)


@dataclass(frozen=True)
class _MismatchPass:
    """The pass that measures each portion."""

    pairs: tuple[str, ...]
    worst: int
    temperatures: tuple[float, float]
    columns: ClassVar[Sequence[str]] = COLUMNS

    def begin(self, portion: Portion) -> Measurement:
        measurement = Measurement(self.pairs, self.temperatures)
        measurement.worst[portion.trace] = WorstTokens(self.worst)
        return measurement

    def read(self, measurement: Measurement, portion: Portion, groups: Iterator[RowGroup]) -> None:
        for group in groups:
            measurement.update(group.batch, measurement.worst[portion.trace])
            measurement.routing.update_responses(group.table, group.batch.prompt_id_S)


def analyse_mismatch(
    traces: Sequence[Trace],
    worst: int = WORST,
    workers: Workers = ALONE,
    on_responses: Callable[[int], None] = lambda _: None,
) -> MismatchAnalysis:
    """Read traces once, in bounded memory, and keep the `worst` worst tokens; several traces are
    pooled.
    """
    check_poolable(traces)
    measure = _MismatchPass(tuple(pairs_in(traces)), worst, temperatures_of(traces[0].manifest))
    measurement = run_pass(traces, measure, workers, on_responses)
    measured = not_measured = masked = others = 0
    for summary in measurement.pairs.values():
        counts = summary.exact.counts
        measured = max(measured, counts.tokens - counts.out_of_support)
        not_measured = max(not_measured, counts.not_measured)
        masked = max(masked, counts.masked)
        others = max(others, counts.tokens + counts.not_measured)
    refuse_unmeasured(traces, measured, not_measured, all_masked=masked > 0 == others)
    return MismatchAnalysis(
        traces,
        measurement.pairs,
        [measurement.worst[number] for number in range(len(traces))],
        measurement.floor,
        measurement.scatter,
        measurement.lattice,
        measurement.scale,
        measurement.routing,
        measurement.unscored_responses,
    )


def _worst_of_all(by_trace: Sequence[WorstTokens]) -> WorstRows:
    """The worst tokens and responses of all traces, from those of each."""
    most = by_trace[0].responses.capacity
    abs_d: list[RetainedToken] = []
    abs_dp: list[RetainedToken] = []
    responses: list[RetainedResponse] = []
    for number, tokens in enumerate(by_trace):
        worst = tokens.result(number)
        abs_d += worst.abs_d
        abs_dp += worst.abs_dp
        responses += worst.responses
    return WorstRows(
        abs_d=_largest(abs_d, _abs_d, most),
        abs_dp=_largest(abs_dp, _abs_dp, most),
        responses=_largest(responses, _abs_sum, most),
    )


def _largest(rows: Iterable[_Row], badness: Callable[[_Row], float], most: int) -> list[_Row]:
    return sorted(rows, key=badness, reverse=True)[:most]


def _abs_d(token: RetainedToken) -> float:
    assert token.logp_current is not None  # out of support, it is only among the worst |Δp|
    return abs(token.logp_current - token.logp_reference)


def _abs_dp(token: RetainedToken) -> float:
    logp = -inf if token.logp_current is None else token.logp_current
    return abs(exp(logp) - exp(token.logp_reference))


def _abs_sum(response: RetainedResponse) -> float:
    return abs(response.d_sum)


def without_unknown(summary: PairSummary, source: Imported | None) -> PairSummary:
    """The summary without the share of truncated responses if the dump does not record it."""
    if source is None or not source.rows_with_unknown_finish:
        return summary
    unknown = MetricEstimate(None, note=FINISH_UNKNOWN)
    return replace(summary, metrics={**summary.metrics, "truncated_share": unknown})


def _with_noise(summary: PairSummary, floor: PairSummary | None) -> PairSummary:
    """Add to each gap metric its noise: the same metric of the trainer compared with itself."""
    if floor is None:
        return summary
    few_tokens = floor.counts.tokens < _FEW_NOISE_TOKENS
    metrics = dict(summary.metrics)
    for key, estimate in summary.metrics.items():
        if METRICS[key].agreement is not None:
            noise = _noise(METRICS[key], estimate, floor.metrics[key], as_range=few_tokens)
            metrics[key] = replace(estimate, noise=noise)
    return replace(summary, metrics=metrics)


def _noise(metric: Metric, estimate: Estimate, floor: Estimate, *, as_range: bool) -> Noise:
    """The noise of a metric, and how many times as large the metric is.

    A noise of few tokens is uncertain: the factor is then a range, by the ends of its interval.
    """
    noise = Noise(floor.value, metric.times_floor(estimate.value, floor.value))
    if as_range:
        ends = []
        for end in (floor.low, floor.high):
            factor = metric.times_floor(estimate.value, end)
            if isinstance(factor, float):
                ends.append(factor)
        if len(ends) == 2:
            return replace(noise, times_floor_range=sorted(ends))
    return noise
