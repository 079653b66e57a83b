"""Limits as people choose them: TOML files of bounds on metrics, and sets of published limits.

A set of published limits has up to two levels: `verl` is what its authors call a problem,
`verl-healthy` what they call healthy.

A metric is one of `metrics/gap_table.py`, a framework's own, such as
`verl:training/rollout_probs_diff_mean`, or a result of `diagnose`: `diagnosis:faults` is their
number, and `diagnosis:index-shift` and the like are 1 if that check found something.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError, unreadable
from mismatch_cli.base.registry import unknown_name
from mismatch_cli.base.text import parse_toml
from mismatch_cli.limits.judge import BOUNDS, BROKEN, HEALTHY, agreement_of
from mismatch_cli.limits.published import Published, published
from mismatch_cli.limits.published_sets import about_sets
from mismatch_cli.metrics.pairs import PAIRS

DIAGNOSIS, FAULTS = "diagnosis", "faults"
_CHECKS = "mismatch_cli.diagnosis.checks"
VALUE, WHOLE_INTERVAL = "value", "surely"
_BOUNDS = BOUNDS | {  # in words
    "max_times_floor": "≤ {} × floor",
    "max_times_expected": "≤ {} × expected",
    "max_times_baseline": "≤ {} × baseline",
    "max_above_baseline": "≤ baseline + {}",
    "max_below_baseline": "≥ baseline − {}",
}
OF_FLOOR, OF_EXPECTED = "max_times_floor", "max_times_expected"
OF_BASELINE = ("max_times_baseline", "max_above_baseline", "max_below_baseline")
FACTORS = (OF_FLOOR, "max_times_baseline")  # of a distance from agreement
_FILE_KEYS = ("about", "decide", "limits")
_LIMIT_KEYS = (*_BOUNDS, "pair", "decide", "source", "why")
_PAIRS = tuple(name for name in PAIRS if name != "floor")
_EXAMPLE = "Example: [limits.k3] on one line, max = 0.015 on the next."


@dataclass(frozen=True)
class Limit:
    """One bound on one metric."""

    metric: str
    bound: str  # one of _BOUNDS
    threshold: float
    pair: str = ""  # empty: the first that the trace has
    decide: str = VALUE  # WHOLE_INTERVAL: exceeded only if the whole interval is
    source: str = ""
    why: str = ""
    family: str = ""  # of the models that it is for; empty for all

    @property
    def framework(self) -> str:
        """The framework that owns the metric, or `diagnosis`; empty for a metric of the catalog."""
        framework, colon, _ = self.metric.partition(":")
        return framework if colon else ""

    @property
    def text(self) -> str:
        """The bound in words, the same in every run."""
        if self.bound in FACTORS and self.agreement:
            metric = self.bound.removeprefix("max_times_")
            return f"distance from {self.agreement:g} ≤ {self.threshold:g} × that of the {metric}"
        return _BOUNDS[self.bound].format(f"{self.threshold:g}".replace("-", "−"))

    @property
    def agreement(self) -> float:
        """The metric's value if the two policies are equal; factors multiply the distance from
        it.
        """
        return agreement_of(self.metric)


@dataclass(frozen=True)
class LimitSet:
    """The limits of one file, or of one published set at one of its levels."""

    name: str
    limits: tuple[Limit, ...]
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """A check as the JSON of `gate` and `watch` has it."""

    limits: str  # the name of its set
    metric: str
    pair: str
    value: float | None
    low: float | None
    high: float | None
    bound: str
    threshold: float
    decide: str
    reference: float | None
    allowed: float | None
    holds: bool
    status: str
    reason: str | None
    power: float | None
    source: str
    why: str

    @property
    def key(self) -> tuple[str, str, str, float, str]:
        """What makes a limit the same one, whatever pair a trace chose for it."""
        return self.limits, self.metric, self.bound, self.threshold, self.decide

    @property
    def quantity(self) -> str:
        """The metric and its pair."""
        return f"{self.metric} ({self.pair})"


def presets() -> list[str]:
    """The sets of published limits, by name."""
    return sorted([*about_sets(), *_healthy_sets()])


def _healthy_sets() -> dict[str, str]:
    """The stricter level of each set that has one: its name, and the set's."""
    set_by_name = {}
    for row in published():
        if row.gate and row.has_two_levels:
            set_by_name[f"{row.gate}-{HEALTHY}"] = row.gate
    return set_by_name


