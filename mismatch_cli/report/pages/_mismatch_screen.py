"""The screen of a trace: its gap, the verdict and what to type next."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.limits.assess import limit_sentences, strictest_first
from mismatch_cli.limits.judge import EXCEEDED, HEALTHY, UNJUDGED
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.about import DECIDING, LEADING, left_out, subject_lines
from mismatch_cli.report.pages._status import STATUS_WORDS, colour, sign
from mismatch_cli.report.pages.mismatch_routing import routing_remark
from mismatch_cli.report.tables import Row, col, frameworks, in_words, metric_row, span, table, text
from mismatch_cli.report.view import (
    Excerpt,
    Facts,
    MetricRow,
    Profile,
    Screen,
    Table,
    Verdict,
)
from mismatch_cli.studies.mismatch import MismatchAnalysis
from mismatch_cli.studies.study import typed

_NOISE = "× noise: multiples of the trainer's gap to itself in another batch shape"
_OF_PAIR = {"total": "stale", "staleness": "staleness alone", "mismatch": "equal weights"}
_MOST_ROWS = 7  # of a screen: beyond, numbers without a limit that are not leading give way


def screen(study: MismatchAnalysis, worst: Sequence[Excerpt]) -> Screen:
    """Whether the gap is normal, where it is, and the worst tokens."""
    summary = study.result
    main, verdict = next(iter(summary["pairs"].values())), summary["verdict"]
    suspects = summary["suspects"] if verdict["status"] != HEALTHY else []
    return Screen(
        subject=subject_lines(summary["about"], main["counts"]),
        notes=left_out(summary),
        tables=(_deciding(summary["pairs"], verdict["bars"]),),
        remarks=(*_remarks(summary), *_suspect(suspects)),
        profiles=_profiles(main),
        excerpts=tuple(replace(token, title=f"Worst token {token.title}") for token in worst),
        verdict=_verdict(verdict),
        next=(*_test(suspects), *_next(study)),
    )


def leading(pair: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> tuple[MetricRow, ...]:
    """The numbers beside the verdict, each with the strictest published limit."""

    def row(key: str) -> MetricRow:
        found, limit = (
            metric_row(METRICS[key], pair["metrics"][key]),
            _strictest(limits, key, pair["pair"]),
        )
        if limit is None:
            return found
        return replace(
            found,
            limit=f"limit {_bound(limit)}, {limit['publisher']}",
            status=colour(limit),
        )

    return tuple(map(row, LEADING))


def _deciding(pairs: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> Table:
    """The metrics that people act on, each with its strictest published limit, and after them
    every other number that exceeds one.
    """
    rows = _fitting(_judged(pairs, limits))
    noise = any(row["found"].get("times_floor") is not None for row in rows)
    return table(
        "",
        rows,
        [
            text("", lambda row: row["label"]),
            col("value", lambda row: in_words(row["metric"], row["found"])[0]),
            col(
                "95 % interval", lambda row: in_words(row["metric"], row["found"])[1], optional=True
            ),
            *([col("× noise", lambda row: _times_noise(row["found"]))] if noise else []),
            text("strictest limit", _limit),
            text("logged by", lambda row: frameworks(row["metric"]), optional=True),
        ],
        note=_NOISE if noise else "",
    )


def _judged(pairs: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Those numbers, as far as they were measured."""
    main = next(iter(pairs))
    exceeded = [(row["metric"], row["pair"]) for row in limits if row["standing"] == EXCEEDED]
    rows = [
        {
            "label": METRICS[key].label + _beside(pair, main),
            "metric": METRICS[key],
            "found": pairs[pair]["metrics"][key],
            "limit": _strictest(limits, key, pair),
        }
        for key, pair in dict.fromkeys([*((key, main) for key in DECIDING), *exceeded])
    ]
    return [row for row in rows if row["found"]["value"] is not None]


def _fitting(rows: Sequence[Row]) -> list[Row]:
    """As many rows as a screen has room for: the last ones without a limit give way, but for the
    leading metrics.
    """
    spare = [row for row in rows if row["limit"] is None and row["metric"].key not in LEADING]
    kept = max(0, len(spare) - max(0, len(rows) - _MOST_ROWS))
    return [row for row in rows if row not in spare[kept:]]


def _beside(pair: str, main: str) -> str:
    """Which pair a number is of, unless it is the one that the screen is about."""
    return "" if pair == main else f", {_OF_PAIR[pair]}"


def _times_noise(found: Mapping[str, Any]) -> str:
    return numbers.times(found.get("times_floor"), found.get("times_floor_range"))


def _strictest(
    limits: Sequence[Mapping[str, Any]], key: str, pair: str
) -> Mapping[str, Any] | None:
    """The limit on a metric that decides: an exceeded one before others, else the smallest."""
    of_metric = [row for row in limits if row["metric"] == key and row["pair"] == pair]
    judged = [row for row in of_metric if row["standing"] != UNJUDGED]
    return next(iter(strictest_first(judged)), None)


