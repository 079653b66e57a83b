"""The page of a search: an `Outline`, which terminal and HTML print."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import shorten

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.bisect.decoding import (
    DECODING_FARTHER,
    EQUAL,
    PREFILL_FARTHER,
    ROUNDING,
    UNDECIDED,
)
from mismatch_cli.bisect.pages.bisection_models import (
    bookkeeping_section,
    modules_remark,
    modules_section,
    weights_section,
)
from mismatch_cli.bisect.ranking import EXPLAINED, LEAST
from mismatch_cli.bisect.ranking import ExperimentEffects as Ranked
from mismatch_cli.bisect.studies.bisection import BisectionAnalysis, in_percent
from mismatch_cli.bisect.studies.bisection_result import (
    BisectionResult,
    CauseRow,
    StageRow,
    Triangle,
    UntriedRow,
)
from mismatch_cli.metrics.estimate import NO_SPREAD, Estimate
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.excerpts import MovedPlace, moved_excerpts
from mismatch_cli.report.outline import (
    Brief,
    Excerpt,
    Facts,
    MetricRow,
    Outline,
    Priority,
    Section,
    Status,
    Table,
    Verdict,
)
from mismatch_cli.report.preamble import (
    about_facts,
    left_out_of,
    settings_tables,
    subject_lines,
)
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    filled,
    metric_row,
    number,
    pairs_table,
    percent,
    plain,
    share,
    table,
    text,
)

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
ABS_D = Metric(
    "change_abs_d",
    "Δ of mean |Δlog p|",
    "E|d| with the change − E|d| without it",
    "nats",
    _OWN,
)
K3 = Metric(
    "change_k3",
    "Δ of k3",
    "E(r − 1 − log r) with the change − without it",
    "nats",
    _OWN,
)
BEYOND = Metric(
    "change_beyond_ln2",
    "Δ beyond ln 2, %",
    "share of tokens with |d| > ln 2, with the change − without it, in percentage points",
    "share",
    _OWN,
)
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
_MOST = 6  # causes on a screen
_LARGER = 3  # settings that make it larger, in a remark
_MOSTLY = 0.5  # of the gap
_REASON = 64  # letters
_TOKENS = 8  # of a cause, on the page
_ON_TERMINAL = 2
_WHERE_PROVED = ("On the same tokens", "On new samples")  # by the commands of a cause
_DECODE_PREFILL = {
    ROUNDING: "kernels for few rows add in a different order; both are as far from float32",
    DECODING_FARTHER: "decoding is farther from float32; look at the KV cache",
    PREFILL_FARTHER: "the prefill is farther from float32",
    UNDECIDED: "rounding and a fault cannot be told apart here",
}
_NEARER = {
    "rollout": "the engine is closer to float32",
    "trainer": "the trainer is closer to float32",
}


def page(analysis: BisectionAnalysis) -> Outline:
    """The causes first, then everything that was tried and measured (docs/json/bisect.md)."""
    result = analysis.result
    ranked = zip(analysis.causes, result.causes, strict=True)
    causes = [_cause_section(cause, _excerpts_of(analysis, row)) for row, cause in ranked]
    answer, status = _answer(analysis)
    sentences = " ".join([result.verdict, *_explained_together(analysis)])
    return Outline(
        title="What causes the gap?",
        about=about_facts(result.about, result),
        subject=subject_lines(result.about, result),
        notes=left_out_of(result.about),
        leading=_leading(analysis),
        verdict=Verdict(answer, sentences, status),
        remarks=tuple(remark for remark in _remarks(result) if remark[1]),
        next=_next(analysis),
        parts=[
            Section("Causes", _SHARES, tables=filled(_causes(result.causes, causes))),
            *causes,
            _ruled_out(result),
            _triangle_section(result.triangle),
            bookkeeping_section(result),
            weights_section(analysis.models),
            modules_section(result),
            _legs_section(result),
        ],
        settings=settings_tables(result.about),
        command=shorten_paths(_command(analysis)),
        notation=_NOTATION,
    )


def _answer(analysis: BisectionAnalysis) -> tuple[str, Status]:
    """How the models differ comes first, then what was measured."""
    if analysis.is_equal:
        return "NO GAP", "good"
    of_shares, status = _of_shares(analysis)
    answers = []
    # Whatever the shares say, different models and an unfinished search are bad news.
    if analysis.differences:
        answers.append("THE MODELS DIFFER")
        status = "bad"
    if of_shares:
        answers.append(of_shares)
    if not analysis.is_finished:
        answers.append("NOT FINISHED")
        status = "bad"
    return ", ".join(answers), status


def _of_shares(analysis: BisectionAnalysis) -> tuple[str, Status]:
    """What the shares say; nothing where no cause was named and the models or the budget say
    why.
    """
    named, noise = len(analysis.named), _value(analysis.noise)
    if named:
        causes = f"{numbers.things(named, 'cause').upper()} FOUND"
        if _value(analysis.unexplained) <= max(EXPLAINED, noise):
            return causes, "mixed"
        if analysis.is_finished:
            causes += ", NOT ALL EXPLAINED"
        return causes, "bad"
    if analysis.floor is not None:
        return "PRECISION ONLY", "mixed"
    if noise >= _MOSTLY:
        return "MOSTLY NOISE", "mixed"
    if analysis.differences or not analysis.is_finished:
        return "", "bad"
    return "NO CAUSE FOUND", "bad"


def _value(estimate: Estimate | None) -> float:
    """The value, 0 where there is none."""
    return 0.0 if estimate is None else estimate.value or 0.0


def _explained_together(analysis: BisectionAnalysis) -> Iterator[str]:
    """What the causes explain together, and whether their shares overlap."""
    together, overlap = analysis.result.together, analysis.overlap or 0.0
    if together is not None and not analysis.is_equal:
        settings = " and ".join(together.settings)
        yield f"Together {settings} explain {in_percent(together.share)} of the gap."
    if overlap > LEAST:
        yield (
            f"The shares of all causes overlap: their sum exceeds what they explain together by "
            f"{100 * overlap:.0f} % of the gap."
        )


def _leading(analysis: BisectionAnalysis) -> tuple[MetricRow, ...]:
    result = analysis.result
    rows = [
        metric_row(METRICS["abs_d_mean"], result.gap.abs_d),
        metric_row(METRICS["k3"], result.gap.k3),
    ]
    if analysis.is_equal:
        return tuple(rows)
    if result.noise is not None:
        rows.append(metric_row(NOISE, result.noise))
    return (*rows, metric_row(UNEXPLAINED, result.unexplained))


def _remarks(result: BisectionResult) -> Iterator[tuple[str, str]]:
    """What else was tried, the modules, the distances and the stages; empty where there is none."""
    larger = sorted(filter(_makes_larger, result.tested), key=lambda row: _value(row.share))
    yield "Makes it larger", "; ".join(map(_larger, larger[:_LARGER]))
    causes = {row.setting for row in result.causes}
    dismissed = []
    for row in result.tested:
        # Stage 3 has a remark of its own.
        if row.stage < 3 and row.setting not in causes and not _makes_larger(row):
            dismissed.append(row)
    undecided = [row.setting for row in dismissed if _is_undecided(row.share)]
    settings = [row.setting for row in dismissed]
    yield "Not a cause", _listed_once(name for name in settings if name not in undecided)
    yield "Undecided", _listed_once(undecided)
    yield "Not tried", _listed_once(row.setting for row in result.untried)
    yield "Modules", modules_remark(result.modules)
    yield from _distances(result.triangle)
    yield "Stages", " · ".join(_stages_in_brief(result.stages))


def _listed_once(settings: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(settings))


def _makes_larger(row: CauseRow) -> bool:
    """Whether a change clearly enlarges the gap by enough to mention."""
    value, high = row.share.value, row.share.high
    return value is not None and value <= -LEAST and (high is None or high < 0)


def _is_undecided(share: Estimate) -> bool:
    """Whether a share is unknown, or too large to be dismissed without an interval."""
    if share.value is None:
        return True
    return share.low is None and share.note != NO_SPREAD and share.value >= LEAST


def _larger(row: CauseRow) -> str:
    setting = row.name if row.better is None else f"{row.name} = {row.better}"
    return f"{setting}, +{-100 * _value(row.share):.0f} %"


def _distances(triangle: Triangle) -> Iterator[tuple[str, str]]:
    """Distances in lines: the gap and the noise, decoding against prefill, and both sides
    against float32.
    """
    gap = f"{numbers.number(triangle.as_recorded.value, 2)} nats"
    noise = _sides(triangle.rollout_noise, triangle.trainer_noise)
    if noise:
        gap += f"; noise: {noise}"
    yield "Engine – trainer", gap
    if triangle.decode_prefill is not None:
        reason = _decode_prefill(triangle.decode_prefill, triangle.decode_prefill_is)
        yield "Decode – prefill", reason
    if triangle.trainer_reference is not None:
        both = f"{_sides(triangle.rollout_reference, triangle.trainer_reference)} nats"
        if triangle.nearer is not None:
            both += f": {_NEARER[triangle.nearer]}"
        yield "To float32", both


def _sides(engine: Estimate | None, trainer: Estimate | None) -> str:
    """`engine 0.012, trainer 0.0041`; a side without an estimate is left out."""
    sides = []
    for side, estimate in (("engine", engine), ("trainer", trainer)):
        if estimate is not None:
            sides.append(f"{side} {numbers.number(estimate.value, 2)}")
    return ", ".join(sides)


def _decode_prefill(apart: Estimate, reason: str | None) -> str:
    """How far the engine's two ways to read the same tokens are apart, and why."""
    nats = f"{numbers.number(apart.value, 2)} nats"
    if reason == EQUAL:
        return f"{nats}: the engine decodes as it prefills"
    if reason is None:
        return f"{nats}, the engine alone"
    return f"{nats}, the engine alone: {_DECODE_PREFILL[reason]}"


