"""The screen of a comparison: what differs between traces, and by which settings."""

from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.about import DECIDING
from mismatch_cli.report.tables import (
    Col,
    Row,
    col,
    in_words,
    percent,
    plain,
    table,
    text,
    value_of,
)
from mismatch_cli.report.view import Facts, Screen, Status, Table, Verdict

DIFFERENT = ("gap", "metrics")
_WORDS = {
    "gap": "THE GAP DIFFERS",
    "metrics": "SOME METRICS DIFFER",
    "noise": "NO DIFFERENCE",
    "untested": "UNDECIDED",
}  # the strongest first
_STATUS: dict[str, Status] = {"gap": "mixed", "metrics": "mixed", "noise": "good", "untested": ""}
_SETTINGS = 3  # of each comparison


def screen(
    result: Row, subject: tuple[str, str], notes: tuple[str, ...], runs: tuple[Any, ...]
) -> Screen:
    """Whether the traces differ, and the settings that may be why; `runs` are the traces as the
    user types them.
    """
    comparisons = result["comparisons"]
    return Screen(
        subject=subject,
        notes=notes,
        tables=(_deciding(result), *(_settings(row) for row in comparisons if _suspicious(row))),
        remarks=_untested(result),
        verdict=_verdict(comparisons),
        next=_next(runs),
    )


def _deciding(result: Row) -> Table:
    """The metrics that people act on; a star marks values that differ from the first trace by
    more than noise.
    """
    first, *others = result["traces"]
    metrics = [
        METRICS[key] for key in DECIDING if first["summary"]["metrics"][key]["value"] is not None
    ]
    columns: list[Col[Metric]] = [
        text("", lambda metric: metric.label),
        col(first["name"], lambda metric: _value(metric, first)),
        *map(_marked, others, result["comparisons"]),
    ]
    if len(others) == 1:
        found = result["comparisons"][0]["metrics"]
        columns.append(
            col("difference", lambda metric: _difference(metric, found[metric.key]["difference"]))
        )
    return table(
        "",
        metrics,
        columns,
        note="* more than noise: the 95 % interval of the difference excludes 0",
    )


def _value(metric: Metric, side: Row) -> str:
    return in_words(metric, value_of(side["summary"]["metrics"][metric.key]))[0]


def _marked(side: Row, comparison: Row) -> Col[Metric]:
    """The values of another trace, with a star where they differ by more than noise."""

    def cell(metric: Metric) -> str:
        return (
            f"{_value(metric, side)} "
            f"{'*' if comparison['metrics'][metric.key]['more_than_noise'] else ' '}"
        )

    return col(f"{side['name']} *", cell)


def _difference(metric: Metric, found: Row) -> str:
    if metric.unit != "share":
        return plain(found)
    return numbers.MISSING if value_of(found) is None else f"{percent(found)} %"


def _untested(result: Row) -> Facts:
    """The metrics whose difference has no interval, grouped by reason."""
    labels: dict[str, list[str]] = {}
    for key in DECIDING if len(result["comparisons"]) == 1 else ():
        found = result["comparisons"][0]["metrics"][key]["difference"]
        if found["value"] is not None and found["low"] is None:
            labels.setdefault(
                (found["note"] or "too few prompts").removesuffix(": no interval"), []
            ).append(METRICS[key].label)
    untested = "; ".join(f"{' and '.join(names)} ({reason})" for reason, names in labels.items())
    return (("Not tested", f"{untested}."),) if untested else ()


def _suspicious(comparison: Row) -> list[Row]:
    return [row for row in comparison["settings"] if not row["harmless"]][:_SETTINGS]


def _settings(comparison: Row) -> Table:
    """Settings that differ and affect a log-probability, likely causes first."""
    return table(
        "",
        _suspicious(comparison),
        [
            text("settings that differ", lambda row: row["setting"]),
            text(comparison["against"], lambda row: numbers.setting(row["first"])),
            text(comparison["trace"], lambda row: numbers.setting(row["other"])),
            text("why it can matter", lambda row: row["why"]),
        ],
    )


def _first_setting(comparison: Row) -> str:
    """The likeliest cause among settings that both traces record; empty where nothing differs."""
    known = (row for row in comparison["settings"] if None not in (row["first"], row["other"]))
    likely = [row for row in known if row["likely"]]
    if not likely or comparison["differs"] not in DIFFERENT:
        return ""
    first = likely[0]
    return (
        f" Likeliest of the settings that differ: {first['setting']} "
        f"({numbers.setting(first['first'])} in {comparison['against']}, "
        f"{numbers.setting(first['other'])} in {comparison['trace']})."
    )


def _verdict(comparisons: list[Row]) -> Verdict:
    found = min((row["differs"] for row in comparisons), key=list(_WORDS).index)
    sentences = [f"{_how_much(row)} {_how_many(row)}{_first_setting(row)}" for row in comparisons]
    return Verdict(_WORDS[found], " ".join(sentences), _STATUS[found])


def _how_much(comparison: Row) -> str:
    """How many times larger the gap of the larger trace is."""
    metric, differs = METRICS["abs_d_mean"], comparison["differs"] in DIFFERENT
    factor = comparison["metrics"][metric.key]["factor"]["value"]
    if not factor:
        return ""
    larger, smaller = comparison["trace"], comparison["against"]
    if factor < 1:
        factor, larger, smaller = 1 / factor, smaller, larger
    label = f"{metric.label[0].upper()}{metric.label[1:]}"
    times = numbers.times(factor).replace("> ", "more than ")
    if times == "1.0 ×":
        # A difference can be certain and small
        times = f"{100 * (factor - 1):.2g} %"
        if not differs:
            return f"{label} is about the same in {larger} and {smaller} ({times} apart)."
    return f"{label} is {times} larger in {larger} than in {smaller}."


def _how_many(comparison: Row) -> str:
    """How many metrics differ by more than noise, and how many would by chance."""
    if not comparison["tested"]:
        values = [found["difference"]["value"] for found in comparison["metrics"].values()]
        return (
            "No metric differs." if not any(values) else "Too few prompts to tell this from noise."
        )
    return (
        f"{comparison['more_than_noise']} of {comparison['tested']} metrics differ by more than "
        f"noise; about {comparison['expected_by_chance']:.0f} would by chance."
    )


def _next(runs: tuple[Any, ...]) -> Facts:
    return (
        (suggest("compare", *runs, "--full"), "every metric, its difference and factor"),
        *(
            (suggest("diagnose", run), f"a mistake in {run}, or which setting?")
            for run in dict.fromkeys(runs[:2])
        ),
    )
