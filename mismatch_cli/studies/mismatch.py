"""One pass over traces: the summary of every pair of policies, and the samples that plots and
tables need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from math import exp, inf
from typing import Any, ClassVar, TypeVar

import numpy as np

from mismatch_cli.base.places import shorten_paths
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
    name_of,
    subject_of,
)
from mismatch_cli.studies.unusable import refuse_unmeasured
from mismatch_cli.trace.origin import About, Imported
from mismatch_cli.trace.reader import RowGroup, Trace

COLUMNS = columns_read(MismatchSummary, RouteFlips)
WORST = 10  # tokens and responses that a page shows
_NONE = np.zeros(0, dtype=np.float32)


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
        return cls(
            summary=summary,
            subject=subject,
            logq_N=np.asarray(tokens["logp_reference"], dtype=np.float32),
            logp_N=np.asarray(tokens["logp_current"], dtype=np.float32),
            tv_topk_N=None if np.isnan(tv_topk_N).all() else tv_topk_N,
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
        floor = self.floor.result() if self.floor.exact.counts.tokens else None
        pairs = {
            name: without_unknown(_with_noise(summary.result(), floor), about.source)
            for name, summary in self.pairs.items()
        }
        main = next(iter(pairs.values()))
        expected = self._expected(main.metrics[LEADING].value)
        return MismatchResult(
            traces=shorten_paths([str(trace.folder) for trace in self.traces]),
            about=about,
            pairs=pairs,
            floor=floor,
            routing=self._routing,
            lattice=self.lattice.result(),
            expected=expected,
            worst=_worst(self.worst),
            verdict=assess(
                {name: pair.metrics for name, pair in pairs.items()},
                about.manifest,
                tokens=main.counts.tokens,
                floor=floor.metrics if floor else None,
                expected=expected,
            ),
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
        explored = partial(explore, self.traces, self.main_pair, on_responses=on_responses)
        if support is None:  # no algorithm can judge the trace, but it still has tokens
            return explored((), Needs(False, False, 0), {})
        passed = collect_first_pass(self.traces, support)
        return explored(support.judged, support.needs, passed, support.judged)

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
        self.scatter, self.lattice, self.routing = ScatterSample(), Lattice(), RouteFlips()
        self.scale = OwnScale(PAIRS[pairs[0]], temperatures)
        self.worst: dict[int, WorstTokens] = {}  # by the number of the trace
        self.unscored_responses = 0

    def update(self, batch: TokenBatch, worst: WorstTokens) -> None:
        """Add a batch; samples and worst tokens are those of the first pair."""
        main, *others = self.pairs.values()
        if not any(summary.pair.measured_in(batch) for summary in self.pairs.values()):
            self.unscored_responses += batch.num_responses
            return
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
        found = Measurement(self.pairs, self.temperatures)
        found.worst[portion.trace] = WorstTokens(self.worst)
        return found

    def read(self, found: Measurement, portion: Portion, groups: Iterator[RowGroup]) -> None:
        for group in groups:
            found.update(group.batch, found.worst[portion.trace])
            found.routing.update_responses(group.table, group.batch.prompt_id_S)


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
    asked = _MismatchPass(tuple(pairs_in(traces)), worst, temperatures_of(traces[0].manifest))
    found = run_pass(traces, asked, workers, on_responses)
    counts = [summary.exact.counts for summary in found.pairs.values()]
    refuse_unmeasured(
        traces,
        max((count.tokens - count.out_of_support for count in counts), default=0),
        max((count.not_measured for count in counts), default=0),
    )
    return MismatchAnalysis(
        traces,
        found.pairs,
        [found.worst[number] for number in range(len(traces))],
        found.floor,
        found.scatter,
        found.lattice,
        found.scale,
        found.routing,
        found.unscored_responses,
    )


def _worst(kept: Sequence[WorstTokens]) -> WorstRows:
    """The worst of all traces."""
    by_trace = [worst.result(number) for number, worst in enumerate(kept)]
    most = kept[0].responses.capacity
    return WorstRows(
        abs_d=_first(chain.from_iterable(worst.abs_d for worst in by_trace), _abs_d, most),
        abs_dp=_first(chain.from_iterable(worst.abs_dp for worst in by_trace), _abs_dp, most),
        responses=_first(chain.from_iterable(w.responses for w in by_trace), _abs_sum, most),
    )


def _first(rows: Iterable[_Row], badness: Callable[[_Row], float], most: int) -> list[_Row]:
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
    few = floor.counts.tokens < _FEW_NOISE_TOKENS
    metrics = dict(summary.metrics)
    for key, estimate in summary.metrics.items():
        if METRICS[key].agreement is not None:
            noise = _noise(METRICS[key], estimate, floor.metrics[key], few=few)
            metrics[key] = replace(estimate, noise=noise)
    return replace(summary, metrics=metrics)


def _noise(metric: Metric, estimate: Estimate, floor: Estimate, *, few: bool) -> Noise:
    """A factor above a noise of few tokens is a range: above the ends of the noise's interval."""
    noise = Noise(floor.value, metric.times_floor(estimate.value, floor.value))
    factors = [metric.times_floor(estimate.value, end) for end in (floor.low, floor.high)]
    ends = sorted(factor for factor in factors if isinstance(factor, float))
    return replace(noise, times_floor_range=ends) if few and len(ends) == 2 else noise


_Row = TypeVar("_Row")
_FEW_NOISE_TOKENS = 2000  # with fewer, the noise itself is only known within a factor
