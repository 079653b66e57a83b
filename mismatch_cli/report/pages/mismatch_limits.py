"""Whether the gap of a trace is normal: the verdict, the numbers that decide, published limits, and
what others measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mismatch_cli.base import numbers
from mismatch_cli.limits.assess import (
    FLOOR,
    Assessment,
    LimitRow,
    MeasuredElsewhere,
    limit_sentences,
    strictest_first,
)
from mismatch_cli.limits.judge import EXCEEDED
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.metrics.pair_summary import MetricEstimate
from mismatch_cli.report.outline import Brief, MetricRow, Priority, Section, Table, Verdict
from mismatch_cli.report.pages._status import STATUS_WORDS, colour, sign, word
from mismatch_cli.report.preamble import DECIDING, LEADING
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    frameworks,
    in_words,
    table,
    text,
    times_noise,
)
from mismatch_cli.studies.mismatch import MismatchResult

_FAMILIES = {
    "dense": "dense models",
    "moe": "mixtures of experts",
    "": "all models (this one may be dense or MoE)",
}
_DIAGNOSE = (
    "No limit is universal: published ones differ by more than ten times. Most large gaps are "
    "bookkeeping errors, not arithmetic: run `mismatch-cli diagnose` to find them."
)
_NOISE = "× noise: multiples of the trainer's gap to itself in another batch shape"
_OF_PAIR = {"total": "stale", "staleness": "staleness alone", "mismatch": "equal weights"}
_MOST_ROWS = 7  # of a screen: beyond, numbers without a limit that are not leading give way


def verdict(assessment: Assessment) -> Verdict:
    """The gap beside what is expected, how many limits hold for each pair that has some, and which
    do not. Nothing is healthy that is larger than expected.
    """
    words, status = STATUS_WORDS[assessment.status]
    sentences = limit_sentences(assessment.bars) or ["No published limit is about this trace."]
    expected = assessment.expected
    if expected is not None:
        sentences.insert(0, expected.sentence)
        if expected.standing == "above" and status == "good":
            words, status = f"{words}, LARGER THAN EXPECTED", "mixed"
    return Verdict(words, " ".join(sentences), status)


def with_limit(row: MetricRow, limits: Sequence[LimitRow], pair: str) -> MetricRow:
    """A number of a pair beside the verdict, with the strictest published limit."""
    limit = _strictest(limits, row.metric.key, pair)
    if limit is None:
        return row
    words = f"limit {_bound(limit)}, {limit.publisher}"
    return replace(row, limit=words, status=colour(limit))


def limits_section(result: MismatchResult) -> Section:
    """The numbers compared with published limits and values; every row has its source."""
    assessment = result.verdict
    tables = [_deciding(result)]
    for pair in dict.fromkeys(row.pair for row in assessment.bars):
        tables.append(_published_limits(assessment, pair))
    if assessment.measured:
        tables.append(_measured(assessment))
    text = " ".join((*assessment.sentences, _DIAGNOSE))
    return Section("Is this normal?", text, tables=tuple(tables))


@dataclass(frozen=True)
class _Deciding:
    """A number that people act on, with its strictest published limit."""

    label: str
    metric: Metric
    estimate: MetricEstimate
    limit: LimitRow | None


def _deciding(result: MismatchResult) -> Table:
    """The metrics that people act on, and after them every other number that exceeds a limit."""
    rows = _measured_rows(result)
    noises = [row.estimate.noise for row in rows]
    columns: list[TextColumn[_Deciding]] = [
        text("", lambda row: row.label),
        col("value", lambda row: in_words(row.metric, row.estimate)[0]),
        col(
            "95 % interval",
            lambda row: in_words(row.metric, row.estimate)[1],
            priority=Priority.SPARE,
        ),
        text("strictest limit", _limit),
        text("logged by", lambda row: frameworks(row.metric), priority=Priority.SPARE),
    ]
    note = ""
    if any(noise and noise.times_floor is not None for noise in noises):
        columns.insert(3, col("× noise", lambda row: times_noise(row.estimate.noise)))
        note = _NOISE
    brief = replace(_fitting(rows), note=note)
    return table("The numbers that decide", rows, columns, note=note, brief=brief)


def _measured_rows(result: MismatchResult) -> list[_Deciding]:
    main, limits = result.main.pair, result.verdict.bars
    # Numbers of the other pairs come last, and only those that exceed a limit.
    # All of them are in the sections of these pairs.
    chosen = [(key, main) for key in DECIDING]
    chosen += [(row.metric, row.pair) for row in limits if row.standing == EXCEEDED]
    rows = []
    for key, pair in dict.fromkeys(chosen):
        metric, estimate = METRICS[key], result.pairs[pair].metrics[key]
        if estimate.value is not None:
            label = metric.label if pair == main else f"{metric.label}, {_OF_PAIR[pair]}"
            rows.append(_Deciding(label, metric, estimate, _strictest(limits, key, pair)))
    return rows


def _fitting(rows: Sequence[_Deciding]) -> Brief:
    """As many rows as a screen has room for: numbers without a limit that are not leading give
    way, the last ones first.
    """
    needed, spare = [], []
    for n, row in enumerate(rows):
        if row.limit is None and row.metric.key not in LEADING:
            spare.append(n)
        else:
            needed.append(n)
    shown = [*needed, *spare[: max(0, _MOST_ROWS - len(needed))]]
    return Brief(shown, counts_rest=False, fewest=len(needed))


def _strictest(limits: Sequence[LimitRow], key: str, pair: str) -> LimitRow | None:
    """The limit on a metric that decides: an exceeded one before others, else the smallest."""
    of_pair = [row for row in limits if row.metric == key and row.pair == pair]
    judged = strictest_first([row for row in of_pair if row.is_judged])
    if not judged:
        return None
    return judged[0]


def _limit(row: _Deciding) -> str:
    """`✔ 0.005 verl`: the publisher by the first word of its name."""
    if row.limit is None:
        return ""
    return f"{sign(row.limit)} {_bound(row.limit)} {row.limit.publisher}"


def _published_limits(assessment: Assessment, pair: str) -> Table:
    """The limits on a pair, those that are exceeded first."""
    with_staleness = ", with staleness (the trainer as it is now)" if pair == "total" else ""
    return table(
        f"Published limits{with_staleness}",
        strictest_first([row for row in assessment.bars if row.pair == pair]),
        [
            text("published by", lambda row: f"{row.who} ({row.source})"),
            text("status", word, priority=Priority.ALWAYS),
            text("healthy if", _limits),
            col("this trace", _measured_here),
        ],
    )


def _bound(limit: LimitRow) -> str:
    """`0.005`, `±0.1`, `0.5 to 2`: shorter than in a sentence."""
    return limit.text.removeprefix("≤ ").removeprefix("within ")


def _measured_here(row: LimitRow) -> str:
    """A number with its interval; one that was not measured is a dash."""
    value, interval = in_words(METRICS[row.metric], row.estimate)
    return value if interval == numbers.MISSING else f"{value} {interval}"


def _limits(row: LimitRow) -> str:
    """`mean |π − μ| ≤ 0.005; broken beyond 0.01`."""
    healthy = f"{METRICS[row.metric].label} {row.text}"
    if row.broken == row.healthy:
        return healthy
    return f"{healthy}; broken beyond {row.broken:g}"


def _measured(assessment: Assessment) -> Table:
    return table(
        "Measured by others",
        assessment.measured,
        [
            text("setup", _setup),
            text("metric", lambda row: METRICS[row.metric].label),
            col("reported", _range),
            col("this trace", lambda row: _in_words(row.metric, row.value)),
        ],
        note=f"The closest published values, among {_FAMILIES[assessment.family]}.",
    )


def _setup(row: MeasuredElsewhere) -> str:
    state = ", broken" if row.state else ""
    if row.pair == FLOOR:
        state = ", the trainer's own noise"
    source = "; ".join(filter(None, (row.source, row.derived)))
    return f"{row.model}: {row.setup}{state} ({source})"


def _range(row: MeasuredElsewhere) -> str:
    low, high = _in_words(row.metric, row.low), _in_words(row.metric, row.high)
    return low if low == high else f"{low} – {high}"


def _in_words(metric: str, value: float | None) -> str:
    if METRICS[metric].agreement == 1:
        return numbers.near(value, 1)
    return numbers.number(value)