def _stages_in_brief(rows: Sequence[StageRow]) -> Iterator[str]:
    """Each stage with its seconds; runs of skipped stages with the reason."""
    for why, stages in groupby(rows, key=_why_not):
        if why:
            yield f"{', '.join(row.name for row in stages)}: {_clause(why)}"
        else:
            for row in stages:
                yield f"{row.name} {numbers.number(row.seconds, 2)} s"


def _why_not(row: StageRow) -> str:
    """Why a stage was not run; empty if it was."""
    if row.is_done:
        return ""
    return row.why or row.status


def _clause(text: str) -> str:
    """A text up to a colon, a bracket or an alternative, as far as there is room."""
    for end in (": ", " (", ", or "):
        text = text.partition(end)[0]
    return shorten(text, _REASON, placeholder="…")


def _command(analysis: BisectionAnalysis, *flags: str) -> str:
    """The command that shows a search again from what it has measured."""
    return suggest("bisect", "--output", analysis.folder, "--resume", *flags)


def _next(analysis: BisectionAnalysis) -> Facts:
    lines = [(_command(analysis, "--full"), "all effects and legs, and the tokens that move")]
    if not analysis.is_finished:
        budget = analysis.larger_budget
        flags = () if budget is None else ("--budget", f"{budget:g}")
        lines.insert(0, (_command(analysis, *flags), "test the rest: nothing is read twice"))
    for row in analysis.result.causes[:1]:
        shows = (f"the effect of {row.setting} on the same tokens", "the same on new samples")
        lines += zip(row.command, shows, strict=False)
    return tuple(lines)


