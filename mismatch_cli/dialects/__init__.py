"""The same tokens in the words of other frameworks: their metric names, their formulas, their averages.

A file is a framework, and its name the public name (`nemo_rl.py` is `nemo-rl`): `LINES`, what its dashboard shows about
the gap between rollout and trainer, and `WHEN`, when it does. Everything is measured over all tokens of the traces at
once; a dashboard shows the mean over micro-batches, ranks or steps of such numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli import registry
from mismatch_cli.batch import TokenBatch
from mismatch_cli.dialects._line import COMPARES, UPDATE, Line, Moments, Quantity
from mismatch_cli.metrics.estimate import OVERFLOW
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.sums import COLUMNS, evaluate, token_sums

if TYPE_CHECKING:
    from mismatch_cli.trace.reader import Trace

__all__ = ["UPDATE", "Line", "Reading", "Readings", "lines", "logged_as", "metric_of", "names", "readings", "when"]


def names() -> list[str]:
    """The frameworks whose words are known."""
    return registry.names(__name__)


def lines(framework: str) -> tuple[Line, ...]:
    """What a framework logs about the gap; a `UsageError` names the nearest where it is not known."""
    found: tuple[Line, ...] = registry.load(__name__, framework, "framework").LINES
    return found


def when(framework: str) -> str:
    """When a framework logs these, and on what."""
    found: str = registry.load(__name__, framework, "framework").WHEN
    return found


def metric_of(line: Line) -> str:
    """Our metric that has the same definition; empty where there is none, or the trainer is compared with itself."""
    return "" if line.pair == UPDATE else line.metric or _by_formula().get(line.formula, "")


@cache
def _by_formula() -> Mapping[str, str]:
    return {metric.formula: metric.key for metric in METRICS.values()}


@cache
def logged_as() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """For each metric of ours that frameworks log by the same formula: framework, and name on its dashboard."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for framework in names():
        for line in lines(framework):
            if key := metric_of(line):
                found[key] = (*found.get(key, ()), (framework, line.name))
    return found


_VERSIONS = ("version_rollout", "version_trainer")  # where they are equal, log π is served as recomputed too
_READ = ("loss_mask", "logp_trainer", "logp_recomputed", "advantage", "entropy_trainer", *_VERSIONS)


@dataclass(frozen=True)
class Reading:
    """A line with its value on these traces; `why` says why there is none."""

    line: Line
    value: float | None
    why: str = ""


@dataclass
class _Seen:
    """What was accumulated of one pair, for lines that need the same columns."""

    lines: list[Line] = field(default_factory=list)
    moments: dict[Quantity, Moments] = field(default_factory=dict)
    totals_M: np.ndarray = field(default_factory=lambda: np.zeros(len(COLUMNS)))
    out_of_support: int = 0

    def update(self, batch: TokenBatch, pair: str, needs: tuple[str, ...]) -> None:
        for gaps in token_gaps(batch, PAIRS[pair], required=needs):
            if gaps.out_of_support_N is not None:
                self.out_of_support += int(gaps.out_of_support_N.sum())
            if any(line.metric for line in self.lines):
                self.totals_M += token_sums(gaps).sum(axis=0)
            for quantity, moments in self.moments.items():
                moments.update(quantity(gaps))

    def value(self, line: Line) -> float:
        if line.metric:
            return float(evaluate(self.totals_M)[line.metric])
        moments = [self.moments[quantity] for quantity in line.quantities]
        return line.reduce(*moments) if all(moment.count for moment in moments) else float("nan")


@dataclass(frozen=True)
class Readings:
    """The readings of every asked framework, and how many tokens π excludes: those are in no metric made of logs."""

    by_framework: Mapping[str, list[Reading]]
    out_of_support: int


def readings(traces: Sequence[Trace], frameworks: Sequence[str]) -> Readings:
    """Every line of the asked frameworks on the tokens of all traces, in one pass and bounded memory."""
    asked = {name: lines(name) for name in frameworks}
    seen: dict[tuple[str, tuple[str, ...]], _Seen] = {}
    for line in chain.from_iterable(asked.values()):
        group = seen.setdefault((line.pair, line.needs), _Seen())
        group.lines.append(line)
        group.moments |= {quantity: Moments() for quantity in line.quantities}
    for trace in traces:
        for batch in trace.batches(_READ):
            for (pair, needs), group in seen.items():
                if PAIRS[pair].measured_in(batch) and all(getattr(batch, name) is not None for name in needs):
                    group.update(batch, pair, needs)
    return Readings(
        {name: [_reading(line, seen[line.pair, line.needs]) for line in found] for name, found in asked.items()},
        max((group.out_of_support for group in seen.values()), default=0),
    )


def _reading(line: Line, seen: _Seen) -> Reading:
    value = seen.value(line)
    if isfinite(value):
        return Reading(line, value)
    if value == float("inf"):
        return Reading(line, None, OVERFLOW)
    columns = [f"logp_{policy}" for policy in COMPARES[line.pair]] + [name.rpartition("_")[0] for name in line.needs]
    return Reading(line, None, f"not measured: needs {' and '.join(columns)}")
