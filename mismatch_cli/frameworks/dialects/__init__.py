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
from math import isfinite
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
    "UPDATE", "FrameworkMetric", "MetricReading", "MetricReadings", "dashboard", "lines",
    "logged_as", "metric_of",
    "named", "names",
    "readings", "when",
]  # fmt: skip


def names() -> list[str]:
    """The frameworks whose metrics are known."""
    return registry.names(DASHBOARDS)


def lines(framework: str) -> tuple[FrameworkMetric, ...]:
    """What a framework logs about the gap; a `UsageError` with the nearest names if it is
    unknown.
    """
    found: tuple[FrameworkMetric, ...] = registry.load(DASHBOARDS, framework, "framework").LINES
    return found


def when(framework: str) -> str:
    """When a framework logs its metrics, and on which tokens."""
    found: str = registry.load(DASHBOARDS, framework, "framework").WHEN
    return found


def metric_of(line: FrameworkMetric) -> str:
    """Our metric with the same definition; empty if there is none, or if the trainer is compared
    with itself.
    """
    return "" if line.pair == UPDATE else line.metric or _by_formula().get(line.formula, "")


@cache
def _by_formula() -> Mapping[str, str]:
    return {metric.formula: metric.key for metric in METRICS.values()}


@cache
def logged_as() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """For each of our metrics, the frameworks that log the same formula, with the name on their
    dashboards.
    """
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for framework in names():
        for line in lines(framework):
            if key := metric_of(line):
                found[key] = (*found.get(key, ()), (framework, line.name))
    return found


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
    """Lines that need the same columns, and the quantities they are made of."""

    pair: str
    needs: tuple[str, ...]
    lines: tuple[FrameworkMetric, ...]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        return tuple(dict.fromkeys(quantity for line in self.lines for quantity in line.quantities))

    @property
    def by_metric(self) -> bool:
        return any(line.metric for line in self.lines)


@cache
def _groups(frameworks: tuple[str, ...]) -> tuple[_Group, ...]:
    alike: dict[tuple[str, tuple[str, ...]], list[FrameworkMetric]] = {}
    for line in chain.from_iterable(map(lines, frameworks)):
        if line.lacks:
            continue
        alike.setdefault((line.pair, line.needs), []).append(line)
    return tuple(_Group(pair, needs, tuple(found)) for (pair, needs), found in alike.items())


class _GroupState(Accumulator):
    """The accumulated state of a group of lines."""

    def __init__(self, group: _Group) -> None:
        self.totals_M = np.zeros(len(COLUMNS))
        self.tokens = self.out_of_support = 0
        self.moments = [Moments() for _ in group.quantities]

    def update(self, batch: TokenBatch, group: _Group) -> None:
        if not PAIRS[group.pair].measured_in(batch) or any(
            getattr(batch, name) is None for name in group.needs
        ):
            return
        columns = [name for name in group.needs if name.endswith("_T")]
        for gaps in token_gaps(batch, PAIRS[group.pair], required=columns):
            self.tokens += len(gaps.logq_N)
            if gaps.out_of_support_N is not None:
                self.out_of_support += int(gaps.out_of_support_N.sum())
            if group.by_metric:
                self.totals_M += token_sums(gaps).sum(axis=0)
            for quantity, moments in zip(group.quantities, self.moments, strict=True):
                moments.update(quantity(gaps))

    def value(self, line: FrameworkMetric, group: _Group) -> float:
        if line.metric:
            return float(evaluate(self.totals_M)[line.metric])
        place = {quantity: number for number, quantity in enumerate(group.quantities)}
        moments = [self.moments[place[quantity]] for quantity in line.quantities]
        if all(moment.count for moment in moments):
            return line.reduce(*moments)
        return line.of_nothing if self.tokens else float("nan")


class _Everything(Accumulator):
    """The accumulated state of every group."""

    def __init__(self, frameworks: tuple[str, ...]) -> None:
        self.seen = [_GroupState(group) for group in _groups(frameworks)]

    def update(self, batch: TokenBatch, frameworks: tuple[str, ...]) -> None:
        for seen, group in zip(self.seen, _groups(frameworks), strict=True):
            seen.update(batch, group)


@dataclass(frozen=True)
class _Translating:
    """The pass, which identifies lines by their frameworks."""

    frameworks: tuple[str, ...]

    @property
    def columns(self) -> Sequence[str]:
        """Those that lines need; and advantages, by which some leave out responses."""
        needs = {need for group in _groups(self.frameworks) for need in group.needs}
        named = sorted(need.rpartition("_")[0] for need in needs)
        return [*dict.fromkeys([*PAIR_COLUMNS, "advantage", *named])]

    def begin(self, _portion: Portion) -> _Everything:
        return _Everything(self.frameworks)

    def read(self, found: _Everything, _portion: Portion, row_groups: Iterator[RowGroup]) -> None:
        for row_group in row_groups:
            found.update(row_group.batch, self.frameworks)


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
    # Looking up names must not import the readers
    from mismatch_cli.processes.workers.reading import run_pass

    found = run_pass(traces, _Translating(tuple(frameworks)), workers, on_responses)
    return MetricReadings(
        _by_framework(found, tuple(frameworks)),
        max((part.out_of_support for part in found.seen), default=0),
    )


def dashboard(batch: TokenBatch, framework: str) -> dict[str, float]:
    """What a framework would show for these tokens: every line with a value, by name."""
    found = _Everything((framework,))
    found.update(batch, (framework,))
    return named(_by_framework(found, (framework,))[framework])


def named(found: Sequence[MetricReading]) -> dict[str, float]:
    """The readings that have a value, by name."""
    return {reading.line.name: reading.value for reading in found if reading.value is not None}


def _by_framework(
    found: _Everything, frameworks: tuple[str, ...]
) -> dict[str, list[MetricReading]]:
    groups = _groups(frameworks)
    seen = {
        (group.pair, group.needs): (group, part)
        for group, part in zip(groups, found.seen, strict=True)
    }
    return {
        name: [_reading(line, seen.get((line.pair, line.needs))) for line in lines(name)]
        for name in frameworks
    }


def _reading(line: FrameworkMetric, found: tuple[_Group, _GroupState] | None) -> MetricReading:
    if line.lacks or found is None:
        return MetricReading(line, None, f"not measured: needs {line.lacks}")
    group, seen = found
    value = seen.value(line, group)
    if isfinite(value):
        return MetricReading(line, value)
    if value == float("inf"):
        return MetricReading(line, None, OVERFLOW)
    if seen.tokens:
        # Seen, but none of them is trained on
        no_advantage = any(map(leaves_out_untrained, line.quantities))
        return MetricReading(line, None, _NO_ADVANTAGE if no_advantage else _NOT_DEFINED)
    columns = [f"logp_{policy}" for policy in COMPARES[line.pair]] + [
        name.rpartition("_")[0] for name in line.needs
    ]
    return MetricReading(line, None, f"not measured: needs {' and '.join(columns)}")
