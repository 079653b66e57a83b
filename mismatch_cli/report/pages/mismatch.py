"""The page of a trace: an `Outline` of its gap, which terminal and HTML print."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.estimate import NOT_MEASURED, Estimate
from mismatch_cli.metrics.gap_table import (
    GAP_GROUPS,
    METRICS,
    RESPONSES,
    SEQUENCE,
    VOLATILITY,
    Metric,
    metrics_in_group,
)
from mismatch_cli.metrics.pair_summary import (
    PairSummary,
    ProbabilityBin,
    ProfileRow,
)
from mismatch_cli.report.excerpts import worst_excerpts
from mismatch_cli.report.outline import (
    Facts,
    MetricGroup,
    MetricRow,
    Outline,
    Profile,
    Section,
    Table,
)
from mismatch_cli.report.pages.mismatch_limits import limits_section, verdict, with_limit
from mismatch_cli.report.pages.mismatch_routing import routing_remark, routing_section
from mismatch_cli.report.pages.mismatch_suspect import suspect_remark, suspect_tests
from mismatch_cli.report.preamble import (
    GAPS,
    LEADING,
    about_facts,
    command_line,
    left_out,
    settings_tables,
    subject_lines,
)
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    filled,
    in_words,
    metric_row,
    mu_bin,
    number,
    occupied,
    plain,
    span,
    table,
    times_noise,
)
from mismatch_cli.studies.mismatch import MismatchAnalysis, MismatchResult
from mismatch_cli.studies.study import typed_names

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
_TURNS = (
    "A turn is a run of trained tokens; tool output and user messages between turns are not "
    "trained. A jump at the second turn points to how the conversation is rebuilt: chat "
    "template, tool output, dropped thoughts."
)
_DIFFERENCE, _OUTSIDE = "tv_binary_mean", "ratio_outside_0.8_1.28"
_OF_RATIO = "ratio_sd"


def page(study: MismatchAnalysis, worst: int | None = None) -> Outline:
    """The full report of traces (docs/json/summary.md), with the `worst` tokens."""
    result, main = study.result, study.result.main
    bars = result.verdict.bars
    return Outline(
        title="How far apart are rollout and trainer?",
        about=about_facts(result.about, main.counts),
        subject=subject_lines(result.about, main.counts),
        notes=left_out(result.about, main, result.total),
        headline=_headline(result),
        leading=tuple(with_limit(_row(main, key), bars, main.pair) for key in LEADING),
        verdict=verdict(result.verdict),
        remarks=(*_remarks(result), *suspect_remark(result)),
        profiles=_profiles(main),
        next=_next(study),
        parts=_sections(study, worst),
        settings=settings_tables(result.about),
        command=command_line("report", typed_names(study.traces)),
    )


def _sections(study: MismatchAnalysis, worst: int | None) -> list[Section]:
    result, main = study.result, study.result.main
    # Every page has the same order, from the gap to its worst tokens: readers know where to look.
    # Sections of what this trace did not measure are empty, and are left out of the page.
    sections = [
        Section("The gap", _gap_text(result), groups=_gap_groups(main)),
        limits_section(result),
        _volatility_section(main),
        routing_section(result.routing),
        _position_section(main),
        _sequence_section(main),
    ]
    for pair in result.pairs.values():
        if pair is not main:
            sections.append(Section(_pair_title(pair), _pair_text(pair), groups=_gap_groups(pair)))
    sections.append(_responses_section(main, imported=result.about.source is not None))
    return [*sections, *_worst_sections(study, worst)]


def _worst_sections(study: MismatchAnalysis, worst: int | None) -> tuple[Section, Section]:
    """The worst tokens, of which a screen shows as many as were asked for, or else one if it has
    room; and the worst responses.
    """
    tokens, responses = worst_excerpts(study.traces, study.main_pair, study.result.worst)
    for n, token in enumerate(tokens[: 1 if worst is None else worst]):
        tokens[n] = replace(token, short=f"Worst token {token.title}", stays=bool(worst))
    return (
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
    )


def _headline(result: MismatchResult) -> str:
    main, total = result.main, result.total
    noise = times_noise(main.metrics[_DIFFERENCE].noise)
    # Only a number of times reads as one in a sentence: the noise may be missing, or near 0.
    floor = f", {noise} the trainer's own noise" if noise.endswith("×") else ""
    text = (
        f"The two policies differ by {_value(main, _DIFFERENCE)} in probability on the "
        f"average token{floor}. {_value(main, _OUTSIDE)} of the tokens have a ratio outside "
        "[0.8, 1.28]."
    )
    if total is None or total is main:
        return text
    return (
        f"At equal weights: {text[0].lower()}{text[1:]} At the trainer's current weights: "
        f"{_value(total, _DIFFERENCE)}, with {_value(total, _OUTSIDE)} outside."
    )


def _remarks(result: MismatchResult) -> Facts:
    main, total = result.main, result.total
    remarks = []
    if total is not None and total is not main:
        stale = (
            f"mean |π − μ| {_value(total, _DIFFERENCE)}, {_value(total, _OUTSIDE)} outside "
            "[0.8, 1.28]"
        )
        remarks.append(("With staleness", stale))
    responses = (
        f"reward {_value(main, 'reward_mean')}",
        f"length {_value(main, 'length_mean')}",
        f"truncated {_value(main, 'truncated_share')}",
        f"no signal in {_value(main, 'equal_rewards_share')} of groups",
    )
    measured = " · ".join(fact for fact in responses if numbers.MISSING not in fact)
    if measured:
        remarks.append(("Responses", measured))
    return (*remarks, *routing_remark(result.routing))


def _profiles(pair: PairSummary) -> tuple[Profile, ...]:
    """Where the gap is: by μ, by position and by turn."""
    bins, positions = occupied(pair.volatility), pair.positions
    profiles = []
    if len(bins) > 1:
        ends = f"{bins[0].mu_low:g}", f"{bins[-1].mu_high:g}"
        spread = [row.metrics[_OF_RATIO] for row in bins]
        profiles.append(_profile("Where, by μ", spread, ends, "SD of the ratio"))
    if len(positions) > 1:
        ends = str(positions[0].first), str(positions[-1].last)
        gaps = [row.abs_d_mean for row in positions]
        profiles.append(_profile("by position", gaps, ends, "mean |Δlog p|"))
    if len(pair.turns) > 1:
        gaps = [row.abs_d_mean for row in pair.turns]
        ends = "1", span(pair.turns[-1])
        profiles.append(_profile("by turn", gaps, ends, "mean |Δlog p|"))
    return tuple(profiles)


def _profile(
    title: str, estimates: Sequence[Estimate], ends: tuple[str, str], quantity: str
) -> Profile:
    values = tuple(estimate.value for estimate in estimates)
    measured = [value for value in values if value is not None]
    reach = numbers.MISSING
    if measured:
        reach = f"{numbers.number(min(measured), 2)} to {numbers.number(max(measured), 2)}"
    return Profile(title, values, *ends, f"{quantity}, {reach}")


def _next(study: MismatchAnalysis) -> Facts:
    """The commands that test the first suspect, then others; where the gap is larger than settings
    on record make it, what looks for a mistake comes first.
    """
    runs = typed_names(study.traces)
    first = [
        *suspect_tests(study.result),
        (suggest("diagnose", *runs), "a mistake, or which setting?"),
    ]
    if study.result.verdict.is_above_expected:
        first.insert(0, first.pop())
    return (
        *first,
        (suggest("clipstats", *runs), "what PPO and DPPO would block"),
        (suggest("report", *runs, "--as", "all"), "as your framework logs them"),
        (suggest("report", *runs, "--full"), "every metric, bin and position"),
    )


def _gap_text(result: MismatchResult) -> str:
    text = f"{_pair_title(result.main)}. Intervals are 95 %, over prompts."
    if result.floor is not None:
        text += (
            f" Noise: the trainer's gap to itself when it scores {result.floor.counts.tokens:,} "
            "sampled tokens again in another micro-batch shape. Extremes grow with the number of "
            "tokens, so compare them with care. Signed means have no factor because they can be "
            "near zero by chance."
        )
    return text


def _pair_text(pair: PairSummary) -> str:
    if pair.pair != "staleness":
        return ""
    return (
        "Here μ is the trainer at the weights that sampled. The engine sampled the tokens, so "
        "these KL estimates measure what the optimiser changed on them."
    )


def _pair_title(pair: PairSummary) -> str:
    return f"{pair.pair.capitalize()}: {GAPS[pair.pair]}"


def _gap_groups(pair: PairSummary) -> tuple[MetricGroup, ...]:
    groups = [_group(pair, title) for title in GAP_GROUPS]
    return tuple(group for group in groups if group.rows)


def _group(pair: PairSummary, title: str) -> MetricGroup:
    """The metrics of a group, without those that were not measured."""
    rows = []
    for metric in metrics_in_group(title):
        row = _row(pair, metric.key)
        if row.value != numbers.MISSING or row.note != NOT_MEASURED:
            rows.append(row)
    return MetricGroup(title, tuple(rows))


def _row(pair: PairSummary, key: str) -> MetricRow:
    return metric_row(METRICS[key], pair.metrics[key])


def _value(pair: PairSummary, key: str) -> str:
    return in_words(METRICS[key], pair.metrics[key])[0]


def _volatility_section(pair: PairSummary) -> Section:
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
    title: str, pair: PairSummary, keys: Sequence[str], show: Callable[[Estimate], str]
) -> Table:
    bins = occupied(pair.volatility)
    columns: list[TextColumn[ProbabilityBin]] = [
        col("μ", mu_bin),
        col("tokens", lambda row: numbers.count(row.tokens)),
    ]
    for key, metric in VOLATILITY.items():
        if key in keys and any(row.metrics[key].value is not None for row in bins):
            columns.append(_spread(metric, show))
    return table(title, bins, columns)


def _spread(metric: Metric, show: Callable[[Estimate], str]) -> TextColumn[ProbabilityBin]:
    return col(metric.label, lambda row: show(row.metrics[metric.key]), metric)


def _position_section(pair: PairSummary) -> Section:
    text = (
        "Drift with position points to the position encoding; a jump at the last token points to "
        "the stop token."
    )
    tables = [
        _profile_table("From the first token", "position", pair.positions),
        _profile_table("From the last token", "tokens before the last", pair.from_end),
    ]
    if len(pair.turns) > 1:
        text += f" {_TURNS}"
        tables.append(_profile_table("By turn", "turn", pair.turns, *_OF_TURNS))
    return Section("By position in the response", text, tables=filled(*tables))


def _profile_table(
    title: str, axis: str, rows: Sequence[ProfileRow], *columns: TextColumn[ProfileRow]
) -> Table:
    return table(title, rows, [col(axis, span), *columns, *_OF_POSITIONS])


_OF_TURNS: tuple[TextColumn[ProfileRow], ...] = (
    col("turns", lambda row: numbers.count(row.turns)),
    col("mean length", lambda row: plain(row.length_mean)),
)


def _mean_column(key: str) -> TextColumn[ProfileRow]:
    """A mean of a profile's rows, which have it under the key of its metric."""
    return col(METRICS[key].label, lambda row: plain(getattr(row, key)), METRICS[key])


