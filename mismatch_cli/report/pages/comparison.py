"""The page of a comparison: an `Outline`, which terminal and HTML print."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap

from mismatch_cli import DPPO
from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.outline import (
    Brief,
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
    DECIDING,
    GAPS,
    LEADING,
    MASKED,
    by_reason,
    command_line,
    left_out_of,
    measured,
    settings_tables,
)
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    filled,
    in_words,
    percent,
    plain,
    table,
    text,
    value_of,
)
from mismatch_cli.studies.comparison import ComparisonAnalysis
from mismatch_cli.studies.comparison_result import (
    ComparedTrace,
    ComparisonResult,
    TraceDifference,
)
from mismatch_cli.studies.settings_compared import SettingDifference
from mismatch_cli.studies.shared_tokens import METRICS_SHOWN, TokenComparison
from mismatch_cli.studies.study import who_is_compared

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
# Of traces with the same responses, a token that one of them lacks is masked in the others, too
_JOINED = MASKED | {
    "masked": (
        "tokens are left out: masked here, or not measured in a trace with the same responses"
    )
}
_VERDICTS: dict[str, tuple[str, Status]] = {  # the strongest first
    "gap": ("THE GAP DIFFERS", "mixed"),
    "metrics": ("SOME METRICS DIFFER", "mixed"),
    "untested": ("UNDECIDED", ""),
    "noise": ("NO DIFFERENCE", "good"),
}
_SETTINGS = 4  # of all comparisons, on a screen
_MANY = 3  # comparisons
_GAP, _GAP_IN_PROBABILITY, _LARGEST = "abs_d_mean", "tv_binary_mean", "abs_d_max"
_Other = tuple[ComparedTrace, TraceDifference]
CLIP_FLIPS = Metric(
    "clip_flips",
    "clip decision differs",
    "share of tokens with r < 0.8, r in [0.8, 1.28] or r > 1.28 in one trace, and a different "
    "one in the other",
    "share",
    f"{DPPO}, App. C.1, Clip-Higher",
)


def page(study: ComparisonAnalysis) -> Outline:
    """The differences between the first trace and each of the others (docs/json/compare.md)."""
    result = study.result.named_by_run()
    rows = result.comparisons
    settings = []
    for trace in result.traces:
        for title, facts in settings_tables(trace.about):
            settings.append((f"{trace.name}: {title}", facts))
    return Outline(
        title="What differs between the traces?",
        about=_about(result),
        subject=_subject(result),
        notes=_notes(result),
        headline=_headline(result),
        leading=tuple(_times_larger(rows[0], key) for key in LEADING),
        verdict=_verdict(rows),
        remarks=_untested(rows),
        next=_next(study),
        parts=_sections(result),
        settings=tuple(settings),
        command=command_line("compare", study.typed, *result.arguments),
        notation=_NOTATION,
    )


def _sections(result: ComparisonResult) -> tuple[Section, ...]:
    rows = result.comparisons
    on_tokens = []
    for row in rows:
        if row.on_tokens:
            on_tokens.append(_on_tokens_table(result.pair, row, row.on_tokens))
    return (
        Section("Differences in the gap", _DIFFERENCES, tables=_difference_tables(result)),
        # That no setting differs is a finding: the section stays without a table.
        Section(
            "Differences in settings",
            _settings_text(rows),
            tables=_settings_tables(rows),
            stays=True,
        ),
        Section("On the same tokens", _ON_TOKENS if on_tokens else "", tables=tuple(on_tokens)),
        # These hold only figures, whose plots name them.
        Section("Distribution of the gap"),
        Section("Ratio and TV by probability"),
        Section("By position in the response"),
    )


def _subject(result: ComparisonResult) -> tuple[str, str]:
    """The traces, and how they are paired."""
    traces = []
    for trace in result.traces:
        tokens = numbers.things(trace.summary.counts.tokens, "token")
        traces.append(f"{trace.name} ({tokens})")
    pairings = dict.fromkeys(_pairing(result, row) for row in result.comparisons)
    return f"{' against '.join(traces)}, {_WHEN[result.pair]}", "; ".join(pairings)


def _about(result: ComparisonResult) -> Facts:
    traces = [(trace.name, _about_trace(trace)) for trace in result.traces]
    rows = result.comparisons
    pairings = [(f"{row.trace} with {row.against}", _pairing(result, row)) for row in rows]
    if len(rows) == 1:
        pairings = [("Paired", _pairing(result, rows[0]))]
    return (*traces, *pairings, ("Gap", f"{result.pair}: {GAPS[result.pair]}"))


def _about_trace(trace: ComparedTrace) -> str:
    counts, source = trace.summary.counts, trace.about.source
    facts = (
        trace.folder,
        who_is_compared(trace.about.manifest),
        source.title if source else "",
        measured(counts, f"{numbers.count(counts.tokens)} tokens"),
    )
    return " · ".join(filter(None, facts))


def _pairing(result: ComparisonResult, row: TraceDifference) -> str:
    responses, prompts = numbers.count(row.shared_responses), numbers.count(row.shared_prompts)
    if row.pairing == "tokens":
        return f"on the same tokens: both have the same {responses} responses"
    if row.pairing == "prompts":
        same = f"; {responses} responses are the same" if row.shared_responses else ""
        return f"by prompt: both have responses to the same {prompts} prompts{same}"
    if not row.shared_prompts:
        return "not paired: no prompt is in both"
    (other,) = [trace for trace in result.traces if trace.name == row.trace]
    of_both = f"{_share_of(result.first, prompts)} and {_share_of(other, prompts)}"
    return f"not paired: {of_both} are in both, not most of each"


def _share_of(trace: ComparedTrace, prompts: str) -> str:
    """`24 of NAME's 128 prompts`, `all 24 of NAME's`: of one trace the prompts are not all."""
    every = numbers.count(trace.prompts)
    if prompts == every:
        return f"all {every} of {trace.name}'s"
    return f"{prompts} of {trace.name}'s {every} prompts"


def _notes(result: ComparisonResult) -> tuple[str, ...]:
    notes = []
    joined = set()  # traces with the same responses, by their names
    for row in result.comparisons:
        if row.pairing == "tokens":
            joined |= {row.trace, row.against}
    for trace in result.traces:
        reasons = _JOINED if trace.name in joined else MASKED
        notes += [f"{trace.name}: {note}" for note in _left_out(trace, reasons)]
    for other, row in result.others:
        notes += _unlike(result.first, other, row)
    return tuple(notes)


def _left_out(trace: ComparedTrace, reasons: Mapping[str, str]) -> list[str]:
    notes = list(left_out_of(trace.about, by_reason(trace.summary.counts, reasons)))
    if trace.left_out:
        notes.append(
            f"{numbers.count(trace.left_out)} of {numbers.count(trace.responses)} responses are "
            "left out because another trace has no match for them; the numbers below do not cover "
            "them."
        )
    return notes


def _unlike(first: ComparedTrace, other: ComparedTrace, row: TraceDifference) -> list[str]:
    """What makes numbers of two traces differ that is not their gap."""
    notes = []
    if not 0.9 < other.per_prompt / first.per_prompt < 1.1:
        notes.append(
            f"{first.name} has {_per_prompt(first)} responses to a prompt and {other.name} "
            f"{_per_prompt(other)}: this alone changes the share of groups without signal."
        )
    if row.on_tokens and row.on_tokens.masked_in_one:
        notes.append(
            f"{numbers.count(row.on_tokens.masked_in_one)} tokens are masked in only one of "
            f"{row.against} and {row.trace}; they are left out of both."
        )
    return notes


def _per_prompt(trace: ComparedTrace) -> str:
    samples = trace.per_prompt
    if samples.is_integer():
        return numbers.count(int(samples))
    return numbers.number(samples)


def _headline(result: ComparisonResult) -> str:
    """The gap of each trace."""
    gaps = []
    for trace in result.traces:
        gap = trace.summary.metrics[_GAP_IN_PROBABILITY].value
        gaps.append(f"{numbers.number(gap)} in {trace.name}")
    return f"On the average token the two policies differ in probability by {', '.join(gaps)}."


def _larger_first(row: TraceDifference, key: str) -> tuple[Estimate, str, str]:
    """How many times larger the gap of the larger trace is, and the names of both."""
    factor = row.metrics[key].factor
    if not factor.value or factor.value >= 1:
        return factor, row.trace, row.against
    inverse = Estimate(1 / factor.value, note=factor.note)
    if factor.low and factor.high:
        inverse = replace(inverse, low=1 / factor.high, high=1 / factor.low)
    return inverse, row.against, row.trace


def _times_larger(row: TraceDifference, key: str) -> MetricRow:
    metric = METRICS[key]
    factor, larger, smaller = _larger_first(row, key)
    if factor.value == 0:
        return MetricRow(metric, numbers.MISSING, note=f"no gap in {row.trace}")
    interval = numbers.MISSING
    if factor.low is not None and factor.high is not None:
        interval = f"[{numbers.two_digits(factor.low)}, {numbers.two_digits(factor.high)}]"
    return MetricRow(
        metric,
        numbers.MISSING if factor.value is None else f"{numbers.two_digits(factor.value)} ×",
        interval,
        note=factor.note or "",
        name=f"{metric.label}, {larger} / {smaller}",
    )


def _verdict(rows: Sequence[TraceDifference]) -> Verdict:
    strongest = min(map(_answer, rows), key=list(_VERDICTS).index)
    words, status = _VERDICTS[strongest]
    sentences = []
    for row in rows:
        sentences.append(_how_much(row))
        if len(rows) < _MANY:
            # Of several comparisons, the tables say the rest.
            sentences += (_how_many(row), _likeliest(row))
    return Verdict(words, " ".join(filter(None, sentences)), status)


def _answer(row: TraceDifference) -> str:
    """What differs; nothing where all numbers are equal, which leaves no interval to test."""
    if row.differs == "untested" and not _has_difference(row):
        return "noise"
    return row.differs


def _has_difference(row: TraceDifference) -> bool:
    return any(metric.difference.value for metric in row.metrics.values())


def _how_much(row: TraceDifference) -> str:
    """How many times larger the gap of the larger trace is, by the mean that differs."""
    key = _GAP
    if row.metrics[_GAP_IN_PROBABILITY].more_than_noise and not row.metrics[_GAP].more_than_noise:
        key = _GAP_IN_PROBABILITY
    factor, larger, smaller = _larger_first(row, key)
    if factor.value == 0:
        return f"{row.trace} has no gap."
    if factor.value is None:
        return ""
    label = METRICS[key].label
    label = f"{label[0].upper()}{label[1:]}"
    times = numbers.times(factor.value).replace("> ", "more than ")
    # A difference can be certain although it is too small for a factor of two digits.
    if times == "1.0 ×":
        times = f"{100 * (factor.value - 1):.2g} %"
        if not row.is_different:
            return f"{label} is about the same in {larger} and {smaller} ({times} apart)."
    return f"{label} is {times} larger in {larger} than in {smaller}."


def _how_many(row: TraceDifference) -> str:
    """How many metrics differ by more than noise, and how many would by chance."""
    if row.tested:
        return (
            f"{row.more_than_noise} of {row.tested} metrics differ by more than noise; about "
            f"{row.expected_by_chance:.0f} would by chance."
        )
    if _has_difference(row):
        return "Too few prompts to tell this from noise."
    return "No metric differs."


def _likeliest(row: TraceDifference) -> str:
    """The likeliest cause among settings that both traces record; empty where nothing differs."""
    likely = [setting for setting in row.settings if setting.likely and not setting.in_one_only]
    if not likely or not row.is_different:
        return ""
    likeliest = likely[0]
    return (
        f"Likeliest of the settings that differ: {likeliest.setting} "
        f"({numbers.setting_text(likeliest.first)} in {row.against}, "
        f"{numbers.setting_text(likeliest.other)} in {row.trace})."
    )


def _untested(rows: Sequence[TraceDifference]) -> Facts:
    """The metrics of the only comparison whose difference has no interval, grouped by reason."""
    if len(rows) != 1:
        return ()
    labels: dict[str, list[str]] = {}
    for key in DECIDING:
        difference = rows[0].metrics[key].difference
        if difference.value is not None and difference.low is None:
            reason = (difference.note or "too few prompts").removesuffix(": no interval")
            labels.setdefault(reason, []).append(METRICS[key].label)
    if not labels:
        return ()
    untested = [f"{' and '.join(names)} ({reason})" for reason, names in labels.items()]
    return (("Not tested", f"{'; '.join(untested)}."),)


def _next(study: ComparisonAnalysis) -> Facts:
    every = "every metric and setting"
    if len(study.typed) == 2:
        every = "every metric, its difference and factor"
    commands = [(suggest("compare", *study.typed, "--full"), every)]
    for run in dict.fromkeys(study.typed[:2]):
        commands.append((suggest("diagnose", run), f"a mistake in {run}, or which setting?"))
    return tuple(commands)


def _settings_text(rows: Sequence[TraceDifference]) -> str:
    if any(row.suspects for row in rows):
        return (
            "Sorted by how often each has caused a gap in reported cases. To find the cause, "
            "change one at a time."
        )
    text = "No recorded setting that affects a log-probability differs."
    if any(row.is_different for row in rows):
        text += (
            " That leaves what a manifest does not record: hardware, the weights themselves, how a "
            "library was built."
        )
    return text


def _settings_tables(rows: Sequence[TraceDifference]) -> tuple[Table, ...]:
    of_each = max(1, _SETTINGS // len(rows))
    # Where a screen is full, the settings of the first comparison keep a row.
    tables = [_settings_table(rows[0], Brief.first(of_each, fewest=1))]
    for row in rows[1:]:
        tables.append(_settings_table(row, Brief.first(of_each, fewest=0)))
    return filled(*tables, *map(_harmless_table, rows))


def _settings_table(row: TraceDifference, brief: Brief) -> Table:
    """Settings that affect a log-probability, likely causes first."""
    return table(
        _against(row),
        row.suspects,
        [
            *_setting_columns(row),
            text("why it can matter", lambda setting: setting.why),
            text("seen in", lambda setting: setting.source, priority=Priority.FULL),
        ],
        brief=brief,
    )


def _harmless_table(row: TraceDifference) -> Table:
    """Settings that change which responses there are, not how one is scored."""
    return table(
        f"{_against(row)}: settings that change only which responses there are",
        [setting for setting in row.settings if setting.harmless],
        _setting_columns(row),
        fold="Other settings that differ",
        terminal_rows=0,
    )


def _against(row: TraceDifference) -> str:
    return f"{row.trace} against {row.against}"


def _setting_columns(row: TraceDifference) -> list[TextColumn[SettingDifference]]:
    return [
        text("setting", lambda setting: setting.setting, short="settings that differ"),
        text(row.against, lambda setting: numbers.setting_text(setting.first)),
        text(row.trace, lambda setting: numbers.setting_text(setting.other)),
    ]


def _difference_tables(result: ComparisonResult) -> tuple[Table, ...]:
    """Two traces with their difference; several side by side, and each difference folded."""
    first, others = result.first, result.others
    if len(others) == 1:
        return (_gap_table(first, others, _against(result.comparisons[0])),)
    tables = [_gap_table(first, others, "All traces")]
    for other in others:
        whole = _gap_table(first, [other], _against(other[1]))
        fold = f"{whole.title}: every difference"
        tables.append(replace(whole, brief=None, fold=fold, terminal_rows=0))
    return tuple(tables)


def _gap_table(first: ComparedTrace, others: Sequence[_Other], title: str) -> Table:
    """Every metric that one of the traces has; on a screen those that people act on."""
    metrics = _measured([first, *(other for other, _ in others)])
    columns: list[TextColumn[Metric]] = [
        text("metric", lambda metric: metric.label),
        col(first.name, lambda metric: _value(metric, first)),
        *starmap(_marked_column, others),
    ]
    if len(others) == 1:
        columns += _difference_columns(others[0][1])
    keys = [metric.key for metric in metrics]
    deciding = [keys.index(key) for key in DECIDING if key in keys]
    return table(
        title,
        metrics,
        columns,
        note=f"{_MARKED} Differences are from {first.name}.",
        row_metrics=metrics,
        brief=Brief(deciding, _MARKED, fewest=len(deciding), counts_rest=False),
    )


def _marked_column(trace: ComparedTrace, row: TraceDifference) -> TextColumn[Metric]:
    """The values of another trace, with a star where they differ by more than noise."""

    def cell(metric: Metric) -> str:
        mark = "*" if row.metrics[metric.key].more_than_noise else " "
        return f"{_value(metric, trace)} {mark}"

    return col(f"{trace.name} *", cell)


def _difference_columns(row: TraceDifference) -> list[TextColumn[Metric]]:
    return [
        col(
            f"{row.trace} − {row.against}",
            lambda metric: _in_unit(metric, row.metrics[metric.key].difference),
            short="difference",
        ),
        col(
            f"{row.trace} / {row.against}",
            lambda metric: numbers.times(row.metrics[metric.key].factor.value),
            priority=Priority.FULL,
        ),
    ]


def _on_tokens_table(pair: str, row: TraceDifference, on_tokens: TokenComparison) -> Table:
    """One policy of both traces compared, and how often a clip decision differs."""
    current, reference = _POLICIES[pair]
    flips = {CLIP_FLIPS.key: on_tokens.clip_flips}
    columns = [
        text("metric", lambda metric: metric.label),
        _policy_column(current, {**on_tokens.current, **flips}),
        _policy_column(reference, on_tokens.reference),
    ]
    note = ""
    # A rescored trace has the same reference: a column of zeros would hide that.
    if on_tokens.reference[_LARGEST].value == 0:
        columns.pop()
        note = f"Both traces have the same log-probabilities of the {reference}."
    metrics = (*(METRICS[key] for key in METRICS_SHOWN), CLIP_FLIPS)
    title = f"{_against(row)} on {numbers.count(on_tokens.tokens)} tokens"
    return table(title, metrics, columns, note=note, row_metrics=metrics)


def _policy_column(name: str, values: Mapping[str, Estimate]) -> TextColumn[Metric]:
    return col(name, lambda metric: _in_unit(metric, values.get(metric.key)))


def _measured(traces: Sequence[ComparedTrace]) -> tuple[Metric, ...]:
    """The metrics that one of the traces has."""
    metrics = []
    for key, metric in METRICS.items():
        if any(trace.summary.metrics[key].value is not None for trace in traces):
            metrics.append(metric)
    return tuple(metrics)


def _value(metric: Metric, trace: ComparedTrace) -> str:
    return in_words(metric, trace.summary.metrics[metric.key].value)[0]


def _in_unit(metric: Metric, estimate: Estimate | None) -> str:
    """A value with half its interval; a share is in percent."""
    if metric.unit != "share" or value_of(estimate) is None:
        return plain(estimate)
    return f"{percent(estimate)} %"
