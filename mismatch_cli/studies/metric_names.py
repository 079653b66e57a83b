"""Which metric a name on a dashboard is: one of ours, or one of a framework's."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.registry import alternatives
from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.dialects import FrameworkMetric
from mismatch_cli.metrics.gap_table import METRICS, Metric

OWN = "mismatch"  # the framework name for the metrics of `report`


class LoggedMetric(NamedTuple):
    """A framework's metric; `also` are the others that log the same number by such a name."""

    framework: str
    line: FrameworkMetric
    also: tuple[tuple[str, FrameworkMetric], ...] = ()

    @property
    def note(self) -> str:
        """That of the metric, after the frameworks that log it too."""
        others = [
            owner if line.name == self.line.name else f"{owner} ({line.name})"
            for owner, line in self.also
        ]
        if not others:
            return self.line.note
        alike = f"the same number as in {' and '.join(others)}"
        return "; ".join(filter(None, (alike, self.line.note)))


def is_own(name: str) -> bool:
    """Whether it is the key or the label of a metric of ours."""
    return name in METRICS or any(name == metric.label for metric in METRICS.values())


def own_metric(name: str) -> Metric:
    """One of ours by its key, or by its label as reports print it."""
    metric = METRICS.get(name) or next(
        (metric for metric in METRICS.values() if metric.label == name), None
    )
    if metric is None:
        raise UsageError(unknown_metric(name, OWN))
    if metric.agreement is None:
        raise UsageError(f"{name} describes responses, not a gap, so no limit applies to it.")
    return metric


def framework_metric(framework: str, name: str) -> LoggedMetric:
    """A framework's metric by its name, with or without the part before a slash; without a
    framework, that of the first if it is the same number in all that have the name.
    """
    exact = _lines(framework, name)
    if not exact:
        raise UsageError(unknown_metric(name, framework))
    (owner, line), *others = exact
    if all(_is_same_number(line, other) for _, other in others):
        return LoggedMetric(owner, line, tuple(others))
    who = ", ".join(dict.fromkeys(f"{known} ({line.name})" for known, line in exact))
    if framework:
        raise UsageError(f"{name} is ambiguous: {who}. Type more of the name.")
    raise UsageError(
        f"{name} is ambiguous: {who}. Name the framework first: "
        f"{suggest('verdict', owner, f'{name}=VALUE')}"
    )


def _is_same_number(first: FrameworkMetric, second: FrameworkMetric) -> bool:
    facts = [(line.pair, line.formula, dialects.metric_of(line)) for line in (first, second)]
    return facts[0] == facts[1]


def _lines(framework: str, name: str) -> list[tuple[str, FrameworkMetric]]:
    """The metrics of exactly this name with their frameworks; without any, of nearly the same."""
    alike = [
        (owner, line)
        for owner in _among(framework)
        for line in dialects.lines(owner)
        if _same_name(line.name, name)
    ]
    return [(owner, line) for owner, line in alike if line.name == name] or alike


def _among(framework: str) -> list[str]:
    return [framework] if framework else dialects.names()


def _same_name(known: str, given: str) -> bool:
    return known == given or known.endswith(f"/{given}") or given.endswith(f"/{known}")


def without_value(name: str, framework: str) -> str:
    """The message for a word that no number follows: a metric, or nothing that is known."""
    if name in (OWN, *dialects.names()):
        return f"{name} is a framework: name it first, once."
    is_own_file = framework in ("", OWN) and is_own(name)
    if is_own_file or (framework != OWN and _lines(framework, name)):
        owner = filter(None, [framework])
        return f"{name} needs a number: {suggest('verdict', *owner, name, '0.02')}"
    return unknown_metric(name, framework) if framework else _unknown_word(name)


def _unknown_word(name: str) -> str:
    nearest = {
        "the framework": _near(name, dialects.names())[:2],
        "the metric": _near(name, _metrics(""))[:2],
    }
    meant = ", or ".join(f"{kind} {alternatives(near)}" for kind, near in nearest.items() if near)
    return (
        f"'{name}' is neither a framework nor a metric. {_question(meant)}List all: "
        f"{suggest('verdict', '--list')}"
    )


def unknown_metric(name: str, framework: str) -> str:
    """The message for an unknown metric, with the nearest names."""
    hint = _question(alternatives(_near(name, _metrics(framework))))
    owner = f" of {framework}" if framework else ""
    if framework not in ("", OWN) and name in METRICS:
        hint = f"It is a mismatch-cli metric: leave out {framework}. "
    every = suggest("verdict", "--list", *filter(None, [framework]))
    return f"Unknown metric '{name}'{owner}. {hint}List all: {every}"


def _question(meant: str) -> str:
    return f"Did you mean {meant}? " if meant else ""


def _metrics(framework: str) -> list[str]:
    """The names of a framework's metrics; without one, those of all and ours."""
    ours = [key for key, metric in METRICS.items() if metric.agreement is not None]
    if framework == OWN:
        return ours
    lines = [line.name for owner in _among(framework) for line in dialects.lines(owner)]
    return lines if framework else [*lines, *ours]


def _near(name: str, names: Sequence[str]) -> list[str]:
    """At most three that contain a name, else the nearest."""
    different = list(dict.fromkeys(names))
    containing = [other for other in different if name.lower() in other.lower()]
    return containing[:3] or get_close_matches(name, different)