_OF_POSITIONS: tuple[TextColumn[ProfileRow], ...] = (
    col("tokens", lambda row: numbers.count(row.tokens)),
    *map(_mean_column, ("abs_d_mean", "d_mean", "tv_binary_mean")),
)


def _sequence_section(pair: PairSummary) -> Section:
    by_length = table(
        "By length",
        pair.sequence.by_length,
        [
            col("tokens", span),
            col("responses", lambda row: numbers.count(row.sequences)),
            col("mean Σd", lambda row: number(row.d_sum_mean)),
            col("SD of Σd", lambda row: number(row.d_sum_sd)),
        ],
    )
    text = (
        "Per-token gaps add up: sequence-level weights and masks act on the ratio of a whole "
        "response."
    )
    return Section("Whole responses", text, (_group(pair, SEQUENCE),), tables=filled(by_length))


def _responses_section(pair: PairSummary, *, imported: bool) -> Section:
    equal, reward = (pair.metrics[key].value for key in ("equal_rewards_share", "reward_mean"))
    text = (
        "An advantage is a reward minus the mean reward of its group (the samples of a prompt). "
        "A group whose rewards are all equal has no signal: its advantages are zero and it "
        "teaches nothing."
    )
    if reward is None:
        text = "The prompts have no answers, so nothing was graded and there are no advantages."
        if imported:
            text = "The dump has no rewards."
    elif equal == 1:
        solved = {0.0: "none was solved", 1.0: "all were solved"}
        outcome = solved.get(reward, "all samples of each agree")
        text = (
            f"Every group has equal rewards ({outcome}), so every advantage (reward minus group "
            "mean) is zero and these responses cause no update. Choose problems that the model "
            "solves only sometimes."
        )
    return Section("Rewards and responses", text, (_group(pair, RESPONSES),))