def _causes(rows: Sequence[CauseRow], sections: Sequence[Section]) -> Table:
    """Every cause with its effects; its name links to the tokens that it moves."""
    return table(
        "",
        rows,
        [
            text("cause", lambda row: row.name),
            _SHARE_OF_GAP,
            *_EFFECTS,
            col("left, nats", lambda row: number(row.left), priority=Priority.SPARE),
            _TIME,
            text("what to change", lambda row: _clause(row.change)),
        ],
        note=(
            "Left: the mean |Δlog p| with the change. Time: seconds per response with the change "
            "÷ without it."
        ),
        row_links=tuple(section.anchor for section in sections),
        brief=Brief.first(_MOST),
    )


def _time(row: CauseRow) -> str:
    """The factor by which the change slows a response."""
    return numbers.MISSING if row.cost is None else numbers.times(row.cost.factor)


_SHARE_OF_GAP: TextColumn[CauseRow] = col("share, %", lambda row: percent(row.share), SHARE)
_EFFECTS: tuple[TextColumn[CauseRow], ...] = (
    col(ABS_D.label, lambda row: plain(row.effect.abs_d), ABS_D, priority=Priority.FULL),
    col(K3.label, lambda row: plain(row.effect.k3), K3, priority=Priority.FULL),
    col(BEYOND.label, lambda row: percent(row.effect.beyond_ln2), BEYOND, priority=Priority.FULL),
)
_TIME: TextColumn[CauseRow] = col("time", _time, priority=Priority.SPARE)


