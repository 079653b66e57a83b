"""The page of a comparison: a `ReportView`, which terminal and HTML print."""

from collections.abc import Iterator
from types import SimpleNamespace

from mismatch_cli import DPPO
from mismatch_cli.base import numbers
from mismatch_cli.base.json_form import from_json
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.about import (
    GAPS,
    LEADING,
    MASKED,
    command_line,
    left_out_of,
    measured,
    settings_tables,
)
from mismatch_cli.report.pages._comparison_screen import DIFFERENT, screen
from mismatch_cli.report.tables import (
    Col,
    Row,
    col,
    filled,
    in_words,
    named,
    percent,
    plain,
    table,
    text,
    value_of,
)
from mismatch_cli.report.view import Facts, MetricRow, ReportView, Section, Table
from mismatch_cli.studies.comparison import ComparisonAnalysis
from mismatch_cli.studies.pairing import METRICS_SHOWN
from mismatch_cli.studies.study import who_is_compared
from mismatch_cli.trace.origin import About

_NOTATION = (
    "μ is the reference’s probability of the sampled token and π that of the current policy, in "
    "most pairs the rollout’s and the trainer’s; d = log π − log μ in nats, r = π/μ. E is the "
    "mean over the tokens that count, E_y over responses, Σd the sum over a response of T "
    "tokens. Intervals cover 95 % over prompts."
)
_DIFFERENCES = (
    "Intervals cover 95 % over prompts; prompts that both traces have are paired, so what makes "
    "them hard or easy cancels. Where nothing differs, one metric in twenty is marked by chance, "
    "and similar metrics are marked together: a single mark among many metrics is not a finding. "
    "The factor compares distances from agreement: r = 1.02 is twice as far from 1 as 1.01. "
    "Differences of shares are in percentage points. Extremes have no interval and grow with the "
    "number of tokens."
)
_ON_TOKENS = (
    "The same policy in both traces, token by token, with the first trace as μ and the other as "
    "π. A clip decision differs where the ratio of a token is below, in or above [0.8, 1.28] in "
    "one trace and not in the other. Only tokens that count in both."
)
_MARKED = "* more than noise: the 95 % interval of the difference excludes 0."
_POLICIES = {  # of a pair: its current policy and its reference
    "mismatch": ("trainer", "rollout"),
    "total": ("trainer", "rollout"),
    "staleness": ("trainer", "trainer at the rollout's weights"),
    "floor": ("trainer, repeated", "trainer"),
}
_WHEN = {  # of a pair, in a few words
    "mismatch": "at equal weights",
    "total": "with staleness",
    "staleness": "staleness alone",
    "floor": "noise alone",
}
CLIP_FLIPS = Metric(
    "clip_flips",
    "clip decision differs",
    "share of tokens with r < 0.8, r in [0.8, 1.28] or r > 1.28 in one trace, and a different "
    "one in the other",
    "share",
    f"{DPPO}, App. C.1, Clip-Higher",
)


def page(study: ComparisonAnalysis) -> ReportView:
    """The differences between the first trace and each of the others (docs/json/compare.md)."""
    result = _by_run(study.result)
    traces, comparisons = result["traces"], result["comparisons"]
    settings = [
        show(comparison)
        for show in (_settings_table, _harmless_table)
        for comparison in comparisons
    ]
    on_tokens = [
        _on_tokens_table(result["pair"], comparison)
        for comparison in comparisons
        if comparison["on_tokens"]
    ]
    sections = (
        Section(
            "Differences in settings",
            _settings_text(comparisons),
            tables=filled(*settings),
            stays=True,
        ),
        Section("Differences in the gap", _DIFFERENCES, tables=_difference_tables(result)),
        Section("On the same tokens", _ON_TOKENS if on_tokens else "", tables=tuple(on_tokens)),
        Section("Distribution of the gap"),
        Section("Ratio and TV by probability"),
        Section("By position in the response"),
    )
    return ReportView(
        title="What differs between the traces?",
        about=_about(result),
        notes=_notes(result),
        headline=_headline(result),
        leading=_leading(comparisons[0]),
        screen=screen(result, _subject(result), _notes(result), study.typed),
        outline=sections,
        settings=tuple(
            (f"{side['name']}: {title}", facts)
            for side in traces
            for title, facts in settings_tables(from_json(About, side["about"]))
        ),
        command=command_line("compare", study.typed, *result["arguments"]),
        notation=_NOTATION,
    )


