"""The tables of a comparison: settings, metrics beside each other, and policies on the same tokens."""

from __future__ import annotations

from typing import Any

from mismatch_cli import numbers
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.papers import DPPO
from mismatch_cli.report.view import Column, Table
from mismatch_cli.studies.comparison_plot_data import Row
from mismatch_cli.studies.on_tokens import METRICS_SHOWN

CLIP_FLIPS = Metric(
    "clip_flips",
    "a clip decides otherwise",
    "share of tokens with r < 0.8, r in [0.8, 1.28] or r > 1.28 in one trace, and another of the three in the other",
    "share",
    f"{DPPO}, App. C.1, Clip-Higher",
)
_MARKED = "* more than noise: the 95 % interval of the difference excludes 0."
_POLICIES = {  # of a pair: what the current policy and the reference are
    "mismatch": ("trainer", "rollout"),
    "total": ("trainer", "rollout"),
    "staleness": ("trainer", "trainer at the rollout's weights"),
    "floor": ("trainer, repeated", "trainer"),
}


def settings_table(comparison: Row) -> Table:
    """What touches a log-probability, likely causes first."""
    ours, theirs = comparison["against"], comparison["trace"]
    rows = [row for row in comparison["settings"] if not row["harmless"]]
    return Table(
        f"{theirs} against {ours}",
        (
            Column("setting", kind="text"), Column(ours, kind="text"), Column(theirs, kind="text"),
            Column("why it can matter", kind="text"), Column("seen in", kind="text", optional=True),
        ),
        tuple((*_setting_cells(row), row["why"], row["source"]) for row in rows),
        shrinks=True,
    )  # fmt: skip


def harmless_table(comparison: Row) -> Table:
    """What decides which responses there are, and not how one is scored."""
    ours, theirs = comparison["against"], comparison["trace"]
    return Table(
        f"{theirs} against {ours}: what decides which responses there are",
        (Column("setting", kind="text"), Column(ours, kind="text"), Column(theirs, kind="text")),
        tuple(_setting_cells(row) for row in comparison["settings"] if row["harmless"]),
        fold="Other settings that differ",
        terminal_rows=0,
    )


def _setting_cells(row: Row) -> tuple[str, str, str]:
    return row["setting"], setting_words(row["first"]), setting_words(row["other"])


def setting_words(value: Any) -> str:
    """A setting as text; what a manifest does not have is a dash."""
    if value is None:
        return numbers.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def differences_table(ours: Row, theirs: Row, comparison: Row, *, folded: bool = False) -> Table:
    """Every metric that at least one of two traces has: both values, their difference, and the factor between."""
    metrics = _measured(ours, theirs)
    a, b = ours["name"], theirs["name"]
    rows = []
    for metric in metrics:
        found = comparison["metrics"][metric.key]
        values = (_value(metric, side["summary"]["metrics"][metric.key]) for side in (ours, theirs))
        rows.append(
            (
                metric.label,
                *values,
                _difference(metric, found["difference"]),
                _mark(found),
                factor_text(found["factor"]),
            )
        )
    columns = (
        Column("metric", kind="text"), Column(a), Column(b), Column(f"{b} − {a}"), Column("*", kind="text"),
        Column(f"{b} / {a}", optional=True),
    )  # fmt: skip
    fold = f"{b} against {a}: every difference" if folded else ""
    return Table(
        f"{b} against {a}", columns, tuple(rows), note=_MARKED, fold=fold, shrinks=True,
        terminal_rows=0 if folded else None, row_metrics=metrics,
    )  # fmt: skip


def side_by_side_table(result: Row) -> Table:
    """The values of all traces; a star says which differ from the first by more than noise."""
    first, *others = result["traces"]
    metrics = _measured(*result["traces"])
    rows = []
    for metric in metrics:
        cells = [_value(metric, first["summary"]["metrics"][metric.key])]
        for side, comparison in zip(others, result["comparisons"], strict=True):
            mark = _mark(comparison["metrics"][metric.key])
            cells.append(f"{_value(metric, side['summary']['metrics'][metric.key])} {mark or ' '}")
        rows.append((metric.label, *cells))
    columns = (Column(first["name"]), *(Column(f"{side['name']} *", optional=True) for side in others))
    return Table(
        "All traces", (Column("metric", kind="text"), *columns), tuple(rows),
        note=f"{_MARKED} Differences are from {first['name']}.", shrinks=True, row_metrics=metrics,
    )  # fmt: skip


def on_tokens_table(pair: str, comparison: Row) -> Table:
    """One policy of both traces against each other, and how often a clip decides otherwise."""
    found, names = comparison["on_tokens"], dict(zip(("current", "reference"), _POLICIES[pair], strict=True))
    a, b = comparison["against"], comparison["trace"]
    note = ""
    if found["reference"]["abs_d_max"]["value"] == 0:
        note = f"Both traces hold the same log-probabilities of the {names.pop('reference')}."
    rows = [
        (METRICS[key].label, *(_difference(METRICS[key], found[policy][key]) for policy in names))
        for key in METRICS_SHOWN
    ]
    flips = _difference(CLIP_FLIPS, found["clip_flips"])
    return Table(
        f"{b} against {a} on {numbers.count(found['tokens'])} tokens",
        (Column("metric", kind="text"), *(Column(name) for name in names.values())),
        (*rows, (CLIP_FLIPS.label, flips, "")[: len(names) + 1]),
        note=note,
        shrinks=True,
        row_metrics=(*(METRICS[key] for key in METRICS_SHOWN), CLIP_FLIPS),
    )


def factor_text(factor: Row) -> str:
    """A factor, as `3.1 ×`; a dash where it would mean nothing."""
    return numbers.times(factor["value"])


def _measured(*sides: Row) -> tuple[Metric, ...]:
    return tuple(
        metric
        for metric in METRICS.values()
        if any(side["summary"]["metrics"][metric.key]["value"] is not None for side in sides)
    )


def _value(metric: Metric, found: Row) -> str:
    if metric.unit == "share":
        return numbers.share(found["value"])[0]
    return numbers.near(found["value"], 1) if metric.agreement == 1 else numbers.number(found["value"])


def _difference(metric: Metric, found: Row) -> str:
    """A value with half its interval; of a share in percent."""
    scale, unit = (100, " %") if metric.unit == "share" else (1, "")
    text = numbers.plus_minus(*(None if found[end] is None else scale * found[end] for end in ("value", "low", "high")))
    return text if text == numbers.MISSING else text + unit


def _mark(found: Row) -> str:
    return "*" if found["more_than_noise"] else ""