def _ruled_out(result: BisectionResult) -> Section:
    tested = table(
        "",
        sorted(result.tested, key=lambda row: -abs(_value(row.share))),
        [
            text("setting", lambda row: row.name),
            text("changed to", _changed_to),
            _SHARE_OF_GAP,
            text("answer", _share_in_words),
            *_EFFECTS,
            _TIME,
        ],
    )
    untried = table(
        "Could not be tried here",
        result.untried,
        [
            text("setting", lambda row: f"{row.setting} ({row.side})"),
            text("changed to", _changed_to),
            text("why not", lambda row: row.why),
        ],
    )
    return Section("Ruled out", _TESTED, tables=filled(tested, untried))


def _changed_to(row: CauseRow | UntriedRow) -> str:
    words = {"None": numbers.MISSING, "True": "yes", "False": "no"}
    return words.get(str(row.better), str(row.better))


def _share_in_words(row: CauseRow) -> str:
    """The answer that a share gives."""
    value, low, high = row.share.value, row.share.low, row.share.high
    if value is None:
        return "unknown"
    if value == 0 and not low and not high:
        return "changes nothing"
    if low is None or high is None:
        return (row.share.note or "too few prompts").removesuffix(": no interval")
    if high < 0:
        return "makes it larger" if value <= -LEAST else "makes it a little larger"
    if low <= 0:
        return "not distinguishable from 0"
    if value < LEAST:
        return f"less than {100 * LEAST:.0f} %"
    # A notable share that is not a cause: another change of the setting removes more.
    return "explains more elsewhere"


def _cause_section(cause: CauseRow, excerpts: Sequence[Excerpt]) -> Section:
    """Why it causes a gap, the commands that prove it, and the tokens that it moves most."""
    facts = [
        ("Why", cause.cause),
        ("What to change", cause.change),
        ("Parts", ", ".join(cause.parts)),
    ]
    facts += zip(_WHERE_PROVED, map(shorten_paths, cause.command), strict=False)
    effect = (
        f"The change removes {percent(cause.share)} % of the gap; {number(cause.left)} nats are "
        "left."
    )
    if excerpts:
        effect += " Below: the tokens whose |log π − log μ| shrinks most, before → after."
    return Section(
        f"{cause.name}: tokens that it moves",
        effect,
        tables=(pairs_table("", [fact for fact in facts if fact[1]]),),
        excerpts=excerpts,
        terminal_excerpts=_ON_TERMINAL,
    )


def _excerpts_of(analysis: BisectionAnalysis, row: Ranked) -> list[Excerpt]:
    tokens = [
        MovedPlace(*analysis.key(token.response), token.position, token.before, token.after)
        for token in analysis.moved(row, _TOKENS)
    ]
    return moved_excerpts(analysis.trace, tokens)


def _triangle_section(triangle: Triangle) -> Section:
    gap = triangle.as_recorded.value

    def of_gap(distance: Estimate) -> str:
        # A leg without any number, as from an overflow, has no distance, not one of 0.
        return share(distance.value / gap if gap and distance.value is not None else None)

    distances = table(
        "",
        (triangle.between | triangle.within).items(),
        [
            text("between", lambda row: row[0]),
            col("mean |difference|, nats", lambda row: plain(row[1])),
            col("of the gap", lambda row: of_gap(row[1])),
        ],
    )
    sentences = [f"{label}: {distance}." for label, distance in _distances(triangle)]
    intro = " ".join([_TRIANGLE, *sentences])
    return Section("Engine, trainer and float32", intro, tables=(distances,))


def _legs_section(result: BisectionResult) -> Section:
    stages = table(
        "Stages",
        result.stages,
        [
            text("stage", lambda row: f"{row.stage} {row.name}"),
            text("status", lambda row: row.status),
            col("seconds", lambda row: numbers.number(row.seconds, 2)),
            text("why", lambda row: row.why, priority=Priority.SPARE),
        ],
    )
    legs = table(
        "Legs",
        result.legs,
        [
            text("leg", lambda row: row.what),
            text("side", lambda row: row.side or "both"),
            col("responses", lambda row: numbers.count(row.responses)),
            col("seconds", lambda row: numbers.number(row.seconds or None, 2)),
            text("trace", lambda row: row.trace, priority=Priority.SPARE),
        ],
    )
    return Section(
        "Stages and legs",
        f"Each leg is one side with one change, kept as a trace in {result.trace}/legs. Other "
        "commands read it: `compare` two legs, `report` one.",
        tables=(stages, legs),
    )