def _by_run(result: Row) -> Row:
    """The result with names of runs instead of letters."""
    run = {side["name"]: side["run"] for side in result["traces"]}
    return {
        **result,
        "traces": [side | {"name": side["run"]} for side in result["traces"]],
        "comparisons": [
            found | {"trace": run[found["trace"]], "against": run[found["against"]]}
            for found in result["comparisons"]
        ],
    }


def _subject(result: Row) -> tuple[str, str]:
    """The traces, and how they are paired."""
    sides = (
        f"{side['name']} ({numbers.things(side['summary']['counts']['tokens'], 'token')})"
        for side in result["traces"]
    )
    paired = dict.fromkeys(_paired(found) for found in result["comparisons"])
    return f"{' against '.join(sides)}, {_WHEN[result['pair']]}", "; ".join(paired)


def _compared(result: Row) -> Iterator[tuple[Row, Row, Row]]:
    """The first trace, each of the others, and their comparison."""
    first, *others = result["traces"]
    return ((first, *found) for found in zip(others, result["comparisons"], strict=True))


def _about(result: Row) -> Facts:
    facts = []
    for side in result["traces"]:
        counts, about = side["summary"]["counts"], side["about"]
        tokens = measured(SimpleNamespace(**counts), f"{numbers.count(counts['tokens'])} tokens")
        known = (
            side["folder"],
            who_is_compared(about),
            about.get("imported", {}).get("title"),
            tokens,
        )
        facts.append((side["name"], " · ".join(filter(None, known))))
    single = len(result["comparisons"]) == 1
    for found in result["comparisons"]:
        facts.append(
            ("Paired" if single else f"{found['trace']} with {found['against']}", _paired(found))
        )
    return (*facts, ("Gap", f"{result['pair']}: {GAPS[result['pair']]}"))


def _paired(comparison: Row) -> str:
    responses, prompts = (
        numbers.count(comparison[f"shared_{what}"]) for what in ("responses", "prompts")
    )
    if comparison["pairing"] == "tokens":
        return f"on the same tokens: both have the same {responses} responses"
    if comparison["pairing"] == "prompts":
        same = f"; {responses} responses are the same" if comparison["shared_responses"] else ""
        return f"by prompt: both have responses to the same {prompts} prompts{same}"
    only = (
        f"only {prompts} prompts are in both"
        if comparison["shared_prompts"]
        else "no prompt is in both"
    )
    return f"not paired: {only}"


def _notes(result: Row) -> tuple[str, ...]:
    notes = []
    for side in result["traces"]:
        notes += [
            f"{side['name']}: {note}"
            for note in left_out_of(
                from_json(About, side["about"]),
                [(side["summary"]["counts"][name], text) for name, text in MASKED.items()],
            )
        ]
        left = side["responses"] - side["compared_responses"] - side["about"]["unscored_responses"]
        if left:
            notes.append(
                f"{side['name']}: {numbers.count(left)} of {numbers.count(side['responses'])} "
                "responses are left out because another trace has no match for them; the numbers "
                "below do not cover them."
            )
    for first, other, comparison in _compared(result):
        samples = [
            side["summary"]["counts"]["responses"] / side["summary"]["counts"]["prompts"]
            for side in (first, other)
        ]
        if not 0.9 < samples[1] / samples[0] < 1.1:
            notes.append(
                f"{first['name']} has {_per_prompt(samples[0])} responses to a prompt and "
                f"{other['name']} {_per_prompt(samples[1])}: this alone changes the share of "
                "groups without signal."
            )
        if (found := comparison["on_tokens"]) and found["masked_in_one"]:
            notes.append(
                f"{numbers.count(found['masked_in_one'])} tokens are masked in only one of "
                f"{comparison['against']} and {comparison['trace']}; they count in the other."
            )
    return tuple(notes)


