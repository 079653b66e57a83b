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
        """The note of the metric, after the frameworks that log the same number."""
        if not self.also:
            return self.line.note
        others = []
        for owner, line in self.also:
            same_name = line.name == self.line.name
            others.append(owner if same_name else f"{owner} ({line.name})")
        alike = f"the same number as in {' and '.join(others)}"
        return "; ".join(filter(None, (alike, self.line.note)))


def is_own(name: str) -> bool:
    """Whether it is the key or the label of a metric of ours."""
    return _own_metric(name) is not None


def _own_metric(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    for metric in METRICS.values():
        if metric.label == name:
            return metric
    return None


def own_metric(name: str) -> Metric:
    """One of ours by its key, or by its label as reports print it; a `UsageError` if no limit
    applies to it.
    """
    metric = _own_metric(name)
    if metric is None:
        raise UsageError(unknown_metric(name, OWN))
    if metric.agreement is None:
        raise UsageError(f"{name} describes responses, not a gap, so no limit applies to it.")
    return metric


def framework_metric(framework: str, name: str) -> LoggedMetric:
    """A framework's metric by its name, with or without the part before a slash; without a
    framework, that of the first if it is the same number in all that have the name.
    """
    matches = _matching_metrics(framework, name)
    if not matches:
        raise UsageError(unknown_metric(name, framework))
    (owner, line), *others = matches
    if all(_is_same_number(line, other) for _, other in others):
        return LoggedMetric(owner, line, tuple(others))
    candidates = [f"{each} ({match.name})" for each, match in matches]
    who = ", ".join(dict.fromkeys(candidates))
    if framework:
        raise UsageError(f"{name} is ambiguous: {who}. Type more of the name.")
    raise UsageError(
        f"{name} is ambiguous: {who}. Name the framework first: "
        f"{suggest('verdict', owner, f'{name}=VALUE')}"
    )


def _is_same_number(first: FrameworkMetric, second: FrameworkMetric) -> bool:
    if (first.pair, first.formula) != (second.pair, second.formula):
        return False
    return dialects.metric_of(first) == dialects.metric_of(second)


def _matching_metrics(framework: str, name: str) -> list[tuple[str, FrameworkMetric]]:
    """The metrics of exactly this name with their frameworks; without any, those of which one name
    ends with the other, after a slash.
    """
    exact = []
    alike = []
    for owner in _frameworks(framework):
        for line in dialects.lines(owner):
            if line.name == name:
                exact.append((owner, line))
            elif line.name.endswith(f"/{name}") or name.endswith(f"/{line.name}"):
                alike.append((owner, line))
    return exact or alike


def _frameworks(framework: str) -> list[str]:
    """The framework, or all."""
    return [framework] if framework else dialects.names()


def without_value(name: str, framework: str) -> str:
    """The message for a word that no number follows: a metric, or nothing that is known."""
    if name in (OWN, *dialects.names()):
        return f"{name} is a framework: name it first, once."
    is_ours = framework in ("", OWN) and is_own(name)
    if is_ours or (framework != OWN and _matching_metrics(framework, name)):
        owner = filter(None, [framework])
        return f"{name} needs a number: {suggest('verdict', *owner, name, '0.02')}"
    if framework:
        return unknown_metric(name, framework)
    return _unknown_word(name)


def _unknown_word(name: str) -> str:
    """The message for a word that is neither, with the nearest of both."""
    guesses = []
    frameworks = _nearest(name, dialects.names())[:2]
    if frameworks:
        guesses.append(f"the framework {alternatives(frameworks)}")
    metrics = _nearest(name, _metric_names(""))[:2]
    if metrics:
        guesses.append(f"the metric {alternatives(metrics)}")
    return (
        f"'{name}' is neither a framework nor a metric. {_did_you_mean(', or '.join(guesses))}List "
        f"all: {suggest('verdict', '--list')}"
    )


def unknown_metric(name: str, framework: str) -> str:
    """The message for an unknown metric, with the nearest names."""
    hint = _did_you_mean(alternatives(_nearest(name, _metric_names(framework))))
    owner = f" of {framework}" if framework else ""
    if framework not in ("", OWN) and name in METRICS:
        hint = f"It is a mismatch-cli metric: leave out {framework}. "
    every = suggest("verdict", "--list", *filter(None, [framework]))
    return f"Unknown metric '{name}'{owner}. {hint}List all: {every}"


def _did_you_mean(meant: str) -> str:
    return f"Did you mean {meant}? " if meant else ""


def _metric_names(framework: str) -> list[str]:
    """The names of a framework's metrics; without one, those of all and ours."""
    names = []
    if framework != OWN:
        for owner in _frameworks(framework):
            names += [line.name for line in dialects.lines(owner)]
    if framework in ("", OWN):
        names += [key for key, metric in METRICS.items() if metric.agreement is not None]
    return names


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """At most three that contain a name, else the nearest."""
    different = list(dict.fromkeys(names))
    containing = [other for other in different if name.lower() in other.lower()]
    return containing[:3] or get_close_matches(name, different)