def _limit(row: Row) -> str:
    """`✔ 0.005 verl`: the publisher by the first part of its name."""
    limit = row["limit"]
    if limit is None:
        return ""
    return f"{sign(limit)} {_bound(limit)} {limit['publisher']}"


def _bound(limit: Mapping[str, Any]) -> str:
    """`0.005`, `±0.1`, `0.5 to 2`: shorter than in a sentence."""
    return str(limit["text"]).removeprefix("≤ ").removeprefix("within ")


def _remarks(summary: Mapping[str, Any]) -> Facts:
    pairs = summary["pairs"]
    main, total = next(iter(pairs.values())), pairs.get("total")
    responses = [f"reward {_value(main, 'reward_mean')}", f"length {_value(main, 'length_mean')}"]
    responses += [f"truncated {_value(main, 'truncated_share')}"]
    responses += [f"no signal in {_value(main, 'equal_rewards_share')} of groups"]
    remarks = [("Responses", " · ".join(part for part in responses if numbers.MISSING not in part))]
    if total is not None and total is not main:
        stale = f"mean |π − μ| {_value(total, 'tv_binary_mean')}"
        outside = f"{_value(total, 'ratio_outside_0.8_1.28')} outside [0.8, 1.28]"
        remarks.insert(0, ("With staleness", f"{stale}, {outside}"))
    return (
        *((label, value) for label, value in remarks if value),
        *routing_remark(summary["routing"]),
    )


def _value(pair: Mapping[str, Any], key: str) -> str:
    return in_words(METRICS[key], pair["metrics"][key])[0]


def _profiles(pair: Mapping[str, Any]) -> tuple[Profile, ...]:
    bins = [row for row in pair["volatility"] if row["tokens"]]
    profiles = []
    if len(bins) > 1:
        ends = f"{bins[0]['mu_low']:g}", f"{bins[-1]['mu_high']:g}"
        profiles.append(_profile("Where, by μ", bins, "ratio_sd", *ends, "SD of the ratio"))
    if len(positions := pair["positions"]) > 1:
        ends = str(positions[0]["first"]), str(positions[-1]["last"])
        profiles.append(_profile("by position", positions, "abs_d_mean", *ends, "mean |Δlog p|"))
    if len(turns := pair["turns"]) > 1:
        profiles.append(
            _profile("by turn", turns, "abs_d_mean", "1", span(turns[-1]), "mean |Δlog p|")
        )
    return tuple(profiles)


def _profile(
    title: str, rows: Sequence[Row], key: str, first: str, last: str, what: str
) -> Profile:
    values = tuple(row[key]["value"] for row in rows)
    found = [value for value in values if value is not None]
    ends = (
        f"{numbers.number(min(found), 2)} to {numbers.number(max(found), 2)}"
        if found
        else numbers.MISSING
    )
    return Profile(title, values, first, last, f"{what}, {ends}")


def _verdict(verdict: Mapping[str, Any]) -> Verdict:
    """The gap beside what is expected, how many limits hold for each pair that has some, and which
    do not.
    """
    words, status = STATUS_WORDS[verdict["status"]]
    sentences = limit_sentences(verdict["bars"]) or ["No published limit is about this trace."]
    of_limits = Verdict(words, " ".join(sentences), status)
    return _beside_expected(of_limits, verdict["expected"] or {})


def _beside_expected(verdict: Verdict, expected: Mapping[str, Any]) -> Verdict:
    """The gap beside what is expected first; nothing is healthy that is larger."""
    words, status = verdict.words, verdict.status
    if expected.get("standing") == "above" and status == "good":
        words, status = f"{words}, LARGER THAN EXPECTED", "mixed"
    return Verdict(words, f"{expected.get('sentence', '')} {verdict.text}".lstrip(), status)


def _suspect(suspects: Sequence[Mapping[str, Any]]) -> Facts:
    """The first suspected setting, named as in `compare`."""
    return tuple(("Suspect", f"{_setting(first)}: {first['why']}") for first in suspects[:1])


def _setting(suspect: Mapping[str, Any]) -> str:
    return f"{suspect['setting'].rpartition('.')[2]} = {suspect['value']}"


def _test(suspects: Sequence[Mapping[str, Any]]) -> Facts:
    """The commands that measure how much of the gap the first suspect causes."""
    if not suspects:
        return ()
    first, *rest = suspects[0]["test"]
    return (
        (first, f"how much of the gap {_setting(suspects[0])} causes"),
        *((line, "") for line in rest),
    )


def _next(study: MismatchAnalysis) -> Facts:
    runs = typed(study.traces)
    return (
        (suggest("diagnose", *runs), "a mistake, or which setting?"),
        (suggest("clipstats", *runs), "what PPO and DPPO would block"),
        (suggest("report", *runs, "--as", "all"), "as your framework logs them"),
        (suggest("report", *runs, "--full"), "every metric, bin and position"),
    )