def _per_prompt(samples: float) -> str:
    return numbers.count(int(samples)) if samples.is_integer() else numbers.number(samples)


def _headline(result: Row) -> str:
    """The gap of each trace, and how many metrics differ by more than noise."""
    first, *_ = result["traces"]
    gaps = [_mean_gap(first), *(_mean_gap(other) for _, other, _ in _compared(result))]
    text = "On the average token the two policies differ in probability by "
    if len(gaps) == 2:
        return f"{text}{gaps[0]} and by {gaps[1]}."
    marked = (
        f"{row['more_than_noise']} of {row['tested']} in {row['trace']}"
        for row in result["comparisons"]
    )
    return (
        f"{text}{', '.join(gaps)}. Metrics that differ from {first['name']} by more than noise: "
        f"{', '.join(marked)} (by chance: one in twenty)."
    )


def _mean_gap(side: Row) -> str:
    return (
        f"{numbers.number(side['summary']['metrics']['tv_binary_mean']['value'])} in {side['name']}"
    )


def _leading(comparison: Row) -> tuple[MetricRow, ...]:
    """How many times larger the gap of the larger trace is."""
    return tuple(_times_larger(comparison, key) for key in LEADING)


def _times_larger(comparison: Row, key: str) -> MetricRow:
    metric, factor = METRICS[key], comparison["metrics"][key]["factor"]
    value, low, high = factor["value"], factor["low"], factor["high"]
    larger, smaller = comparison["trace"], comparison["against"]
    if value is not None and 0 < value < 1 and low != 0:
        value, larger, smaller = 1 / value, smaller, larger
        low, high = (None, None) if low is None else (1 / high, 1 / low)
    if value == 0:
        return MetricRow(metric, numbers.MISSING, note=f"no gap in {comparison['trace']}")
    interval = numbers.MISSING if low is None else f"[{_two_digits(low)}, {_two_digits(high)}]"
    shown = numbers.MISSING if value is None else f"{_two_digits(value)} ×"
    return MetricRow(
        metric,
        shown,
        interval,
        note=factor["note"] or "",
        name=f"{metric.label}, {larger} / {smaller}",
    )


def _two_digits(value: float) -> str:
    return numbers.number(float(f"{value:.2g}"), 2)


def _settings_text(comparisons: list[Row]) -> str:
    if any(not row["harmless"] for comparison in comparisons for row in comparison["settings"]):
        return (
            "Sorted by how often each has caused a gap in reported cases. To find the cause, "
            "change one at a time."
        )
    text = "No recorded setting that affects a log-probability differs."
    if any(comparison["differs"] in DIFFERENT for comparison in comparisons):
        text += (
            " That leaves what a manifest does not record: hardware, the weights themselves, how a "
            "library was built."
        )
    return text


def _settings_table(comparison: Row) -> Table:
    """Settings that affect a log-probability, likely causes first."""
    why = [named("why it can matter", "why"), named("seen in", "source", optional=True)]
    rows = [row for row in comparison["settings"] if not row["harmless"]]
    return table(_against(comparison), rows, [*_setting_columns(comparison), *why])


def _harmless_table(comparison: Row) -> Table:
    """Settings that change which responses there are, not how one is scored."""
    return table(
        f"{_against(comparison)}: settings that change only which responses there are",
        [row for row in comparison["settings"] if row["harmless"]],
        _setting_columns(comparison),
        fold="Other settings that differ",
        terminal_rows=0,
    )


def _against(comparison: Row) -> str:
    return f"{comparison['trace']} against {comparison['against']}"


