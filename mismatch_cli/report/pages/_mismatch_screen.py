"""The answer to "how far apart?": a screen of a trace's gap, with the verdict and what to type next."""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_cli import numbers
from mismatch_cli.dialects import logged_as
from mismatch_cli.errors import suggest
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.about import left_out, subject_lines
from mismatch_cli.report.tables import Row, col, in_words, table, text
from mismatch_cli.report.view import Excerpt, Facts, Profile, Screen, Status, Table, Verdict
from mismatch_cli.studies.mismatch import MismatchAnalysis
from mismatch_cli.studies.study import typed
from mismatch_cli.verdict.assess import ABOVE, BETWEEN, HEALTHY, MIXED, UNDECIDED

_DECIDING = ("tv_binary_mean", "abs_d_mean", "abs_d_p99", "k3", "ratio_outside_0.8_1.28", "sequence_d_sd")
_SEEN = {HEALTHY: "✔", BETWEEN: "!", ABOVE: "✘", UNDECIDED: "?"}
_WORDS: dict[str, tuple[str, Status]] = {
    HEALTHY: ("HEALTHY", "good"),
    UNDECIDED: ("UNDECIDED", "mixed"),
    MIXED: ("ABOVE SOME LIMITS", "mixed"),
    ABOVE: ("ABOVE EVERY LIMIT", "bad"),
    "": ("NO LIMIT APPLIES", ""),
}


def screen(study: MismatchAnalysis, worst: Sequence[Excerpt]) -> Screen:
    """What decides whether the gap is normal, where it sits, and the worst token."""
    summary = study.result
    main = next(iter(summary["pairs"].values()))
    return Screen(
        subject=subject_lines(summary["about"], main["counts"]),
        notes=left_out(summary),
        tables=(_deciding(main, summary["verdict"]["bars"]),),
        remarks=_remarks(summary),
        profiles=_profiles(main),
        excerpts=tuple(worst[:1]),
        verdict=_verdict(summary["verdict"]),
        next=_next(study),
    )


def _deciding(pair: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each metric that people act on, beside the strictest limit that somebody published for it."""
    rows = [
        {"metric": METRICS[key], "found": found, "limit": _tightest(limits, key, pair["pair"])}
        for key in _DECIDING
        if (found := pair["metrics"][key])["value"] is not None
    ]
    return table(
        "",
        rows,
        [
            text("", lambda row: row["metric"].label),
            text("logged by", lambda row: ", ".join(_frameworks(row["metric"].key)[:2]), optional=True),
            col("value", lambda row: in_words(row["metric"], row["found"])[0]),
            col("95 % interval", lambda row: in_words(row["metric"], row["found"])[1], optional=True),
            col("× noise", lambda row: numbers.times(row["found"].get("times_floor"))),
            text("strictest limit", _limit),
        ],
        shrinks=True,
    )


def _frameworks(key: str) -> list[str]:
    """Who logs a metric."""
    return list(dict.fromkeys(framework for framework, _ in logged_as().get(key, ())))


def _tightest(limits: Sequence[Mapping[str, Any]], key: str, pair: str) -> Mapping[str, Any] | None:
    own = [row for row in limits if row["metric"] == key and row["pair"] == pair]
    return min(own, key=lambda row: float(row["healthy"]), default=None)


def _limit(row: Row) -> str:
    limit = row["limit"]
    return f"{_SEEN[limit['standing']]} {limit['healthy']:g} {limit['who']}" if limit else ""


def _remarks(summary: Mapping[str, Any]) -> Facts:
    pairs = summary["pairs"]
    main, total = next(iter(pairs.values())), pairs.get("total")
    responses = [f"reward {_value(main, 'reward_mean')}", f"length {_value(main, 'length_mean')}"]
    responses += [f"truncated {_value(main, 'truncated_share')}"]
    responses += [f"groups without signal {_value(main, 'equal_rewards_share')}"]
    remarks = [("Responses", " · ".join(part for part in responses if not part.endswith(numbers.MISSING)))]
    if total is not None and total is not main:
        stale = f"mean |π − μ| {_value(total, 'tv_binary_mean')}"
        outside = f"{_value(total, 'ratio_outside_0.8_1.28')} outside [0.8, 1.28]"
        remarks.insert(0, ("With staleness", f"{stale}, {outside}"))
    return tuple((label, value) for label, value in remarks if value)


def _value(pair: Mapping[str, Any], key: str) -> str:
    return in_words(METRICS[key], pair["metrics"][key])[0]


def _profiles(pair: Mapping[str, Any]) -> tuple[Profile, ...]:
    bins = [row for row in pair["volatility"] if row["tokens"]]
    profiles = []
    if len(bins) > 1:
        ends = f"{bins[0]['mu_low']:g}", f"{bins[-1]['mu_high']:g}"
        profiles.append(_profile("By μ", bins, "ratio_sd", *ends, "SD of the ratio"))
    if len(positions := pair["positions"]) > 1:
        ends = str(positions[0]["first"]), str(positions[-1]["last"])
        profiles.append(_profile("By position", positions, "abs_d_mean", *ends, "mean |Δlog p|"))
    return tuple(profiles)


def _profile(title: str, rows: Sequence[Row], key: str, first: str, last: str, what: str) -> Profile:
    values = tuple(row[key]["value"] for row in rows)
    found = [value for value in values if value is not None]
    ends = f"{numbers.number(min(found), 2)} to {numbers.number(max(found), 2)}" if found else numbers.MISSING
    return Profile(title, values, first, last, f"{what}, {ends}")


def _verdict(verdict: Mapping[str, Any]) -> Verdict:
    words, status = _WORDS[verdict["status"]]
    return Verdict(words, " ".join(verdict["sentences"][1:-1] or verdict["sentences"]), status)


def _next(study: MismatchAnalysis) -> Facts:
    runs = typed(study.traces)
    return (
        (suggest("diagnose", *runs), "which setting makes the gap"),
        (suggest("clipstats", *runs), "what PPO and DPPO would block"),
        (suggest("report", *runs, "--full"), "every metric, bin and position"),
    )
