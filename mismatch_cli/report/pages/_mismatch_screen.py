"""The screen of a trace: its gap, the verdict and what to type next."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.limits.assess import ABOVE, BETWEEN, HEALTHY, UNDECIDED, WITHOUT_INTERVAL
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.about import DECIDING, LEADING, left_out, subject_lines
from mismatch_cli.report.pages._status import SIGNS, STATUS_WORDS, counted
from mismatch_cli.report.pages.mismatch_routing import routing_remark
from mismatch_cli.report.tables import Row, col, frameworks, in_words, metric_row, span, table, text
from mismatch_cli.report.view import (
    Excerpt,
    Facts,
    MetricRow,
    Profile,
    Screen,
    Status,
    Table,
    Verdict,
)
from mismatch_cli.studies.mismatch import MismatchAnalysis
from mismatch_cli.studies.study import typed

_STATUS: dict[str, Status] = {HEALTHY: "good", BETWEEN: "mixed", ABOVE: "bad", UNDECIDED: "mixed"}
_SHORT = re.compile(r",| (?:FAQ|CI|blog|nightly|rollout_corr|Ascend)")
_NOISE = "× noise: multiples of the trainer's gap to itself in another batch shape"
_OF_PAIR = {"total": "With staleness, ", "staleness": "For staleness alone, "}


def screen(study: MismatchAnalysis, worst: Sequence[Excerpt]) -> Screen:
    """Whether the gap is normal, where it is, and the worst tokens."""
    summary = study.result
    main, verdict = next(iter(summary["pairs"].values())), summary["verdict"]
    suspects = summary["suspects"] if verdict["status"] != HEALTHY else []
    return Screen(
        subject=subject_lines(summary["about"], main["counts"]),
        notes=left_out(summary),
        tables=(_deciding(main, verdict["bars"]),),
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
            limit=f"limit {limit['healthy']:g}, {_by(limit)}",
            status=_STATUS[limit["standing"]],
        )

    return tuple(map(row, LEADING))


def _deciding(pair: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> Table:
    """The metrics that people act on, each with the strictest published limit."""
    rows = [
        {"metric": METRICS[key], "found": found, "limit": _strictest(limits, key, pair["pair"])}
        for key in DECIDING
        if (found := pair["metrics"][key])["value"] is not None
    ]
    noise = any(row["found"].get("times_floor") is not None for row in rows)
    return table(
        "",
        rows,
        [
            text("", lambda row: row["metric"].label),
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


def _times_noise(found: Mapping[str, Any]) -> str:
    return numbers.times(found.get("times_floor"), found.get("times_floor_range"))


def _strictest(
    limits: Sequence[Mapping[str, Any]], key: str, pair: str
) -> Mapping[str, Any] | None:
    of_metric = [row for row in limits if row["metric"] == key and row["pair"] == pair]
    return min(of_metric, key=lambda row: float(row["healthy"]), default=None)


def _limit(row: Row) -> str:
    """`✔ 0.005 verl`: the publisher by the first part of its name."""
    limit = row["limit"]
    return "" if limit is None else f"{SIGNS[limit['standing']]} {limit['healthy']:g} {_by(limit)}"


def _by(limit: Mapping[str, Any]) -> str:
    return _SHORT.split(limit["who"])[0]


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
    bars = verdict["bars"]
    exceeded = {row["pair"] for row in bars if row["standing"] == ABOVE}
    pairs = sorted(
        dict.fromkeys(row["pair"] for row in bars), key=lambda pair: pair not in exceeded
    )
    found = [counted([row for row in bars if row["pair"] == pair]) for pair in pairs]
    sentences = [f"{_OF_PAIR.get(pair, '')}{text}" for pair, text in zip(pairs, found, strict=True)]
    if any(row["low"] is None and row["standing"] == UNDECIDED for row in bars):
        sentences.append(
            f"Undecided values come from too few prompts: they may be {WITHOUT_INTERVAL:g} times "
            "as large, or as small."
        )
    sentences = sentences or ["There is no published limit for what was measured here."]
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
        (suggest("report", *runs, "--as", "all"), "the numbers on your framework's dashboard"),
        (suggest("report", *runs, "--full"), "every metric, bin and position"),
    )
