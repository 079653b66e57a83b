"""The page of a trace: a `ReportView` of its gap, which terminal and HTML print."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.limits.assess import FLOOR, strictest_first
from mismatch_cli.metrics.gap_table import (
    GAP_GROUPS,
    METRICS,
    RESPONSES,
    SEQUENCE,
    VOLATILITY,
    Metric,
    in_group,
)
from mismatch_cli.report.about import GAPS, about_facts, command_line, left_out, settings_tables
from mismatch_cli.report.excerpts import worst_excerpts
from mismatch_cli.report.pages._mismatch_screen import leading, screen
from mismatch_cli.report.pages._status import word
from mismatch_cli.report.pages.mismatch_routing import routing_section
from mismatch_cli.report.tables import (
    Col,
    Row,
    col,
    filled,
    in_words,
    keyed,
    metric_row,
    mu_bin,
    number,
    plain,
    span,
    table,
    text,
)
from mismatch_cli.report.view import MetricGroup, MetricRow, ReportView, Section, Table
from mismatch_cli.studies.mismatch import MismatchAnalysis
from mismatch_cli.studies.study import typed

_SPREAD = ("ratio_sd", "tv_binary_sd", "tv_topk_sd")
_RATIO_TAILS = ("ratio_p01", "ratio_p99", "ratio_max")
_TV_TAILS = (
    "tv_binary_p01",
    "tv_binary_p99",
    "tv_binary_max",
    "tv_topk_p01",
    "tv_topk_p99",
    "tv_topk_max",
)
_FAMILIES = {
    "dense": "dense models",
    "moe": "mixtures of experts",
    "": "all models (this one may be dense or MoE)",
}
_TURNS = (
    "A turn is a run of trained tokens; tool output and user messages between turns are not "
    "trained. A jump at the second turn points to how the conversation is rebuilt: chat "
    "template, tool output, dropped thoughts."
)
_DIAGNOSE = (
    "No limit is universal: published ones differ by more than ten times. Most large gaps are "
    "bookkeeping errors, not arithmetic: run `mismatch-cli diagnose` to find them."
)


def page(study: MismatchAnalysis, worst: int | None = None) -> ReportView:
    """The full report of traces (docs/json/summary.md), with the `worst` tokens."""
    summary = study.result
    tokens, responses = worst_excerpts(study.traces, study.main_pair, summary["worst"])
    main, *others = summary["pairs"].values()
    sections = [
        Section("The gap", _gap_text(summary), groups=_gap_groups(main)),
        _verdict_section(summary),
        _volatility_section(main),
        routing_section(summary["routing"]),
        _position_section(main),
        _sequence_section(main),
        *(
            Section(_pair_title(pair), _pair_text(pair), groups=_gap_groups(pair))
            for pair in others
        ),
        _responses_section(main, imported="imported" in summary["about"]),
        Section(
            "Worst tokens",
            "Where |log π − log μ| is largest.",
            excerpts=tokens,
            terminal_excerpts=worst,
        ),
        Section(
            "Worst responses",
            "Where the sum of log π − log μ is furthest from zero.",
            excerpts=responses,
            terminal_excerpts=worst,
        ),
    ]
    return ReportView(
        title="How far apart are rollout and trainer?",
        about=about_facts(summary),
        notes=left_out(summary),
        headline=_headline(summary["pairs"]),
        leading=leading(main, summary["verdict"]["bars"]),
        screen=screen(study, tokens[: 1 if worst is None else worst]),
        outline=sections,
        settings=settings_tables(summary),
        command=command_line("report", typed(study.traces)),
    )


def _headline(pairs: Mapping[str, Mapping[str, Any]]) -> str:
    main, *_ = pairs.values()
    difference, outside = _row(main, "tv_binary_mean"), _row(main, "ratio_outside_0.8_1.28")
    floor = (
        f", {difference.times_floor} the trainer's own noise"
        if difference.times_floor.endswith("×")
        else ""
    )
    text = (
        f"The two policies differ by {difference.value} in probability on the average "
        f"token{floor}. {outside.value} of the tokens have a ratio outside [0.8, 1.28]."
    )
    if "total" in pairs and main["pair"] != "total":
        total = pairs["total"]
        text = (
            f"At equal weights: {text[0].lower()}{text[1:]} At the trainer's current weights: "
            + (
                f"{_row(total, 'tv_binary_mean').value}, with "
                f"{_row(total, 'ratio_outside_0.8_1.28').value} outside."
            )
        )
    return text


def _gap_text(summary: Mapping[str, Any]) -> str:
    pair = summary["pairs"][next(iter(summary["pairs"]))]
    floor = summary.get("floor")
    text = f"{_pair_title(pair)}. Intervals are 95 %, over prompts."
    if floor:
        text += (
            f" Noise: the trainer's gap to itself when it scores {floor['counts']['tokens']:,} "
            "sampled tokens again in another micro-batch shape. Extremes grow with the number of "
            "tokens, so compare them with care. Signed means have no factor because they can be "
            "near zero by chance."
        )
    return text


def _pair_text(pair: Mapping[str, Any]) -> str:
    if pair["pair"] != "staleness":
        return ""
    return (
        "Here μ is the trainer at the weights that sampled. The engine sampled the tokens, so "
        "these KL estimates measure what the optimiser changed on them."
    )


def _pair_title(pair: Mapping[str, Any]) -> str:
    return f"{pair['pair'].capitalize()}: {GAPS[pair['pair']]}"


def _gap_groups(pair: Mapping[str, Any]) -> tuple[MetricGroup, ...]:
    groups = (_group(pair, title) for title in GAP_GROUPS)
    return tuple(group for group in groups if group.rows)


def _group(pair: Mapping[str, Any], title: str) -> MetricGroup:
    rows = (_row(pair, metric.key) for metric in in_group(title))
    return MetricGroup(
        title,
        tuple(row for row in rows if row.value != numbers.MISSING or row.note != "not measured"),
    )


def _row(pair: Mapping[str, Any], key: str) -> MetricRow:
    return metric_row(METRICS[key], pair["metrics"][key])


def _volatility_section(pair: Mapping[str, Any]) -> Section:
    text = (
        "The ratio is volatile where the rollout gave a token little probability; the difference "
        "of probabilities is not. Binary TV, |π − μ| of the sampled token, is small at low μ by "
        "construction: it cannot exceed max(π, μ). Top-K TV covers the head of the distribution "
        "at that position, so it is the fair comparison for the ratio."
    )
    tables = (
        _volatility_table("SD per bin of μ, ± half the 95 % interval", pair, _SPREAD, plain),
        _volatility_table("Tails of the ratio", pair, _RATIO_TAILS, number),
        _volatility_table("Tails of TV", pair, _TV_TAILS, number),
    )
    return Section("Ratio and TV by probability", text, tables=tables)


def _volatility_table(
    title: str, pair: Mapping[str, Any], keys: Sequence[str], show: Callable[[Any], str]
) -> Table:
    rows = [row for row in pair["volatility"] if row["tokens"]]
    metrics = [
        m
        for m in VOLATILITY.values()
        if m.key in keys and any(row[m.key]["value"] is not None for row in rows)
    ]
    shown = (keyed(m.label, m.key, show, m) for m in metrics)
    return table(title, rows, [col("μ", mu_bin), keyed("tokens", "tokens", numbers.count), *shown])


def _position_section(pair: Mapping[str, Any]) -> Section:
    tables = (
        _position_table("From the first token", "position", pair["positions"]),
        _position_table("From the last token", "tokens before the last", pair["from_end"]),
        _turn_table(pair["turns"]),
    )
    text = (
        "Drift with position points to the position encoding; a jump at the last token points to "
        "the stop token."
    )
    if len(pair["turns"]) > 1:
        text += f" {_TURNS}"
    return Section("By position in the response", text, tables=filled(*tables))


def _position_table(title: str, what: str, rows: Sequence[Row], *columns: Col[Row]) -> Table:
    shown = (
        keyed(METRICS[key].label, key, plain, METRICS[key])
        for key in ("abs_d_mean", "d_mean", "tv_binary_mean")
    )
    return table(
        title, rows, [col(what, span), *columns, keyed("tokens", "tokens", numbers.count), *shown]
    )


def _turn_table(rows: Sequence[Row]) -> Table:
    """The gap by turn; empty where every response has one turn."""
    turns = keyed("turns", "turns", numbers.count), keyed("mean length", "length_mean", plain)
    return _position_table("By turn", "turn", rows if len(rows) > 1 else (), *turns)


def _sequence_section(pair: Mapping[str, Any]) -> Section:
    by_length = table(
        "By length",
        pair["sequence"]["by_length"],
        [
            col("tokens", span),
            keyed("responses", "sequences", numbers.count),
            keyed("mean Σd", "d_sum_mean", number),
            keyed("SD of Σd", "d_sum_sd", number),
        ],
    )
    text = (
        "Per-token gaps add up: sequence-level weights and masks act on the ratio of a whole "
        "response."
    )
    return Section("Whole responses", text, (_group(pair, SEQUENCE),), tables=filled(by_length))


def _responses_section(pair: Mapping[str, Any], *, imported: bool) -> Section:
    equal = pair["metrics"]["equal_rewards_share"]["value"]
    text = (
        "An advantage is a reward minus the mean reward of its group (the samples of a prompt). "
        "A group whose rewards are all equal has no signal: its advantages are zero and it "
        "teaches nothing."
    )
    if pair["metrics"]["reward_mean"]["value"] is None:
        text = "The prompts have no answers, so nothing was graded and there are no advantages."
        if imported:
            text = "The dump has no rewards."
    elif equal == 1:
        reward = pair["metrics"]["reward_mean"]["value"]
        what = (
            "none was solved"
            if reward == 0
            else "all were solved"
            if reward == 1
            else "all samples of each agree"
        )
        text = (
            f"Every group has equal rewards ({what}), so every advantage (reward minus group "
            "mean) is zero and these responses cause no update. Choose problems that the model "
            "solves only sometimes."
        )
    return Section("Rewards and responses", text, (_group(pair, RESPONSES),))


def _verdict_section(summary: Mapping[str, Any]) -> Section:
    """The numbers compared with published limits and values; every row has its source."""
    verdict = summary["verdict"]
    tables = [
        _bars(verdict, pair) for pair in dict.fromkeys(row["pair"] for row in verdict["bars"])
    ]
    if verdict["measured"]:
        tables.append(_measured(verdict))
    return Section(
        "Is this normal?", " ".join([*verdict["sentences"], _DIAGNOSE]), tables=tuple(tables)
    )


def _bars(verdict: Mapping[str, Any], pair: str) -> Table:
    """The limits on a pair, those that are exceeded first."""
    with_staleness = ", with staleness (the trainer as it is now)" if pair == "total" else ""
    return table(
        f"Published limits{with_staleness}",
        strictest_first([row for row in verdict["bars"] if row["pair"] == pair]),
        [
            text("published by", lambda row: f"{row['who']} ({row['source']})"),
            text("status", word),  # the second column: a phone shows no more
            text("healthy if", _limits),
            col("this trace", _measured_here),
        ],
    )


def _metric_of(row: Mapping[str, Any]) -> Metric:
    return METRICS[row["metric"]]


def _measured_here(row: Mapping[str, Any]) -> str:
    """A number with its interval; one that was not measured is a dash."""
    parts = in_words(_metric_of(row), row)
    return " ".join(part for part in parts if part != numbers.MISSING) or numbers.MISSING


def _limits(row: Mapping[str, Any]) -> str:
    """`mean |π − μ| ≤ 0.005; broken beyond 0.01`."""
    healthy = f"{_metric_of(row).label} {row['text']}"
    if row["broken"] == row["healthy"]:
        return healthy
    return f"{healthy}; broken beyond {row['broken']:g}"


def _measured(verdict: Mapping[str, Any]) -> Table:
    return table(
        "Measured by others",
        verdict["measured"],
        [
            text("setup", _setting),
            text("metric", lambda row: _metric_of(row).label),
            col("reported", _range),
            col("this trace", lambda row: _in_words(row["metric"], row["value"])),
        ],
        note=f"The closest published values, among {_FAMILIES[verdict['family']]}.",
    )


def _setting(row: Mapping[str, Any]) -> str:
    broken = ", broken" if row["state"] else ""
    if row["pair"] == FLOOR:
        broken = ", the trainer's own noise"
    source = "; ".join(filter(None, (row["source"], row["derived"])))
    return f"{row['model']}: {row['setup']}{broken} ({source})"


def _range(row: Mapping[str, Any]) -> str:
    low, high = (_in_words(row["metric"], row[end]) for end in ("low", "high"))
    return low if low == high else f"{low} – {high}"


def _in_words(metric: str, value: float) -> str:
    return numbers.near(value, 1) if METRICS[metric].agreement == 1 else numbers.number(value)
