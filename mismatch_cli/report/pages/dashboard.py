"""The screen of quoted numbers: published limits, the closest measured values, what to check
first, the verdict.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mismatch_cli.base import numbers, registry
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.json_form import from_json
from mismatch_cli.frameworks import IMPORTERS, RECORDERS
from mismatch_cli.frameworks.dialects import UPDATE
from mismatch_cli.limits.assess import LimitRow, counted, strictest_first
from mismatch_cli.limits.judge import HEALTHY
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.pages._status import STATUS_WORDS, sign, word
from mismatch_cli.report.tables import Col, Row, col, filled, table, text
from mismatch_cli.report.view import Facts, ReportView, Screen, Status, Table, Verdict
from mismatch_cli.studies.dashboard import OWN, DashboardNumbers, on_the_dtype

_MOST_LIMITS, _MOST_MEASURED, _MOST_SUSPECTS = 8, 3, 4
_SHARPER = "with the dtype of the engine; --model dense or moe says more"
_FEW = 3  # limits needed to call a number healthy; numbers up to which each gets a note
_COMPARES = {
    "mismatch": "trainer at the weights that sampled, against the engine",
    "total": "trainer as it is now, against the engine (includes staleness)",
    UPDATE: "trainer now, against itself before the update (not the engine)",
}


def page(study: DashboardNumbers) -> ReportView:
    """The screen alone: there is no trace for a page."""
    found = study.result
    words, status = _words(found)
    said = " ".join(_sentences(found))
    screen = Screen(
        subject=_subject(found),
        tables=filled(
            _limits(found["numbers"]),
            _measured(found["numbers"]),
            *[_suspects(found)] * (status != "good"),
        ),
        remarks=tuple(_remarks(found["numbers"])),
        verdict=Verdict(words, said, status),
        next=_next(study),
    )
    return ReportView(
        title="Is this number normal?", about=(), headline=said, outline=(), screen=screen
    )


def _subject(found: Mapping[str, Any]) -> tuple[str, ...]:
    rows = found["numbers"]
    quoted = (f"{_whose(row)}{row['name']} = {row['value']:g}" for row in rows)
    kind = [
        found["family"] or "dense or MoE: not given",
        found["precision"] or "precision: not given",
    ]
    return " · ".join(quoted), " · ".join(
        [*(_definition(row) for row in rows if len(rows) == 1), *kind]
    )


def _whose(row: Row) -> str:
    return "" if row["framework"] == OWN else f"{row['framework']} "


def _definition(row: Row) -> str:
    ours = f" (ours: {row['metric']})" if row["metric"] and row["framework"] != OWN else ""
    return f"{row['formula']}{ours}, {_COMPARES[row['pair']]}"


def _limits(found: Sequence[Row]) -> Table:
    """The published limits on each number with their status, the strictest first."""
    most = max(1, _MOST_LIMITS // len(found))
    rows = [
        (row, limit)
        for row in found
        for limit in strictest_first([from_json(LimitRow, bar) for bar in row["bars"]])[:most]
    ]
    columns: list[Col[tuple[Row, LimitRow]]] = [
        text("published by", lambda pair: pair[1].who),
        text("metric", lambda pair: pair[0]["name"].rpartition("/")[2]),
        text("limit", lambda pair: pair[1].text),
        text("status", lambda pair: f"{sign(pair[1])} {word(pair[1])}"),
        text("source", lambda pair: pair[1].source),
    ]
    return table("", rows, [columns[0], *columns[1 + (len(found) == 1) :]])


def _measured(found: Sequence[Row]) -> Table:
    rows = [
        case for row in found for case in row["measured"][: max(1, _MOST_MEASURED // len(found))]
    ]
    return table(
        "",
        rows[: _MOST_MEASURED - (len(found) > 2)],
        [
            text("measured by others", lambda case: case["model"]),
            text("setup", _setup),
            col("value", lambda case: _span(case["low"], case["high"])),
            text("source", lambda case: case["source"]),
        ],
    )


def _setup(case: Row) -> str:
    """The first words of a setup: who ran it, and how; JSON has the rest."""
    words = ", ".join(case["setup"].split(", ")[:2])
    return f"{words} ({case['state']})" if case["state"] else words


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"


def _remarks(found: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """What causes values of this size, and notes on the definition."""
    for row in found:
        name = f"{row['name'].rpartition('/')[2]}: " if len(found) > 1 else ""
        for label, fault in (("Usual for", False), ("Same size as", True)):
            cases = (case for case in row["made_by"] if case["fault"] is fault)
            if causes := "; ".join(
                f"{case['what']}, {_span(case['low'], case['high'])}" for case in cases
            ):
                yield label, name + causes
        if row["note"] and len(found) < _FEW:
            yield "Note", f"{name}{row['note']}"


def _suspects(found: Mapping[str, Any]) -> Table:
    """The likeliest settings; several numbers leave room for fewer."""
    return table(
        "",
        found["suspects"][: max(1, _MOST_SUSPECTS + 1 - len(found["numbers"]))],
        [
            text("check first", lambda suspect: suspect["setting"]),
            text(
                "here",
                lambda suspect: "not given" if suspect["value"] is None else str(suspect["value"]),
            ),
            text("why it can cause a gap", lambda suspect: suspect["why"]),
        ],
    )


def _words(found: Mapping[str, Any]) -> tuple[str, Status]:
    if not found["status"] and all(row["metric"] is None for row in found["numbers"]):
        return "DIFFERENT QUANTITY", ""
    if found["status"] == HEALTHY:
        return _words_of_healthy(found["numbers"])
    return STATUS_WORDS[found["status"]]


def _words_of_healthy(rows: Sequence[Row]) -> tuple[str, Status]:
    """All limits hold: what else qualifies that."""
    places = {row["usual"]["where"] for row in rows if row["usual"]}
    if "above" in places:
        return "WITHIN LIMITS, ABOVE THE MODELS MEASURED", "mixed"
    if _some_are_above(rows):
        return "WITHIN LIMITS, USUAL FOR SOME PRECISIONS", "mixed"
    if sum(len(row["bars"]) for row in rows) < _FEW:
        return "WITHIN LIMITS", "good"  # one or two loose limits do not make a number healthy
    return STATUS_WORDS[HEALTHY]


def _some_are_above(rows: Sequence[Row]) -> bool:
    """Whether a number is usual for some precisions and above those of others."""
    return any("; above" in on_the_dtype(row) for row in rows)


def _sentences(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["numbers"]:
        name = f"{row['name']}: " if len(found["numbers"]) > 1 else ""
        yield name + " ".join(_of_number(row))


def _of_number(row: Row) -> Iterator[str]:
    limits, usual = row["bars"], row["usual"]
    if row["pair"] == UPDATE:
        yield (
            "It compares the trainer with itself before an update, so no limit for the engine's "
            "gap applies."
        )
        return
    if limits:
        yield counted(limits)
    elif row["metric"] is None:
        yield f"It is {row['formula']}: none of our metrics matches it, and {_elsewhere(row)}."
    else:
        yield f"There is no published limit for {METRICS[row['metric']].label} alone."
    if row["metric"] is None and limits:
        yield "It is averaged differently from ours: only limits on this exact metric are shown."
    if depends := on_the_dtype(row):
        yield f"Usual or not depends on the dtype (--dtype, not given): {depends}."
    elif usual:
        span = _span(usual["low"], usual["high"])
        yield (
            f"{numbers.number(row['value'])} is {usual['where']} the range of the models measured "
            f"so far, {span} nats for {usual['who']}."
        )
    if any(case["fault"] for case in row["made_by"]):
        yield "Faults have caused values of this size: look for one first."


def _elsewhere(row: Row) -> str:
    """That no limit is about it; or about which metric the one is that is published by its name."""
    metric = row["limit_on"]
    if metric is None:
        return "it has no published limit"
    return f"the limit that is published by its name is about {METRICS[metric].label} ({metric})"


def _to_a_trace(frameworks: Sequence[str]) -> tuple[str, str]:
    """The command that makes a trace of the run: an import of what its framework saves, or the
    page that says how to record it from inside.
    """
    importers = registry.names(IMPORTERS)
    first = next(iter(frameworks), "")
    if first in registry.names(RECORDERS) and not _saves_ids(first, importers):
        return suggest("guide", "record"), "record the run from inside, with its token ids"
    form = ("--format", first) if first in importers else ()
    return (
        suggest("import", "DUMP", *form, "--output", "run"),
        "turn a dump of the run into a trace",
    )


def _saves_ids(framework: str, importers: Collection[str]) -> bool:
    """Whether the framework itself writes a dump that can be imported."""
    if framework not in importers:
        return False
    module = registry.load(IMPORTERS, framework, "format")
    return bool(getattr(module, "SAVES_IDS", True))


def _next(study: DashboardNumbers) -> Facts:
    """How to get from a number to a trace, which shows the cause."""
    frameworks = [number.framework for number in study.numbers if number.framework != OWN]
    shows = ("--as", frameworks[0]) if frameworks else ()
    first = next((row for row in study.result["suspects"] if row["test"]), None)
    lines = [
        *((line, _SHARPER) for line in study.lines_with_a_dtype),
        _to_a_trace(frameworks),
        (suggest("diagnose", "run"), "a mistake, or which setting?"),
        (suggest("report", "run", *shows), "the same number, and where the gap is"),
    ]
    if first is not None:
        shows_first = f"or without a dump: how much {first['setting']} causes"
        lines += [
            (line, "" if number else shows_first) for number, line in enumerate(first["test"])
        ]
    return tuple(lines)
