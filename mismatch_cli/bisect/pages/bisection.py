"""The page of a search: a `ReportView`, which terminal and HTML print."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

from mismatch_cli.base import numbers
from mismatch_cli.base.json_form import from_json
from mismatch_cli.base.places import shown
from mismatch_cli.bisect.pages._bisection_screen import (
    DECODE_PREFILL,
    combined,
    command,
    cost,
    counts,
    makes_larger,
    screen,
)
from mismatch_cli.bisect.pages.bisection_models import (
    bookkeeping_section,
    modules_section,
    weights_section,
)
from mismatch_cli.bisect.ranking import LEAST
from mismatch_cli.bisect.ranking import Row as Ranked
from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.about import left_out_of, measured, settings_tables, who_facts
from mismatch_cli.report.excerpts import MovedPlace, moved_excerpts
from mismatch_cli.report.tables import (
    Col,
    Row,
    col,
    filled,
    metric_row,
    named,
    note_of,
    pairs_table,
    parts,
    percent,
    plain,
    share,
    table,
    text,
    value_of,
)
from mismatch_cli.report.view import Excerpt, MetricRow, ReportView, Section, Table
from mismatch_cli.trace.origin import About

_NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s; d = log π − log μ "
    "in nats. Every number compares two passes over the same tokens: a change of the gap is the "
    "mean with the change minus the mean without it. A share is the part of the recorded Σ|d| "
    "that disappears. Intervals cover 95 % over prompts."
)
_OWN = "mismatch-cli"
SHARE = Metric(
    "share",
    "share of the first cause",
    "(Σ|d| without the change − Σ|d| with it) / Σ|d| as recorded",
    "share",
    _OWN,
)
NOISE = Metric(
    "noise",
    "noise",
    "Σ|Δ| of a side against itself in other batches / Σ|d| as recorded; larger side",
    "share",
    _OWN,
)
UNEXPLAINED = Metric(
    "unexplained", "unexplained", "Σ|d| without the causes / Σ|d| as recorded", "share", _OWN
)
_ABS_D, _K3 = (
    "E|d| with the change − E|d| without it",
    "E(r − 1 − log r) with the change − without it",
)
_BEYOND = "share of tokens with |d| > ln 2, with the change − without it, in percentage points"
CHANGES = {
    "abs_d": Metric("change_abs_d", "Δ of mean |Δlog p|", _ABS_D, "nats", _OWN),
    "k3": Metric("change_k3", "Δ of k3", _K3, "nats", _OWN),
    "beyond_ln2": Metric("change_beyond_ln2", "Δ beyond ln 2, %", _BEYOND, "share", _OWN),
}
_SHARES = (
    "A share is the part of the recorded gap that disappears when one thing is changed, on the "
    "same tokens, with its interval over prompts. Shares of causes that overlap add up to more "
    "than the gap. The precision of both sides comes last: it is not a fault of either side and "
    "includes shares of the others."
)
_TESTED = (
    "Settings that were changed without clearly reducing the gap. A negative share means that "
    "the gap grows: roundings that matched on both sides no longer match."
)
_TRIANGLE = (
    "The distance between two passes over the same tokens, in nats on the average token. Noise "
    "is one side against itself: the engine one response at a time, the trainer in other "
    "micro-batches."
)
_TOKENS = 8  # of a cause, on the page
_ON_TERMINAL = 2
_DISTANCES = {
    "as_recorded": "engine and trainer, as recorded",
    "rollout_reference": "engine and trainer in float32",
    "trainer_reference": "trainer and itself in float32",
    "prefill_reference": "engine in one prefill and trainer in float32",
    "decode_prefill": "engine decoding and engine in one prefill",
    "rollout_noise": "engine in batches and one response at a time",
    "trainer_noise": "trainer in two micro-batch shapes",
}
_NEARER = {
    "rollout": "The engine is closer to float32 than the trainer.",
    "trainer": "The trainer is closer to float32 than the engine.",
}


def page(analysis: BisectionAnalysis) -> ReportView:
    """The causes first, then everything that was tried and measured (docs/json/bisect.md)."""
    result = analysis.result
    causes = [
        _cause_section(analysis, *cause)
        for cause in zip(analysis.causes, result["causes"], strict=True)
    ]
    outline = [
        Section("Causes", _causes_text(analysis), tables=filled(_causes(result["causes"], causes))),
        *causes,
        Section(
            "Ruled out",
            _TESTED,
            tables=filled(_tested(result["tested"]), _untried(result["untried"])),
        ),
        _triangle_section(result["triangle"]),
        bookkeeping_section(result),
        weights_section(analysis.models),
        modules_section(result),
        Section("Stages and legs", _legs_text(analysis), tables=(_stages(result), _legs(result))),
    ]
    return ReportView(
        title="What causes the gap?",
        about=(
            *who_facts(from_json(About, result["about"])),
            ("Measured on", _read_again(analysis)),
        ),
        notes=left_out_of(from_json(About, result["about"])),
        headline=_larger(result["tested"]),
        screen=screen(analysis),
        leading=_leading(analysis),
        outline=outline,
        settings=settings_tables(from_json(About, result["about"])),
        command=shown(command(analysis)),
        notation=_NOTATION,
    )


def _read_again(analysis: BisectionAnalysis) -> str:
    found = counts(analysis)
    return measured(SimpleNamespace(**found), numbers.things(int(found["tokens"]), "token"))


def _leading(analysis: BisectionAnalysis) -> tuple[MetricRow, ...]:
    gap = analysis.result["gap"]
    rows = [metric_row(METRICS["abs_d_mean"], gap["abs_d"]), metric_row(METRICS["k3"], gap["k3"])]
    if analysis.is_equal:
        return tuple(rows)
    for cause in analysis.result["causes"][:1]:
        rows.append(metric_row(SHARE, cause["share"], name=f"share of {cause['name']}"))
    if analysis.noise is not None:
        rows.append(metric_row(NOISE, analysis.noise))
    return (*rows, metric_row(UNEXPLAINED, analysis.unexplained))


def _causes_text(analysis: BisectionAnalysis) -> str:
    return " ".join(filter(None, (_SHARES, combined(analysis))))


def _larger(tested: Sequence[Row]) -> str:
    """The change that enlarges the gap most, in a sentence; empty where none clearly does."""
    larger = [row for row in tested if row["stage"] == 2 and makes_larger(row)]
    if not larger:
        return ""
    worst = min(larger, key=lambda row: row["share"]["value"])
    return (
        f"Not every change helps: {worst['change']} makes the gap "
        f"{share(-worst['share']['value'])} larger."
    )


def _causes(rows: Sequence[Row], sections: Sequence[Section]) -> Table:
    """Every cause with its effects; its name links to the tokens that it moves."""
    return table(
        "",
        rows,
        [
            named("cause", "name"),
            col("share of the gap, %", lambda row: percent(row["share"]), SHARE),
            *_effects(),
            col("left, nats", lambda row: numbers.number(row["left"]), optional=True),
            col("time", cost, optional=True),
            text("what to change", lambda row: row["change"]),
        ],
        note=(
            "Left: the mean |Δlog p| with the change. Time: seconds per response with the change "
            "÷ without it."
        ),
        row_links=tuple(section.anchor for section in sections),
    )


def _effects() -> Iterator[Col[Row]]:
    for measure, metric in CHANGES.items():
        show = percent if measure == "beyond_ln2" else plain
        yield col(
            metric.label, partial(_effect, measure, show), metric, optional=measure != "abs_d"
        )


def _effect(measure: str, show: Callable[[Row], str], row: Row) -> str:
    return show(row["effect"][measure])


def _tested(rows: Sequence[Row]) -> Table:
    return table(
        "",
        sorted(rows, key=lambda row: -abs(value_of(row["share"]) or 0.0)),
        [
            named("setting", "name"),
            text("changed to", lambda row: _value(row["better"])),
            col("share of the gap, %", lambda row: percent(row["share"]), SHARE),
            text("answer", _answer),
            *_effects(),
            col("time", cost, optional=True),
        ],
    )


def _untried(rows: Sequence[Row]) -> Table:
    return table(
        "Could not be tried here",
        rows,
        [
            text("setting", lambda row: f"{row['setting']} ({row['side']})"),
            text("changed to", lambda row: _value(row["better"])),
            named("why not", "why"),
        ],
    )


def _value(value: object) -> str:
    words = {None: numbers.MISSING, True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _answer(row: Row) -> str:
    """The answer that a share gives, in words."""
    removed = row["share"]
    value, low, high = parts(removed)
    if value is None:
        return "unknown"
    if value == 0 and not low and not high:
        return "changes nothing"
    if low is None or high is None:
        return (note_of(removed) or "too few prompts").removesuffix(": no interval")
    if high < 0:
        return "makes it larger" if value <= -LEAST else "makes it a little larger"
    if low <= 0:
        return "not distinguishable from 0"
    return f"less than {100 * LEAST:.0f} %" if value < LEAST else "explains more elsewhere"


def _cause_section(analysis: BisectionAnalysis, row: Ranked, cause: Row) -> Section:
    """Why it causes a gap, the commands that prove it, and the tokens that it moves most."""
    title = f"{cause['name']}: tokens that it moves"
    facts: list[tuple[str, str]] = [("Why", cause["cause"]), ("What to change", cause["change"])]
    facts += [("Parts", ", ".join(cause["parts"]))] * bool(cause["parts"])
    facts += [("On the same tokens", shown(line)) for line in cause["command"][:1]]
    facts += [("On new samples", shown(line)) for line in cause["command"][1:]]
    excerpts = _moved(analysis, row)
    effect = (
        f"The change removes {percent(cause['share'])} % of the gap; "
        f"{numbers.number(cause['left'])} nats are left."
    )
    if excerpts:
        effect += " Below: the tokens whose |log π − log μ| shrinks most, before → after."
    return Section(
        title,
        effect,
        tables=(pairs_table("", facts),),
        excerpts=excerpts,
        terminal_excerpts=_ON_TERMINAL,
    )


def _moved(analysis: BisectionAnalysis, row: Ranked) -> list[Excerpt]:
    tokens = [
        MovedPlace(*analysis.key(token.response), token.position, token.before, token.after)
        for token in analysis.moved(row, _TOKENS)
    ]
    return moved_excerpts(analysis.trace, tokens)


def _triangle_section(found: Row) -> Section:
    whole = value_of(found["as_recorded"]) or 0.0
    rows = [(label, found[key]) for key, label in _DISTANCES.items() if found[key]]
    distances = table(
        "",
        rows,
        [
            text("between", lambda row: row[0]),
            col("mean |difference|, nats", lambda row: plain(row[1])),
            col(
                "of the gap",
                lambda row: share((value_of(row[1]) or 0.0) / whole) if whole else numbers.MISSING,
            ),
        ],
    )
    why = DECODE_PREFILL.get(found["decode_prefill_is"] or "")
    said = (
        _TRIANGLE,
        _NEARER.get(found["nearer"] or "", ""),
        f"Decoding and prefill: {why}." if why else "",
    )
    return Section("Engine, trainer and float32", " ".join(filter(None, said)), tables=(distances,))


def _legs_text(analysis: BisectionAnalysis) -> str:
    return (
        "Each leg is one side with one change, kept as a trace in "
        f"{analysis.result['trace']}/legs. Other commands read it: `compare` two legs, `report` "
        "one."
    )


def _stages(result: Row) -> Table:
    return table(
        "Stages",
        result["stages"],
        [
            text("stage", lambda row: f"{row['stage']} {row['name']}"),
            named("status", "status"),
            col("seconds", lambda row: numbers.number(row["seconds"], 2)),
            named("why", "why", optional=True),
        ],
    )


def _legs(result: Row) -> Table:
    return table(
        "Legs",
        result["legs"],
        [
            text("leg", lambda row: row["what"]),
            text("side", lambda row: row["side"] or "both"),
            col("responses", lambda row: numbers.count(row["responses"])),
            col(
                "seconds",
                lambda row: (
                    numbers.number(row["seconds"], 2) if row["seconds"] else numbers.MISSING
                ),
            ),
            text("trace", lambda row: row["trace"], optional=True),
        ],
    )