def load_limits(name: str) -> LimitSet:
    """Load a published set or a TOML file; a `UsageError` names the file and key of anything
    invalid.
    """
    if name in presets():
        return _published_set(name)
    path = Path(name).expanduser()
    if not path.is_file():
        if path.suffix == ".toml":
            raise MismatchError(
                f"There is no file {path}. Name a TOML file of limits, or one of: "
                f"{', '.join(presets())}."
            )
        raise UsageError(unknown_name("set of limits", name, presets()))
    try:
        content = parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(
            path, error, "See mismatch-cli guide gate.", "is not a readable TOML file ({})"
        ) from error
    return parse_limits(content, str(path))


def _published_set(name: str) -> LimitSet:
    """A set at one of its levels: what is broken, or what is not healthy."""
    both_levels = _healthy_sets().get(name)
    if both_levels:
        level = HEALTHY
        rows = [row for row in published() if row.gate == both_levels]
        about = (
            f"What the authors of {both_levels} call healthy: stricter than what they call a "
            "problem."
        )
    else:
        level = BROKEN
        every = [row for row in published() if row.gate == name]
        # A set of healthy values alone is checked by these: without a limit, all would pass.
        rows = [row for row in every if row.broken is not None] or every
        about = about_sets()[name]
    limits: list[Limit] = []
    for row in rows:
        limits += _limits_of_row(row, level)
    return LimitSet(name, tuple(limits), about)


def _limits_of_row(row: Published, level: str) -> Iterator[Limit]:
    """The bounds of a published row, each as a limit: two if it allows what is between them."""
    pair = "" if ":" in row.metric else row.pair
    source = f"{row.who}: {row.source}"
    for name, threshold in row.bounds(level).items():
        yield Limit(
            row.metric, name, threshold, pair, source=source, why=row.says, family=row.family
        )


def parse_limits(content: Mapping[str, Any], name: str) -> LimitSet:
    """The limits of a file's content; errors call it by `name`."""
    return LimitSet(name, _parse_tables(content, name), _text(content, "about", name))


def _parse_tables(content: Mapping[str, Any], file: str) -> tuple[Limit, ...]:
    """The limits below `limits`: a table for each metric, or an array of tables."""
    _check_names("key", content, _FILE_KEYS, file)
    tables = content.get("limits")
    if not isinstance(tables, dict) or not tables:
        raise UsageError(f"{file} has no limits. {_EXAMPLE}")
    decide = _choice(content, "decide", (VALUE, WHOLE_INTERVAL), file) or VALUE
    limits = []
    for metric, entries in tables.items():
        where = f"{file}, limits.{metric}"
        if entries == []:
            raise UsageError(f"{where} sets no bound. {_EXAMPLE}")
        for table in entries if isinstance(entries, list) else [entries]:
            if not isinstance(table, dict):
                raise UsageError(f"{where} is not a table. {_EXAMPLE}")
            limits += _parse_table(metric, table, decide, where)
    return tuple(limits)


def _parse_table(metric: str, table: Mapping[str, Any], decide: str, where: str) -> list[Limit]:
    """The limits of one table, one for each of its bounds."""
    _check_metric(metric, where)
    _check_names("key", table, _LIMIT_KEYS, where)
    bounds = [key for key in table if key in _BOUNDS]
    if not bounds:
        raise UsageError(f"{where} sets no bound. Give at least one of: {', '.join(_BOUNDS)}.")
    if ":" in metric and "pair" in table:
        raise UsageError(f"{where}.pair: a framework's metric has a fixed pair. Leave pair out.")
    fields = {
        "pair": _choice(table, "pair", _PAIRS, where),
        "decide": _choice(table, "decide", (VALUE, WHOLE_INTERVAL), where) or decide,
        "source": _text(table, "source", where),
        "why": _text(table, "why", where),
    }
    for bound in bounds:
        _check_bound(metric, bound, table[bound], f"{where}.{bound}")
    return [Limit(metric, bound, float(table[bound]), **fields) for bound in bounds]


