"""The page of quoted numbers, which is a screen: published limits, the closest measured values,
what to check first, the verdict.
"""

from collections.abc import Iterator, Sequence

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.frameworks.dialects import UPDATE
from mismatch_cli.limits.assess import (
    FLOOR,
    LimitRow,
    MeasuredElsewhere,
    strictest_first,
    tally,
)
from mismatch_cli.limits.judge import HEALTHY
from mismatch_cli.limits.reference import reference
from mismatch_cli.limits.suspects import Suspect
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.outline import (
    Brief,
    Facts,
    Outline,
    Priority,
    Section,
    Status,
    Table,
    Verdict,
)
from mismatch_cli.report.pages._status import STATUS_WORDS, sign, word
from mismatch_cli.report.tables import TextColumn, col, filled, table, text
from mismatch_cli.studies.dashboard import DashboardNumbers, DashboardResult, JudgedNumber

_MOST_LIMITS, _MOST_MEASURED, _MOST_SUSPECTS = 8, 3, 4
_SHARPER = "with the dtype of the engine; --model dense or moe says more"
_RARE = ("int8", "fp4")  # precisions of a side that only the JSON lists
_OTHER_FAMILY = {"dense": "MoE", "moe": "dense"}
_FEW = 3  # limits needed to call a number healthy; numbers up to which each gets a note
_COMPARES = {
    "mismatch": "trainer at the weights that sampled, against the engine",
    "total": "trainer as it is now, against the engine (includes staleness)",
    UPDATE: "trainer now, against itself before the update (not the engine)",
}


def page(study: DashboardNumbers) -> Outline:
    """What is known about numbers without a trace (docs/json/verdict.md)."""
    result = study.result
    words, status = _words(result)
    tables = [_limits(result.numbers), _measured(result.numbers)]
    if status != "good":
        tables.append(_suspects(result))
    return Outline(
        everything="--json",
        title="Is this number normal?",
        about=(),
        subject=_subject(result),
        verdict=Verdict(words, " ".join(_sentences(result.numbers)), status),
        remarks=(*_remarks(result.numbers), *_unmeasured(result)),
        next=_next(study),
        parts=(Section("Limits and causes", tables=filled(*tables)),),
    )


def _subject(result: DashboardResult) -> tuple[str, str]:
    quoted = [f"{row.owner} {row.name} = {row.value:g}".lstrip() for row in result.numbers]
    about = [
        result.family or "dense or MoE: not given",
        result.precision or "precision: not given",
    ]
    if len(result.numbers) == 1:
        about.insert(0, _definition(result.numbers[0]))
    return " · ".join(quoted), " · ".join(about)


def _definition(row: JudgedNumber) -> str:
    ours = f" (ours: {row.metric})" if row.metric and row.owner else ""
    return f"{row.formula}{ours}, {_COMPARES[row.pair]}"


