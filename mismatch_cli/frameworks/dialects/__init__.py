"""The same tokens in other frameworks' metrics: their names, formulas and averages.

Each framework's `metrics.py` is one (`frameworks/nemo_rl/` is `nemo-rl`): `LINES` is what its
dashboard shows about the gap between rollout and trainer, and `WHEN` says when. Everything is
measured over all tokens of the traces at once; a dashboard shows the mean of such numbers over
micro-batches, ranks or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mismatch_cli.base import registry
from mismatch_cli.frameworks import DASHBOARDS
from mismatch_cli.frameworks.dialects._metric import (
    COMPARES,
    UPDATE,
    FrameworkMetric,
    Moments,
    Quantity,
    count_trained,
    leaves_out_untrained,
)
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import OVERFLOW
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import PAIR_COLUMNS, PAIRS
from mismatch_cli.metrics.sums import COLUMNS, evaluate, token_sums
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.rules.batch import TokenBatch

if TYPE_CHECKING:
    from mismatch_cli.processes.workers.portions import Portion
    from mismatch_cli.trace.reader import RowGroup, Trace

__all__ = [
    "UPDATE",
    "FrameworkMetric",
    "MetricReading",
    "MetricReadings",
    "dashboard",
    "lines",
    "logged_as",
    "metric_of",
    "names",
    "readings",
    "values_by_name",
    "when",
]


def names() -> list[str]:
    """The frameworks whose metrics are known."""
    return registry.names(DASHBOARDS)


def lines(framework: str) -> tuple[FrameworkMetric, ...]:
    """What a framework logs about the gap; a `UsageError` with the nearest names if it is
    unknown.
    """
    table: tuple[FrameworkMetric, ...] = registry.load(DASHBOARDS, framework, "framework").LINES
    return table


def when(framework: str) -> str:
    """When a framework logs its metrics, and on which tokens."""
    text: str = registry.load(DASHBOARDS, framework, "framework").WHEN
    return text


def metric_of(line: FrameworkMetric) -> str:
    """Our metric with the same definition; empty if there is none, or if the trainer is compared
    with itself.
    """
    if line.pair == UPDATE:
        return ""
    return line.metric or _keys_by_formula().get(line.formula, "")


@cache
def _keys_by_formula() -> Mapping[str, str]:
    return {metric.formula: metric.key for metric in METRICS.values()}


@cache
def logged_as() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """For each of our metrics, the frameworks that log the same formula, with the name on their
    dashboards.
    """
    loggers: dict[str, tuple[tuple[str, str], ...]] = {}
    for framework in names():
        for line in lines(framework):
            key = metric_of(line)
            if key:
                loggers[key] = (*loggers.get(key, ()), (framework, line.name))
    return loggers


_NOT_DEFINED = "not defined for these tokens: too few, or none that it applies to"
_NO_ADVANTAGE = (
    "it leaves out responses whose advantages are all 0, and here all are: every group of a "
    "prompt has equal rewards"
)


@dataclass(frozen=True)
class MetricReading:
    """A line with its value on these traces; `why` says why a value is missing."""

    line: FrameworkMetric
    value: float | None
    why: str = ""


class _Group(NamedTuple):
    """Lines of any framework that need the same columns, so they are computed together."""

    pair: str
    needs: tuple[str, ...]
    lines: tuple[FrameworkMetric, ...]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What the lines reduce, each once: lines share quantities, within and across
        frameworks.
        """
        quantities = chain.from_iterable(line.quantities for line in self.lines)
        return tuple(dict.fromkeys(quantities))

    @property
    def has_metrics(self) -> bool:
        """Whether a line is one of our own metrics."""
        return any(line.metric for line in self.lines)

    @property
    def leaves_out_untrained(self) -> bool:
        """Whether a line leaves out responses whose advantages are all 0."""
        return any(map(leaves_out_untrained, self.quantities))

    def measured_in(self, batch: TokenBatch) -> bool:
        """Whether a batch has every column that the lines need."""
        has_needs = all(getattr(batch, name) is not None for name in self.needs)
        return has_needs and PAIRS[self.pair].measured_in(batch)


@cache
def _groups(frameworks: tuple[str, ...]) -> tuple[_Group, ...]:
    """The measurable lines of frameworks, by the columns they need."""
    alike: dict[tuple[str, tuple[str, ...]], list[FrameworkMetric]] = {}
    for line in chain.from_iterable(map(lines, frameworks)):
        if not line.lacks:
            alike.setdefault((line.pair, line.needs), []).append(line)
    return tuple(_Group(*columns, tuple(group)) for columns, group in alike.items())


