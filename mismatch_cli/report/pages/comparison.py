"""From a comparison to what is shown: one `ReportView`, which terminal and HTML both print."""

from __future__ import annotations

from pathlib import Path

from mismatch_cli import numbers
from mismatch_cli.errors import suggest
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.about import MASKED, left_out_of, measured, settings_tables
from mismatch_cli.report.pages.comparison_tables import (
    differences_table,
    factor_text,
    harmless_table,
    on_tokens_table,
    setting_words,
    settings_table,
    side_by_side_table,
)
from mismatch_cli.report.tables import Row, filled
from mismatch_cli.report.view import Facts, MetricRow, ReportView, Section, Table
from mismatch_cli.studies.study import Study, who_is_compared

_NOTATION = (
    "μ is the reference’s probability of the sampled token and π that of the current policy, in most pairs the "
    "rollout’s and the trainer’s; d = log π − log μ in nats, r = π/μ. E is the mean over the tokens that count, E_y "
    "over responses, Σd the sum over a response of T tokens. Intervals cover 95 % over prompts."
)
_LEADING = ("tv_binary_mean", "abs_d_mean", "k3", "ratio_outside_0.8_1.28")
_GAPS = {
    "mismatch": "the same weights in the trainer (π) and in the rollout engine (μ)",
    "total": "the trainer's present weights (π) against the rollout engine (μ)",
    "staleness": "the trainer's present weights (π) against the weights that sampled (in place of μ)",
    "floor": "the trainer in another batch shape (π) against itself (in place of μ)",
}


def page(study: Study) -> ReportView:
    """What differs between the first trace and each of the others."""
    return page_of_result(study.result)


def page_of_result(result: Row) -> ReportView:
    """The whole page of a result (docs/compare.md)."""
    sections = (
        Section("What differs in the settings", _settings_text(result), tables=_settings_tables(result), stays=True),
        Section("What differs in the gap", _differences_text(), tables=_difference_tables(result)),
        Section("On the same tokens", _on_tokens_text(result), tables=_on_tokens_tables(result)),
        Section("How large the gaps are"),
        Section("Ratio and TV by probability"),
        Section("Along the response"),
    )
    return ReportView(
        title="Traces beside each other: what differs?",
        about=_about(result),
        notes=_notes(result),
        headline=_headline(result),
        leading=_leading(result),
        outline=sections,
        settings=tuple(
            (f"{side['name']}: {title}", facts) for side in result["traces"] for title, facts in settings_tables(side)
        ),
        command=suggest("compare", *(Path(side["folder"]) for side in result["traces"]), *result["arguments"]),
        notation=_NOTATION,
    )


def _about(result: Row) -> Facts:
    facts = []
    for side in result["traces"]:
        counts = side["summary"]["counts"]
        who = who_is_compared(side["about"])
        tokens = measured(counts, f"{numbers.count(counts['tokens'])} tokens")
        facts.append(
            (
                side["name"],
                " · ".join(
                    part
                    for part in (side["folder"], who, side["about"].get("imported", {}).get("title"), tokens)
                    if part
                ),
            )
        )
    paired = [(_paired_title(result, comparison), _paired(comparison)) for comparison in result["comparisons"]]
    return (*facts, *paired, ("Gap", f"{result['pair']}: {_GAPS[result['pair']]}"))


def _paired_title(result: Row, comparison: Row) -> str:
    return "Paired" if len(result["comparisons"]) == 1 else f"{comparison['trace']} with {comparison['against']}"


def _paired(comparison: Row) -> str:
    responses, prompts = (numbers.count(comparison[f"shared_{what}"]) for what in ("responses", "prompts"))
    if comparison["pairing"] == "tokens":
        return f"on the same tokens: both hold the same {responses} responses"
    if comparison["pairing"] == "prompts":
        same = f"; {responses} responses are the same" if comparison["shared_responses"] else ""
        return f"by prompt: both hold responses to the same {prompts} prompts{same}"
    return (
        f"not paired: both hold only {prompts} prompts"
        if comparison["shared_prompts"]
        else "not paired: no prompt is in both"
    )


def _notes(result: Row) -> tuple[str, ...]:
    notes = []
    for side in result["traces"]:
        notes += [f"{side['name']}: {note}" for note in left_out_of(side["about"], side["summary"]["counts"], MASKED)]
        left = side["responses"] - side["compared_responses"] - side["about"]["unscored_responses"]
        if left:
            notes.append(
                f"{side['name']}: {numbers.count(left)} of {numbers.count(side['responses'])} responses are left out, "
                "because another trace holds no partner for them: what follows says nothing about those."
            )
    for comparison in result["comparisons"]:
        ours, theirs = _sides(result, comparison)
        samples = [_samples(side) for side in (ours, theirs)]
        if not 0.9 < samples[1] / samples[0] < 1.1:
            notes.append(
                f"{ours['name']} has {_per_prompt(samples[0])} responses to a prompt and {theirs['name']} "
                f"{_per_prompt(samples[1])}: that alone changes the share of groups without signal."
            )
        if (found := comparison["on_tokens"]) and found["masked_in_one"]:
            notes.append(
                f"{numbers.count(found['masked_in_one'])} tokens are masked in only one of {comparison['against']} and "
                f"{comparison['trace']}: they count in the numbers of the other."
            )
    return tuple(notes)


def _samples(side: Row) -> float:
    counts = side["summary"]["counts"]
    return float(counts["responses"] / counts["prompts"])