def _setting_columns(comparison: Row) -> list[Col[Row]]:
    return [
        named("setting", "setting"),
        text(comparison["against"], lambda row: numbers.setting(row["first"])),
        text(comparison["trace"], lambda row: numbers.setting(row["other"])),
    ]


def _difference_tables(result: Row) -> tuple[Table, ...]:
    several = len(result["comparisons"]) > 1
    tables = tuple(_differences_table(*found, folded=several) for found in _compared(result))
    return (_side_by_side_table(result), *tables) if several else tables


def _differences_table(first: Row, other: Row, comparison: Row, *, folded: bool = False) -> Table:
    """Every metric that either trace has: both values, their difference and their factor."""
    a, b, metrics = first["name"], other["name"], _measured(first, other)
    found = comparison["metrics"]
    return table(
        _against(comparison),
        metrics,
        [
            text("metric", lambda metric: metric.label),
            col(a, lambda metric: _value(metric, first)),
            col(b, lambda metric: _value(metric, other)),
            col(f"{b} − {a}", lambda metric: _difference(metric, found[metric.key]["difference"])),
            text("*", lambda metric: _mark(found[metric.key])),
            col(
                f"{b} / {a}",
                lambda metric: numbers.times(found[metric.key]["factor"]["value"]),
                optional=True,
            ),
        ],
        note=_MARKED,
        fold=f"{_against(comparison)}: every difference" if folded else "",
        terminal_rows=0 if folded else None,
        row_metrics=metrics,
    )


def _side_by_side_table(result: Row) -> Table:
    """The values of all traces; a star marks those that differ from the first by more than
    noise.
    """
    first, *others = result["traces"]
    metrics = _measured(*result["traces"])
    return table(
        "All traces",
        metrics,
        [
            text("metric", lambda metric: metric.label),
            col(first["name"], lambda metric: _value(metric, first)),
            *map(_marked_column, others, result["comparisons"]),
        ],
        note=f"{_MARKED} Differences are from {first['name']}.",
        row_metrics=metrics,
    )


def _marked_column(side: Row, comparison: Row) -> Col[Metric]:
    found = comparison["metrics"]
    return col(
        f"{side['name']} *",
        lambda metric: f"{_value(metric, side)} {_mark(found[metric.key]) or ' '}",
        optional=True,
    )


def _on_tokens_table(pair: str, comparison: Row) -> Table:
    """One policy of both traces compared, and how often a clip decision differs."""
    found, (current, reference) = comparison["on_tokens"], _POLICIES[pair]
    same = found["reference"]["abs_d_max"]["value"] == 0
    metrics = (*(METRICS[key] for key in METRICS_SHOWN), CLIP_FLIPS)
    return table(
        f"{_against(comparison)} on {numbers.count(found['tokens'])} tokens",
        metrics,
        [
            text("metric", lambda metric: metric.label),
            _policy_column(current, found["current"] | {CLIP_FLIPS.key: found["clip_flips"]}),
            *([] if same else [_policy_column(reference, found["reference"])]),
        ],
        note=f"Both traces have the same log-probabilities of the {reference}." if same else "",
        row_metrics=metrics,
    )


def _policy_column(name: str, values: Row) -> Col[Metric]:
    return col(
        name, lambda metric: _difference(metric, values[metric.key]) if metric.key in values else ""
    )


def _measured(*sides: Row) -> tuple[Metric, ...]:
    return tuple(
        metric
        for metric in METRICS.values()
        if any(side["summary"]["metrics"][metric.key]["value"] is not None for side in sides)
    )


def _value(metric: Metric, side: Row) -> str:
    return in_words(metric, value_of(side["summary"]["metrics"][metric.key]))[0]


def _difference(metric: Metric, found: Row) -> str:
    """A value with half its interval; a share is in percent."""
    if metric.unit != "share":
        return plain(found)
    return f"{percent(found)} %" if value_of(found) is not None else numbers.MISSING


def _mark(found: Row) -> str:
    return "*" if found["more_than_noise"] else ""