class _GroupState(Accumulator):
    """The accumulated state of a group of lines."""

    def __init__(self, group: _Group) -> None:
        self.totals_M = np.zeros(len(COLUMNS))  # for lines that are metrics of ours
        self.moments = [Moments() for _ in group.quantities]  # for the others
        self.tokens = self.out_of_support = 0
        self.trained = 0  # responses, counted where a line leaves out the others

    def update(self, batch: TokenBatch, group: _Group) -> None:
        if not group.measured_in(batch):
            return
        columns = [name for name in group.needs if name.endswith("_T")]
        for gaps in token_gaps(batch, PAIRS[group.pair], required=columns):
            self.tokens += len(gaps.logq_N)
            if gaps.out_of_support_N is not None:
                self.out_of_support += int(gaps.out_of_support_N.sum())
            if group.leaves_out_untrained:
                self.trained += count_trained(gaps)
            if group.has_metrics:
                self.totals_M += token_sums(gaps).sum(axis=0)
            for quantity, moments in zip(group.quantities, self.moments, strict=True):
                moments.update(quantity(gaps))

    def value(self, line: FrameworkMetric, group: _Group) -> float:
        if line.metric:
            return float(evaluate(self.totals_M)[line.metric])
        by_quantity = dict(zip(group.quantities, self.moments, strict=True))
        moments = [by_quantity[quantity] for quantity in line.quantities]
        if all(moment.count for moment in moments):
            return line.reduce(*moments)
        return line.of_nothing if self.tokens else nan


class _GroupStates(Accumulator):
    """The accumulated state of every group, in the order of `_groups`."""

    def __init__(self, frameworks: tuple[str, ...]) -> None:
        self.by_group = [_GroupState(group) for group in _groups(frameworks)]

    def update(self, batch: TokenBatch, frameworks: tuple[str, ...]) -> None:
        for state, group in zip(self.by_group, _groups(frameworks), strict=True):
            state.update(batch, group)


# Lines hold lambdas, which cannot be sent to a worker process.
# So the pass and its state know lines by the names of their frameworks.
@dataclass(frozen=True)
class _DialectPass:
    """A pass over traces for the lines of these frameworks, for `run_pass`."""

    frameworks: tuple[str, ...]

    @property
    def columns(self) -> Sequence[str]:
        """The columns of a trace that lines need; and advantages, by which some leave out
        responses.
        """
        needs = set[str]().union(*(group.needs for group in _groups(self.frameworks)))
        needed = sorted(map(_trace_column, needs))
        return [*dict.fromkeys([*PAIR_COLUMNS, "advantage", *needed])]

    def begin(self, _portion: Portion) -> _GroupStates:
        return _GroupStates(self.frameworks)

    def read(self, states: _GroupStates, _portion: Portion, row_groups: Iterator[RowGroup]) -> None:
        for row_group in row_groups:
            states.update(row_group.batch, self.frameworks)


def _trace_column(batch_column: str) -> str:
    """The column of a trace behind one of a batch, whose name ends in its shape."""
    return batch_column.rpartition("_")[0]


@dataclass(frozen=True)
class MetricReadings:
    """The readings of the requested frameworks, and how many tokens π excludes, which no metric
    of logs includes.
    """

    by_framework: Mapping[str, list[MetricReading]]
    out_of_support: int


def readings(
    traces: Sequence[Trace],
    frameworks: Sequence[str],
    workers: Workers = ALONE,
    on_responses: Callable[[int], None] = lambda _: None,
) -> MetricReadings:
    """Every line of the requested frameworks on the tokens of all traces, in one pass and
    bounded memory.
    """
    # Commands that only look up names must not import the readers of traces.
    from mismatch_cli.processes.workers.reading import run_pass

    requested = tuple(frameworks)
    states = run_pass(traces, _DialectPass(requested), workers, on_responses)
    # Groups count the same tokens, each by its own π: the largest count is reported, no sum.
    out_of_support = max((state.out_of_support for state in states.by_group), default=0)
    return MetricReadings(_by_framework(states, requested), out_of_support)


def dashboard(batch: TokenBatch, framework: str) -> dict[str, float]:
    """What a framework would show for these tokens: every line with a value, by name."""
    states = _GroupStates((framework,))
    states.update(batch, (framework,))
    return values_by_name(_by_framework(states, (framework,))[framework])


def values_by_name(readings: Sequence[MetricReading]) -> dict[str, float]:
    """The readings that have a value, by the names of their lines."""
    return {reading.line.name: reading.value for reading in readings if reading.value is not None}


def _by_framework(
    states: _GroupStates, frameworks: tuple[str, ...]
) -> dict[str, list[MetricReading]]:
    groups = zip(_groups(frameworks), states.by_group, strict=True)
    by_columns = {(group.pair, group.needs): (group, state) for group, state in groups}
    by_framework = {}
    for name in frameworks:
        by_framework[name] = [
            _reading(line, by_columns.get((line.pair, line.needs))) for line in lines(name)
        ]
    return by_framework


def _reading(line: FrameworkMetric, measured: tuple[_Group, _GroupState] | None) -> MetricReading:
    """A line's value from its group, or why it has none."""
    if line.lacks or measured is None:
        return MetricReading(line, None, f"not measured: needs {line.lacks}")
    group, state = measured
    value = state.value(line, group)
    if isfinite(value):
        return MetricReading(line, value)
    if value == inf:
        return MetricReading(line, None, OVERFLOW)
    if state.tokens:
        # There were tokens, but the line counts none of them.
        leaves_out = any(map(leaves_out_untrained, line.quantities))
        has_none = leaves_out and not state.trained
        return MetricReading(line, None, _NO_ADVANTAGE if has_none else _NOT_DEFINED)
    columns = [f"logp_{policy}" for policy in COMPARES[line.pair]]
    columns += map(_trace_column, line.needs)
    return MetricReading(line, None, f"not measured: needs {' and '.join(columns)}")