def _limits(rows: Sequence[JudgedNumber]) -> Table:
    """The published limits on each number with their status, the strictest first."""
    most = max(1, _MOST_LIMITS // len(rows))
    limits = []
    for row in rows:
        limits += [(row, limit) for limit in strictest_first(row.bars)[:most]]
    columns: list[TextColumn[tuple[JudgedNumber, LimitRow]]] = [
        text("published by", lambda pair: pair[1].who),
        text("limit", lambda pair: pair[1].text),
        text(
            "status",
            lambda pair: f"{sign(pair[1])} {word(pair[1])}",
            priority=Priority.ALWAYS,
        ),
        text("source", lambda pair: pair[1].source, priority=Priority.SPARE),
    ]
    if len(rows) > 1:
        columns.insert(1, text("metric", lambda pair: pair[0].short_name))
    return table(
        "Published limits", limits, columns, brief=Brief.first(len(limits), fewest=len(limits))
    )


def _measured(rows: Sequence[JudgedNumber]) -> Table:
    of_each = max(1, _MOST_MEASURED // len(rows))
    cases: list[MeasuredElsewhere] = []
    for row in rows:
        cases += row.measured[:of_each]
    return table(
        "Measured by others",
        cases,
        [
            text("measured by others", lambda case: case.model),
            text("setup", _setup),
            col("value", lambda case: _span(case.low, case.high)),
            text("source", lambda case: case.source),
        ],
        brief=Brief.first(_MOST_MEASURED, fewest=0, counts_rest=False),
    )


def _setup(case: MeasuredElsewhere) -> str:
    """The first words of a setup: who ran it, and how; JSON has the rest."""
    words = ", ".join(case.setup.split(", ")[:2])
    if case.state:
        return f"{words} ({case.state})"
    return words


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"


def _suspects(result: DashboardResult) -> Table:
    """The likeliest settings; several numbers leave room for fewer."""
    most = max(1, _MOST_SUSPECTS + 1 - len(result.numbers))
    columns: list[TextColumn[Suspect]] = [
        text("check first", lambda suspect: suspect.setting),
        text("here", _here),
        text("why it can cause a gap", lambda suspect: suspect.why),
    ]
    return table("Check first", result.suspects[:most], columns, brief=Brief.first(most, fewest=1))


def _here(suspect: Suspect) -> str:
    if suspect.value is None:
        return "not given"
    return str(suspect.value)


def _remarks(rows: Sequence[JudgedNumber]) -> Iterator[tuple[str, str]]:
    """What causes values of this size, and notes on the definition."""
    for row in rows:
        name = f"{row.short_name}: " if len(rows) > 1 else ""
        for cause in row.made_by:
            label = "Same size as" if cause.fault else "Usual for"
            yield label, f"{name}{cause.what}, {_span(cause.low, cause.high)}"
        if row.note and len(rows) < _FEW:
            yield "Note", name + row.note


def _unmeasured(result: DashboardResult) -> Iterator[tuple[str, str]]:
    """Numbers that others measured only on models of the other family."""
    if not result.family:
        return
    metrics = {case.metric for case in reference().measured if case.pair != FLOOR}
    for row in result.numbers:
        if row.metric in metrics and not row.measured:
            name = f"{row.short_name}: " if len(result.numbers) > 1 else ""
            other = _OTHER_FAMILY[result.family]
            yield "Measured by others", f"{name}only on {other} models (leave out --model)"


def _words(result: DashboardResult) -> tuple[str, Status]:
    if not result.status and all(row.metric is None for row in result.numbers):
        return "DIFFERENT QUANTITY", ""
    if result.status == HEALTHY:
        return _words_of_healthy(result.numbers)
    return STATUS_WORDS[result.status]


def _words_of_healthy(rows: Sequence[JudgedNumber]) -> tuple[str, Status]:
    """All limits hold: what else qualifies that."""
    if any(row.usual and row.usual.where == "above" for row in rows):
        return "WITHIN LIMITS, ABOVE THE MODELS MEASURED", "mixed"
    if any({"within", "above"} <= _by_place(row).keys() for row in rows):
        return "WITHIN LIMITS, USUAL FOR SOME PRECISIONS", "mixed"
    # One or two loose limits do not make a number healthy.
    if sum(len(row.bars) for row in rows) < _FEW:
        return "WITHIN LIMITS", "good"
    return STATUS_WORDS[HEALTHY]


def _by_place(row: JudgedNumber) -> dict[str, list[str]]:
    """The ranges of the precisions that a run may have, by where a number is relative to them:
    within, above, then below.
    """
    ranges: dict[str, list[str]] = {}
    for where in ("within", "above", "below"):
        for each in row.by_precision:
            if each.where == where and each.precision not in _RARE:
                text = f"{each.precision} ({each.low:g}–{each.high:g})"
                ranges.setdefault(where, []).append(text)
    return ranges


def _sentences(rows: Sequence[JudgedNumber]) -> Iterator[str]:
    for row in rows:
        name = f"{row.name}: " if len(rows) > 1 else ""
        yield name + " ".join(_of_number(row))


def _of_number(row: JudgedNumber) -> Iterator[str]:
    if row.pair == UPDATE:
        yield (
            "It compares the trainer with itself before an update, so no limit for the engine's "
            "gap applies."
        )
        return
    yield _of_limits(row)
    if row.metric is None and row.bars:
        yield "It is averaged differently from ours: only limits on this exact metric are shown."
    # Without the dtype a number may be usual for one and not for another: it gets no verdict.
    by_place = _by_place(row)
    if by_place:
        places = "; ".join(f"{where} {', '.join(ranges)}" for where, ranges in by_place.items())
        yield f"Usual or not depends on the dtype (--dtype, not given): {places}."
    elif row.usual:
        usual = row.usual
        yield (
            f"{numbers.number(row.value)} is {usual.where} the range of the models measured so "
            f"far, {_span(usual.low, usual.high)} nats for {usual.who}."
        )
    if any(cause.fault for cause in row.made_by):
        yield "Faults have caused values of this size: look for one first."


def _of_limits(row: JudgedNumber) -> str:
    """How many limits hold; of a number without one, why there is none."""
    if row.bars:
        return tally(row.bars)
    if row.metric is not None:
        return f"There is no published limit for {METRICS[row.metric].label} alone."
    elsewhere = "it has no published limit"
    if row.limit_on is not None:
        label = METRICS[row.limit_on].label
        elsewhere = f"the limit that is published by its name is about {label} ({row.limit_on})"
    return f"It is {row.formula}: none of our metrics matches it, and {elsewhere}."


def _to_a_trace(study: DashboardNumbers) -> Iterator[tuple[str, str]]:
    """The command that makes a trace of the run, and the page that says how to record it."""
    recording = study.recording_page
    if study.needs_a_recorder:
        yield suggest("guide", recording), "record the run from inside, with its token ids"
        return
    form = ("--format", study.framework) if study.has_importer else ()
    line = suggest("import", "DUMP", *form, "--output", "run")
    yield line, "turn a dump of the run into a trace"
    if recording:
        yield suggest("guide", recording), "or record the run from inside"


def _next(study: DashboardNumbers) -> Facts:
    """How to get from a number to a trace, which shows the cause."""
    shows = ("--as", study.framework) if study.framework else ()
    lines = [
        *((line, _SHARPER) for line in study.lines_with_a_dtype),
        *_to_a_trace(study),
        (suggest("diagnose", "run"), "a mistake, or which setting?"),
        (suggest("report", "run", *shows), "the same number, and where the gap is"),
    ]
    for suspect in study.result.suspects:
        if suspect.test:
            first, *others = suspect.test
            lines.append((first, f"or without a dump: how much {suspect.setting} causes"))
            lines += [(line, "") for line in others]
            break
    return tuple(lines)
