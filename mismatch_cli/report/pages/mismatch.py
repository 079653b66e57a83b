"""From what was measured to what is shown: one `ReportView`, which terminal and HTML both print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_cli import numbers
from mismatch_cli.metrics.gap_table import GAP_GROUPS, METRICS, RESPONSES, SEQUENCE, VOLATILITY, in_group
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.report.about import about_facts, command_line, left_out, settings_tables
from mismatch_cli.report.excerpts import worst_excerpts
from mismatch_cli.report.normal import verdict_section
from mismatch_cli.report.tables import col, filled, keyed, metric_row, mu_bin, number, plain, span, table
from mismatch_cli.report.view import MetricGroup, MetricRow, ReportView, Section, Table
from mismatch_cli.studies.mismatch import MismatchAnalysis

_LEADING = ("tv_binary_mean", "abs_d_mean", "k3", "ratio_outside_0.8_1.28")
_SPREAD = ("ratio_sd", "tv_binary_sd", "tv_topk_sd")
_RATIO_TAILS = ("ratio_p01", "ratio_p99", "ratio_max")
_TV_TAILS = ("tv_binary_p01", "tv_binary_p99", "tv_binary_max", "tv_topk_p01", "tv_topk_p99", "tv_topk_max")


def page(study: MismatchAnalysis, worst: int = 0) -> ReportView:
    """The whole report of traces (docs/summary.md); a terminal shows as many of the worst as were asked for."""
    summary = study.result
    tokens, responses = worst_excerpts(study.traces, study.main_pair, summary["worst"])
    main, *others = summary["pairs"].values()
    sections = [
        Section("The gap", _gap_text(summary), groups=_gap_groups(main)),
        verdict_section(summary),
        _volatility_section(main),
        _position_section(main),
        _sequence_section(main),
        *(Section(_pair_title(pair), _pair_text(pair), groups=_gap_groups(pair)) for pair in others),
        _responses_section(main, imported="imported" in summary["about"]),
        Section("Worst tokens", "Where |log π − log μ| is largest.", excerpts=tokens, terminal_excerpts=worst),
        Section(
            "Worst responses",
            "Where the sum of log π − log μ is furthest from zero.",
            excerpts=responses,
            terminal_excerpts=worst,
        ),
    ]
    return ReportView(
        title="Rollout and trainer: how far apart?",
        about=about_facts(summary),
        notes=left_out(summary),
        headline=_headline(summary["pairs"]),
        leading=tuple(_row(main, key) for key in _LEADING),
        outline=sections,
        settings=settings_tables(summary),
        command=command_line(summary),
    )


def _headline(pairs: Mapping[str, Mapping[str, Any]]) -> str:
    main, *_ = pairs.values()
    difference, outside = _row(main, "tv_binary_mean"), _row(main, "ratio_outside_0.8_1.28")
    floor = f", {difference.times_floor} the trainer's own noise" if difference.times_floor.endswith("×") else ""
    text = (
        f"On an average token the two policies differ by {difference.value} in probability{floor}. "
        f"{outside.value} of the tokens have a ratio outside [0.8, 1.28]."
    )
    if "total" in pairs and main["pair"] != "total":
        total = pairs["total"]
        text = f"At equal weights: {text[0].lower()}{text[1:]} With the trainer's present weights it is " + (
            f"{_row(total, 'tv_binary_mean').value}, and {_row(total, 'ratio_outside_0.8_1.28').value} are outside."
        )
    return text


def _gap_text(summary: Mapping[str, Any]) -> str:
    pair = summary["pairs"][next(iter(summary["pairs"]))]
    floor = summary.get("floor")
    text = f"{_pair_title(pair)}. Intervals are 95 %, over prompts."
    if floor:
        text += (
            f" The floor is the trainer (at its present weights) scored again in another micro-batch shape, on "
            f"{floor['counts']['tokens']:,} sampled tokens; extremes grow with the number of tokens, so compare those "
            "with care. Signed means have no factor: they can be near zero by chance."
        )
    return text


def _pair_text(pair: Mapping[str, Any]) -> str:
    if pair["pair"] != "staleness":
        return ""
    return (
        "The weights that sampled, in the trainer, stand in the place of μ. The tokens were sampled by the engine, "
        "so these KL estimates say what the optimiser changed on those tokens."
    )


def _pair_title(pair: Mapping[str, Any]) -> str:
    titles = {
        "mismatch": "Mismatch: the same weights in the trainer (π) and in the rollout engine (μ)",
        "staleness": "Staleness: the trainer's present weights (π) against the weights that sampled (in place of μ)",
        "total": "Total: the trainer's present weights (π) against the rollout engine (μ)",
    }
    return titles.get(pair["pair"], PAIRS[pair["pair"]].label)


def _gap_groups(pair: Mapping[str, Any]) -> tuple[MetricGroup, ...]:
    groups = (_group(pair, title) for title in GAP_GROUPS)
    return tuple(group for group in groups if group.rows)


def _group(pair: Mapping[str, Any], title: str) -> MetricGroup:
    rows = (_row(pair, metric.key) for metric in in_group(title))
    return MetricGroup(title, tuple(row for row in rows if row.value != numbers.MISSING or row.note != "not measured"))


def _row(pair: Mapping[str, Any], key: str) -> MetricRow:
    return metric_row(METRICS[key], pair["metrics"][key])


def _volatility_section(pair: Mapping[str, Any]) -> Section:
    text = (
        "A ratio is volatile where the rollout gave a token little probability; a difference of probabilities is not. "
        "Binary TV, |π − μ| of the sampled token, is small at low μ by construction: it cannot exceed max(π, μ). "
        "Top-K TV compares the head of the distribution at that position: the fair one to hold beside the ratio."
    )
    tables = (
        _volatility_table("Spread in each bin of μ, ± half its 95 % interval", pair, _SPREAD, plain),
        _volatility_table("Tails of the ratio", pair, _RATIO_TAILS, number),
        _volatility_table("Tails of TV", pair, _TV_TAILS, number),
    )
    return Section("Ratio against TV", text, tables=tables)


def _volatility_table(title: str, pair: Mapping[str, Any], keys: Sequence[str], show: Callable[[Any], str]) -> Table:
    rows = [row for row in pair["volatility"] if row["tokens"]]
    metrics = [m for m in VOLATILITY.values() if m.key in keys and any(row[m.key]["value"] is not None for row in rows)]
    shown = (keyed(m.label, m.key, show, m) for m in metrics)
    return table(title, rows, [col("μ", mu_bin), keyed("tokens", "tokens", numbers.count), *shown])


def _position_section(pair: Mapping[str, Any]) -> Section:
    tables = (
        _position_table("From the beginning", "position", pair["positions"]),
        _position_table("From the end", "tokens before the last", pair["from_end"]),
    )
    text = "Drift with position points to the position encoding, a jump at the last token to the stop token."
    return Section("Along the response", text, tables=filled(*tables))


def _position_table(title: str, what: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = (keyed(METRICS[key].label, key, plain, METRICS[key]) for key in ("abs_d_mean", "d_mean", "tv_binary_mean"))
    return table(title, rows, [col(what, span), keyed("tokens", "tokens", numbers.count), *shown])


def _sequence_section(pair: Mapping[str, Any]) -> Section:
    by_length = table(
        "By length",
        pair["sequence"]["by_length"],
        [
            col("tokens", span),
            keyed("responses", "sequences", numbers.count),
            keyed("mean Σd", "d_sum_mean", number),
            keyed("spread of Σd", "d_sum_sd", number),
        ],
    )
    text = "Per-token gaps add up: the ratio of a whole response is what sequence-level weights and masks act on."
    return Section("Whole responses", text, (_group(pair, SEQUENCE),), tables=filled(by_length))


def _responses_section(pair: Mapping[str, Any], *, imported: bool) -> Section:
    equal = pair["metrics"]["equal_rewards_share"]["value"]
    text = (
        "An advantage is a reward minus the mean of its group, the samples of a prompt. A group without signal, whose "
        "rewards are all equal, has advantages of zero and teaches nothing."
    )
    if pair["metrics"]["reward_mean"]["value"] is None:
        text = "The prompts came without answers, so nothing was graded and there are no advantages."
        if imported:
            text = "The dump holds no rewards."
    elif equal == 1:
        reward = pair["metrics"]["reward_mean"]["value"]
        what = "none was solved" if reward == 0 else "all were solved" if reward == 1 else "all samples of each agree"
        text = (
            f"Every group of samples got equal rewards ({what}), so every advantage, reward minus group mean, is zero: "
            "no update would follow from these responses. Choose problems that the model solves sometimes."
        )
    return Section("Rewards and responses", text, (_group(pair, RESPONSES),))