def _check_metric(metric: str, where: str) -> None:
    from mismatch_cli.frameworks import dialects
    from mismatch_cli.metrics.gap_table import METRICS

    framework, colon, name = metric.partition(":")
    if framework == DIAGNOSIS:
        _check_names("check", [name], (FAULTS, *registry.names(_CHECKS)), where)
    elif not colon:
        _check_names("metric", [metric], list(METRICS), where)
    else:
        try:
            lines = dialects.lines(framework)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        _check_names(f"metric of {framework}", [name], [line.name for line in lines], where)


def _check_bound(metric: str, bound: str, threshold: Any, where: str) -> None:
    # To Python, TOML's `true` is a number, too.
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not is_number or not isfinite(threshold):
        raise UsageError(f"{where} is {threshold!r}, but must be a number. Example: max = 0.015")
    if bound not in ("max", "min") and threshold < 0:
        raise UsageError(f"{where} is {threshold:g}, but cannot be negative. Use 0 or more.")
    _check_relative(metric, bound, where)
    if bound not in FACTORS:
        _check_no_percent(metric, threshold, where)


def _check_no_percent(metric: str, threshold: float, where: str) -> None:
    """A `UsageError` if the metric is at most 1 and the threshold is larger: no run would ever
    exceed it.
    """
    from mismatch_cli.metrics.gap_table import METRICS

    of_catalog = METRICS.get(metric)
    if of_catalog and of_catalog.unit in ("probability", "share") and abs(threshold) > 1:
        raise UsageError(
            f"{where} is {threshold:g}, but {metric} is at most 1. For 5 %, write 0.05."
        )


def _check_relative(metric: str, bound: str, where: str) -> None:
    """A `UsageError` if the metric has nothing that the bound is a multiple of."""
    from mismatch_cli.limits.assess import LEADING
    from mismatch_cli.metrics.gap_table import METRICS

    if bound == OF_EXPECTED and metric != LEADING:
        raise UsageError(f"{where}: what is expected is known of {LEADING} only. Use max or min.")
    of_catalog = METRICS.get(metric)
    if of_catalog is None:
        if bound == OF_FLOOR:
            raise UsageError(
                f"{where}: a framework's metric has no noise floor. Use one of: mismatch-cli "
                "verdict --list mismatch"
            )
    elif bound == OF_FLOOR and of_catalog.agreement is None:
        raise UsageError(
            f"{where}: {metric} does not measure a gap, so it has no noise floor. Use max or min."
        )
    elif bound in FACTORS and of_catalog.signed:
        raise UsageError(
            f"{where}: {metric} is signed and may be 0 by chance, so a factor fails. Use max and "
            "min."
        )


def _check_names(kind: str, names: Iterable[str], allowed: Sequence[str], where: str) -> None:
    for name in names:
        if name not in allowed:
            raise UsageError(f"{where}: {unknown_name(kind, name, allowed)}")


def _choice(table: Mapping[str, Any], key: str, choices: Sequence[str], where: str) -> str:
    """One of the choices; empty if the table leaves the key out."""
    if key not in table:
        return ""
    if table[key] not in choices:
        raise UsageError(f"{where}.{key} is {table[key]!r}. Use one of: {', '.join(choices)}.")
    return str(table[key])


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    """A text; empty if the table leaves the key out."""
    text = table.get(key, "")
    if not isinstance(text, str):
        raise UsageError(f"{where}.{key} is {text!r}, but must be text. Put it in quotes.")
    return text
