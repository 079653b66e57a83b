"""The tables of a comparison: settings, metrics beside each other, and policies on the same tokens."""

from __future__ import annotations

from typing import Any

from mismatch_cli import DPPO, numbers
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.tables import Col, Row, col, in_words, named, percent, plain, table, text, value_of
from mismatch_cli.report.view import Table
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
    why = [named("why it can matter", "why"), named("seen in", "source", optional=True)]
    rows = [row for row in comparison["settings"] if not row["harmless"]]
    return table(_against(comparison), rows, [*_setting_columns(comparison), *why], shrinks=True)


def harmless_table(comparison: Row) -> Table:
    """What decides which responses there are, and not how one is scored."""
    return table(
        f"{_against(comparison)}: what decides which responses there are",
        [row for row in comparison["settings"] if row["harmless"]],
        _setting_columns(comparison),
        fold="Other settings that differ",
        terminal_rows=0,
    )


def _against(comparison: Row) -> str:
    return f"{comparison['trace']} against {comparison['against']}"


def _setting_columns(comparison: Row) -> list[Col[Row]]:
    return [
        named("setting", "setting"),
        text(comparison["against"], lambda row: setting_words(row["first"])),
        text(comparison["trace"], lambda row: setting_words(row["other"])),
    ]


def setting_words(value: Any) -> str:
    """A setting as text; what a manifest does not have is a dash."""
    if value is None:
        return numbers.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def differences_table(ours: Row, theirs: Row, comparison: Row, *, folded: bool = False) -> Table:
    """Every metric that at least one of two traces has: both values, their difference, and the factor between."""
    a, b, metrics = ours["name"], theirs["name"], _measured(ours, theirs)
    found = comparison["metrics"]
    return table(
        _against(comparison),
        metrics,
        [
            text("metric", lambda metric: metric.label),
            col(a, lambda metric: _value(metric, ours)),
            col(b, lambda metric: _value(metric, theirs)),
            col(f"{b} − {a}", lambda metric: _difference(metric, found[metric.key]["difference"])),
            text("*", lambda metric: _mark(found[metric.key])),
            col(f"{b} / {a}", lambda metric: factor_text(found[metric.key]["factor"]), optional=True),
        ],
        note=_MARKED,
        fold=f"{_against(comparison)}: every difference" if folded else "",
        shrinks=True,
        terminal_rows=0 if folded else None,
        row_metrics=metrics,
    )


def side_by_side_table(result: Row) -> Table:
    """The values of all traces; a star says which differ from the first by more than noise."""
    first, *others = result["traces"]
    metrics = _measured(*result["traces"])
    return table(
        "All traces",
        metrics,
        [
            text("metric", lambda metric: metric.label),
            col(first["name"], lambda metric: _value(metric, first)),
            *map(_marked_column, others, result["comparisons"]),
        ],
        note=f"{_MARKED} Differences are from {first['name']}.",
        shrinks=True,
        row_metrics=metrics,
    )


def _marked_column(side: Row, comparison: Row) -> Col[Metric]:
    found = comparison["metrics"]
    return col(
        f"{side['name']} *",
        lambda metric: f"{_value(metric, side)} {_mark(found[metric.key]) or ' '}",
        optional=True,
    )


def on_tokens_table(pair: str, comparison: Row) -> Table:
    """One policy of both traces against each other, and how often a clip decides otherwise."""
    found, (current, reference) = comparison["on_tokens"], _POLICIES[pair]
    same = found["reference"]["abs_d_max"]["value"] == 0
    metrics = (*(METRICS[key] for key in METRICS_SHOWN), CLIP_FLIPS)
    return table(
        f"{_against(comparison)} on {numbers.count(found['tokens'])} tokens",
        metrics,
        [
            text("metric", lambda metric: metric.label),
            _policy_column(current, found["current"] | {CLIP_FLIPS.key: found["clip_flips"]}),
            *([] if same else [_policy_column(reference, found["reference"])]),
        ],
        note=f"Both traces hold the same log-probabilities of the {reference}." if same else "",
        shrinks=True,
        row_metrics=metrics,
    )


def _policy_column(name: str, values: Row) -> Col[Metric]:
    return col(name, lambda metric: _difference(metric, values[metric.key]) if metric.key in values else "")


def factor_text(factor: Row) -> str:
    """A factor, as `3.1 ×`; a dash where it would mean nothing."""
    return numbers.times(factor["value"])


def _measured(*sides: Row) -> tuple[Metric, ...]:
    return tuple(
        metric
        for metric in METRICS.values()
        if any(side["summary"]["metrics"][metric.key]["value"] is not None for side in sides)
    )


def _value(metric: Metric, side: Row) -> str:
    return in_words(metric, value_of(side["summary"]["metrics"][metric.key]))[0]


def _difference(metric: Metric, found: Row) -> str:
    """A value with half its interval; of a share in percent."""
    if metric.unit != "share":
        return plain(found)
    return f"{percent(found)} %" if value_of(found) is not None else numbers.MISSING


def _mark(found: Row) -> str:
    return "*" if found["more_than_noise"] else ""