def _per_prompt(samples: float) -> str:
    return numbers.count(int(samples)) if samples.is_integer() else numbers.number(samples)


def _headline(result: Row) -> str:
    """How far apart the policies are in each trace, and whether that is more than noise."""
    first, *others = result["traces"]
    if len(others) == 1:
        comparison, (other,) = result["comparisons"][0], others
        return (
            f"On an average token the two policies differ in probability by {_mean_gap(first)} in {first['name']} and "
            f"by {_mean_gap(other)} in {other['name']}{_factor(comparison)}. {_how_many(comparison)}"
            f"{_first_setting(comparison)}"
        )
    gaps = [f"{_mean_gap(first)} in {first['name']}"]
    for side, comparison in zip(others, result["comparisons"], strict=True):
        gaps.append(f"{_mean_gap(side)} in {side['name']}{_factor(comparison)}")
    marked = (f"{row['more_than_noise']} of {row['tested']} in {row['trace']}" for row in result["comparisons"])
    return (
        f"On an average token the two policies differ in probability by {', '.join(gaps)}. Metrics that differ "
        f"from {first['name']} by more than noise: {', '.join(marked)}; one in twenty would by chance."
    )


def _mean_gap(side: Row) -> str:
    return numbers.number(side["summary"]["metrics"]["tv_binary_mean"]["value"])


def _factor(comparison: Row) -> str:
    factor = comparison["metrics"]["tv_binary_mean"]["factor"]
    return f" ({factor_text(factor)})" if factor["value"] is not None else ""


def _how_many(comparison: Row) -> str:
    if not comparison["tested"]:
        values = [found["difference"]["value"] for found in comparison["metrics"].values()]
        return "No number differs." if not any(values) else "There are too few prompts to tell this from noise."
    return (
        f"{comparison['more_than_noise']} of {comparison['tested']} metrics differ by more than noise; "
        f"about {comparison['expected_by_chance']:.0f} would by chance."
    )


def _first_setting(comparison: Row) -> str:
    known = (row for row in comparison["settings"] if None not in (row["first"], row["other"]))
    likely = [row for row in known if row["likely"]]
    if not likely or not comparison["more_than_noise"]:
        return ""
    first = likely[0]
    return (
        f" First among the settings that differ: {first['setting']} ({setting_words(first['first'])} in "
        f"{comparison['against']}, {setting_words(first['other'])} in {comparison['trace']})."
    )


def _leading(result: Row) -> tuple[MetricRow, ...]:
    """How the gap of the second trace compares with that of the first."""
    comparison = result["comparisons"][0]
    rows = []
    for key in _LEADING:
        metric, factor = METRICS[key], comparison["metrics"][key]["factor"]
        ends = [numbers.number(factor[end], 2) for end in ("low", "high")]
        interval = numbers.MISSING if factor["low"] is None else f"[{', '.join(ends)}]"
        name = f"{metric.label}, {comparison['trace']} / {comparison['against']}"
        rows.append(MetricRow(metric, factor_text(factor), interval, note=factor["note"] or "", name=name))
    return tuple(rows)


def _sides(result: Row, comparison: Row) -> tuple[Row, Row]:
    by_name = {side["name"]: side for side in result["traces"]}
    return by_name[comparison["against"]], by_name[comparison["trace"]]


def _settings_text(result: Row) -> str:
    touching = [row for comparison in result["comparisons"] for row in comparison["settings"] if not row["harmless"]]
    if touching:
        return (
            "Those first that most often explain a gap. The order follows reported cases; that two settings differ "
            "does not show which of them it was: change one at a time."
        )
    text = "No recorded setting differs that touches a log-probability."
    if any(comparison["more_than_noise"] > comparison["expected_by_chance"] for comparison in result["comparisons"]):
        text += (
            " What is left is what no manifest records: the hardware, the weights themselves, how a library was built."
        )
    return text


def _settings_tables(result: Row) -> tuple[Table, ...]:
    tables = [table(comparison) for table in (settings_table, harmless_table) for comparison in result["comparisons"]]
    return filled(*tables)


def _differences_text() -> str:
    return (
        "Intervals cover 95 % over prompts; a prompt that both traces hold counts for both at once, so what makes it "
        "hard or easy cancels. Where nothing differs, one metric in twenty is marked by chance, and metrics that "
        "measure nearly the same are marked together: a single mark among many metrics is no finding. The factor "
        "compares distances from agreement: r = 1.02 is twice as far from 1 as 1.01. A difference of shares is in "
        "percentage points. Extremes have no interval, and grow with the number of tokens."
    )


def _difference_tables(result: Row) -> tuple[Table, ...]:
    comparisons = result["comparisons"]
    if len(comparisons) == 1:
        return (differences_table(*_sides(result, comparisons[0]), comparisons[0]),)
    folded = (differences_table(*_sides(result, row), row, folded=True) for row in comparisons)
    return (side_by_side_table(result), *folded)


def _on_tokens_text(result: Row) -> str:
    if not any(comparison["on_tokens"] for comparison in result["comparisons"]):
        return ""
    return (
        "The same policy of both traces, token by token: the first trace in the place of μ, the other in the place of "
        "π. A clip decides otherwise on a token whose ratio lies below, in or above [0.8, 1.28] in one trace and "
        "elsewhere in the other. Only tokens that count in both."
    )


def _on_tokens_tables(result: Row) -> tuple[Table, ...]:
    return tuple(
        on_tokens_table(result["pair"], comparison) for comparison in result["comparisons"] if comparison["on_tokens"]
    )
