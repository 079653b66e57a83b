"""The page of `clipstats`: an `Outline` of its result, which terminal and HTML print."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mismatch_cli.base import numbers
from mismatch_cli.metrics.clipping.bad_updates import BadUpdatesAtDelta, BadUpdatesOfStep
from mismatch_cli.metrics.clipping.blocked_rows import AlgorithmRow
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.excerpts import TitledToken, token_excerpts
from mismatch_cli.report.outline import Excerpt, Facts, MetricRow, Note, Outline, Section, Table
from mismatch_cli.report.pages.clipping_blocked import (
    algorithms_section,
    overlap_section,
    tokens_section,
)
from mismatch_cli.report.pages.clipping_thresholds import (
    approximation_section,
    counted,
    theory_section,
    thresholds_section,
)
from mismatch_cli.report.pages.clipping_verdict import next_commands, remarks, verdict
from mismatch_cli.report.preamble import (
    MASKED,
    by_reason,
    command_line,
    left_out_of,
    measured,
    settings_tables,
    subject_lines,
    who_facts,
)
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    filled,
    interval_or_note,
    metric_row,
    parts,
    plain,
    share,
    span,
    table,
    text,
)
from mismatch_cli.studies.clipping import ClippingAnalysis
from mismatch_cli.studies.clipping_result import SIGNS, ClippingResult
from mismatch_cli.studies.study import typed_names
from mismatch_cli.trace.origin import About

Bad = BadUpdatesAtDelta | BadUpdatesOfStep
_NOTATION = (
    "Numbers are over judged tokens unless stated: tokens with an advantage A other than 0; "
    "without advantages, all tokens, once as if A > 0 and once as if A < 0. μ (q in the formulas "
    "of masks) is the rollout’s probability of the sampled token, π (p) the trainer’s, π′ (p′) "
    "that of the trainer at the weights that sampled; r = π/μ, r′ = π/π′, ρ = π′/μ. Σ runs over "
    "judged tokens (in the theory over the T tokens of a response with reward R), keep is 0 "
    "where a mask blocks and 1 elsewhere, weight is the algorithm’s, C its cap. Intervals cover "
    "95 % over prompts."
)
_LEFT_OUT = MASKED | {
    "not_measured": "tokens lack a column that the algorithms need",
    "out_of_support": (
        "tokens are outside the trainer's truncated support (π = 0): their ratio is 0, their KL "
        "infinite"
    ),
    "zero_advantage": "tokens have an advantage of 0: no update to block",
}
_NO_ADVANTAGES = (
    "No advantages: every token is judged as if A > 0 and as if A < 0, and counts once per sign in "
    "overlap, sweeps and means. To get them: {way}."
)
_LACKING = (
    "Left out: {responses} without {column}, so that every algorithm is judged on the same "
    "tokens. To include them, name only algorithms that do not need it, with --algorithm."
)
_RECOMPUTED = {
    "measured": "measured: masks on both anchors are judged",
    "equal weights": "the trainer itself, at the weights that sampled",
    "absent": "not measured",
}
_TOTAL = "total"
_STEPS_SHOWN = 100
_CORRELATIONS_NOTE = (
    "Steps follow each other and share a policy: a correlation over them does not show a cause."
)


def page(study: ClippingAnalysis) -> Outline:
    """What each algorithm blocks, with tokens that only one of the compared pair blocks."""
    return page_of_result(study.result, example_excerpts(study), typed_names(study.traces))


def example_excerpts(study: ClippingAnalysis) -> list[Excerpt]:
    """Tokens in context that one of the compared pair blocks and the other keeps, both ways
    round; a screen has the first each way.
    """
    titled = []
    on_screen = set()
    for token in study.result.disputed:
        sign = f"(A {'>' if token.advantage == '+' else '<'} 0)"
        short = ""
        if token.only not in on_screen:
            on_screen.add(token.only)
            short = f"Only {token.only} blocks {sign}"
        title = f"{token.only} blocks, {token.not_} keeps {sign}"
        titled.append(TitledToken(token, title, short))
    return token_excerpts(study.traces, PAIRS[_TOTAL], titled)


def page_of_result(
    result: ClippingResult, examples: Sequence[Excerpt], runs: Sequence[Path] = ()
) -> Outline:
    """The page of a result; `runs` are the traces as the user types them."""
    return Outline(
        title="What do trust regions block?",
        about=_about(result),
        subject=subject_lines(result.about, result.counts),
        verdict=verdict(result),
        notes=tuple(_notes(result)),
        headline=_headline(result),
        leading=tuple(_leading(result)),
        remarks=remarks(result),
        next=next_commands(result, runs),
        parts=(
            algorithms_section(result),
            overlap_section(result, examples),
            tokens_section(result),
            _updates_section(result),
            thresholds_section(result),
            approximation_section(result),
            theory_section(result),
        ),
        settings=settings_tables(result.about),
        command=command_line("clipstats", runs, *result.arguments),
        notation=_NOTATION,
    )


def _about(result: ClippingResult) -> Facts:
    counts, count = result.counts, numbers.count
    tokens = f"{count(counts.tokens)} tokens"
    if result.has_advantages:
        signs = f"{count(counts.positive)} positive, {count(counts.negative)} negative"
        tokens += f" with an advantage ({signs})"
    judged = measured(counts, tokens)
    if counts.steps > 1:
        judged += f", {count(counts.steps)} steps"
    return (
        *who_facts(result.about),
        ("Recomputed policy π′", _RECOMPUTED[result.has.recomputed]),
        ("Judged", judged),
    )


def _notes(result: ClippingResult) -> Iterator[str]:
    """How the numbers differ from what was asked, then what they leave out."""
    about, counts = result.about, result.counts
    if not result.has_advantages:
        yield _NO_ADVANTAGES.format(way=_way_to("advantage", about))
    if "--theory" in result.arguments and result.theory is None:
        way = _way_to("reward", about)
        yield f"--theory needs rewards, and the trace has none. To get them: {way}."
    # Who names an algorithm has to hear first that it cannot be judged; else it is a detail.
    if result.names_algorithms:
        yield from _unsupported(result)
    yield from left_out_of(about, by_reason(counts, _LEFT_OUT))
    for column, responses in counts.lacking.items():
        if column != "logp_trainer":  # `left_out_of` names responses without a trainer score
            yield _LACKING.format(responses=numbers.things(responses, "response"), column=column)
    if not result.names_algorithms:
        yield from _in_short(result, _unsupported(result))


def _unsupported(result: ClippingResult) -> list[str]:
    """A sentence for each reason for which algorithms cannot be judged."""
    return [f"{', '.join(names)}: {why}." for why, names in result.unsupported.items()]


def _in_short(result: ClippingResult, reasons: Sequence[str]) -> Iterator[Note]:
    """These reasons, for which a screen has one line."""
    skipped = numbers.things(len(result.skipped), "algorithm")
    short = f"{skipped} cannot be judged on this trace: --full says why"
    for reason in reasons:
        yield Note(reason, short)
        short = ""


def _way_to(column: str, about: About) -> str:
    """How to get a trace with advantages or rewards: what to type, by where the trace comes
    from.
    """
    source = about.source
    if source is None:
        return "MISMATCH_ANSWER_FIELD=FIELD mismatch-cli probe"
    if source.is_recorded:
        return f"pass {column}= to the recorder"
    if source.format == "plain":
        return f"mismatch-cli import DUMP --columns {column}=COLUMN"
    return f"import a dump with {column}s"


def _headline(result: ClippingResult) -> str:
    if result.nothing_to_block or not result.leading:
        return ""
    if not result.has_advantages:
        return "; ".join(_hypothetical(result, row) for row in result.leading) + "."
    sentences = list(map(_lost, result.leading))
    bad = result.bad_updates
    if bad.over_negative.value is not None:
        sentences.append(
            f"{share(bad.over_negative)} of the tokens with A < 0 "
            f"({share(bad.over_tokens)} of those with A ≠ 0) are bad updates: pushed down "
            f"although they already lost {bad.delta:g} or more in probability."
        )
    return " ".join(sentences)


def _hypothetical(result: ClippingResult, row: AlgorithmRow) -> str:
    shares = [f"{share(row.blocked.of(sign))} of the tokens {result.when(sign)}" for sign in SIGNS]
    return f"{row.name} would block {' and '.join(shares)}"


def _lost(row: AlgorithmRow) -> str:
    name, lost = row.name, row.lost.all
    update = "the update" if row.weighs_by_ratio else "Σ |A|"
    if lost.value is None:
        return f"How much of {update} {name} loses is unknown: {lost.note}."
    if row.blocked.all.value:
        return f"{name} loses {share(lost)} of {update}."
    if lost.value:
        return f"{name} blocks no token, but its cap takes {share(lost)} of {update}."
    return f"{name} blocks no token."


def _leading(result: ClippingResult) -> Iterator[MetricRow]:
    """What the compared algorithms block, then what they lose, then bad updates."""
    rows = result.leading
    if not result.has_advantages:
        for sign in SIGNS:
            label = f"blocked {result.when(sign)}"
            for row in rows:
                yield _of_algorithm("blocked", label, row, row.blocked.of(sign))
        return
    for row in rows:
        yield _of_algorithm("blocked", "blocked", row, row.blocked.all)
    for row in rows:
        yield _of_algorithm("lost", "lost", row, row.lost.all)
    yield metric_row(CLIPPING["over_negative"], result.bad_updates.over_negative)


def _of_algorithm(key: str, label: str, row: AlgorithmRow, estimate: Estimate) -> MetricRow:
    return metric_row(CLIPPING[key], estimate, f"{label} · {row.name}")


def _updates_section(result: ClippingResult) -> Section:
    """Bad updates: how many, as a share of which tokens, and how they correlate with the reward."""
    bad = result.bad_updates
    by_threshold = table(
        "By the threshold δ",
        bad.sweep,
        [col("δ", lambda row: f"{row.delta:g}"), *_bad_shares(result)],
    )
    correlations = table(
        "Over the steps",
        bad.correlations,
        [
            text("correlation of", lambda row: row.of),
            text("with", lambda row: row.with_),
            col("steps", lambda row: numbers.count(row.steps)),
            counted("value", "correlations", lambda row: row.estimate, _value),
            col("95 % interval", lambda row: interval_or_note(row.estimate)),
        ],
        note=_CORRELATIONS_NOTE,
    )
    return Section(
        "Bad updates",
        _updates_text(result),
        tables=filled(by_threshold, _bad_by_step(result), correlations),
    )


def _value(estimate: Estimate) -> str:
    """The value with the digits that its interval leaves."""
    return numbers.estimate(*parts(estimate))[0]


def _bad_by_step(result: ClippingResult) -> Table:
    """The last steps; empty for a single one, which the other numbers describe."""
    steps, most = result.bad_updates.by_step, _STEPS_SHOWN
    return table(
        f"By step, δ = {result.bad_updates.delta:g}",
        steps[-most:] if len(steps) > 1 else (),
        [
            col("step", span),
            col("tokens", lambda row: numbers.count(row.tokens)),
            col("with A < 0", lambda row: numbers.count(row.negative)),
            *_bad_shares(result),
            counted("mean reward", "reward", lambda row: row.reward, plain),
            counted("its change", "reward_change", lambda row: row.reward_change, plain),
        ],
        note=f"The last {most} steps; the JSON has all." if len(steps) > most else "",
        fold="Bad updates by step",
        terminal_rows=0,
    )


def _bad_shares(result: ClippingResult) -> list[TextColumn[Bad]]:
    """How many bad updates there are, and which share of the tokens."""
    number: TextColumn[Bad] = counted("bad updates", "bad", lambda row: row.bad, numbers.count)
    if not result.has_advantages:
        title = "of all tokens, if A < 0, %"
        return [number, counted(title, "over_negative", lambda row: row.over_negative)]
    return [
        number,
        counted("of tokens with A ≠ 0, %", "over_tokens", lambda row: row.over_tokens),
        counted("of tokens with A < 0, %", "over_negative", lambda row: row.over_negative),
    ]


def _updates_text(result: ClippingResult) -> str:
    bad = result.bad_updates
    over_tokens, over_negative = share(bad.over_tokens), share(bad.over_negative)
    sentences = [
        f"Bad update: a token with A < 0 that already lost {bad.delta:g} or more in probability is "
        "pushed down further (μ − π ≥ δ)."
    ]
    if result.has_advantages:
        sentences.append(
            f"At δ = {bad.delta:g}: {over_tokens} of the tokens with A ≠ 0 and {over_negative} of "
            "those with A < 0. The paper does not name its denominator, so both are shown."
        )
    else:
        sentences.append(
            "The trace has no advantages: if A were negative everywhere, "
            f"{over_negative} of the tokens would be bad updates."
        )
    if not bad.correlations:
        sentences.append(
            "To correlate bad updates with the reward, use a training trace with several steps."
        )
    return " ".join(sentences)
