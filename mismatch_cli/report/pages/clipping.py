"""The page of `clipstats`: a `ReportView` from its JSON, which terminal and HTML print."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.base.json_form import from_json
from mismatch_cli.metrics.kept_rows import KeptToken
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.about import (
    MASKED,
    command_line,
    left_out_of,
    measured,
    settings_tables,
    who_facts,
)
from mismatch_cli.report.excerpts import TitledToken, token_excerpts
from mismatch_cli.report.pages._clipping_screen import only_blocked_by, screen
from mismatch_cli.report.pages.clipping_blocked import (
    algorithms_section,
    overlap_section,
    tokens_section,
)
from mismatch_cli.report.pages.clipping_subject import (
    BAD_UPDATE,
    SIGNS,
    Subject,
    counted,
    unsupported,
    way_to,
    when,
)
from mismatch_cli.report.pages.clipping_thresholds import (
    approximation_section,
    theory_section,
    thresholds_section,
)
from mismatch_cli.report.tables import (
    Row,
    col,
    filled,
    interval_or_note,
    keyed,
    metric_row,
    named,
    parts,
    plain,
    share,
    span,
    table,
    value_of,
)
from mismatch_cli.report.view import Excerpt, Facts, MetricRow, ReportView, Section
from mismatch_cli.studies.clipping import ClippingAnalysis
from mismatch_cli.studies.study import typed
from mismatch_cli.trace.origin import About

_NOTATION = (
    "Numbers are over judged tokens unless stated: tokens with an advantage A other than 0; "
    "without advantages, all tokens, once as if A > 0 and once as if A < 0. μ (q in the formulas "
    "of masks) is the rollout’s probability of the sampled token, π (p) the trainer’s, π′ (p′) "
    "that of the trainer at the weights that sampled; r = π/μ, r′ = π/π′, ρ = π′/μ. Σ runs over "
    "judged tokens (in the theory over the T tokens of a response with reward R), keep is 0 "
    "where a mask blocks and 1 elsewhere, weight is the algorithm’s, C its cap. Intervals cover "
    "95 % over prompts."
)
_LEFT_OUT = {
    "masked": MASKED["masked"],
    "not_measured": "tokens lack a column that the algorithms need",
    "out_of_support": (
        "tokens are outside the trainer's truncated support (π = 0): their ratio is 0, their KL "
        "infinite"
    ),
    "zero_advantage": "tokens have an advantage of 0: no update to block",
}
_NO_ADVANTAGES = (
    "The trace has no advantages, so every token is judged as if A > 0 and as if A < 0. Overlap, "
    "sweeps and means over blocked tokens count a token once per sign under which it is blocked. "
    "To get them: {way}."
)
_LACKING = (
    "{number} responses have no {column} and are left out, so that every algorithm is judged on "
    "the same tokens. To include them, name only algorithms that do not need it, with "
    "--algorithm."
)
_RECOMPUTED = {
    "measured": "measured: masks on both anchors are judged",
    "equal weights": "the trainer itself, at the weights that sampled",
    "absent": "not measured",
}
_STEPS_SHOWN = 100


def page(study: ClippingAnalysis) -> ReportView:
    """What each algorithm blocks, with tokens that only one of the compared pair blocks."""
    return page_of_result(study.result, example_excerpts(study), typed(study.traces))


def example_excerpts(study: ClippingAnalysis) -> list[Excerpt]:
    """Tokens in context that one of the compared pair blocks and the other keeps, both ways
    round.
    """
    result, names = study.result, study.result["compared"]
    chosen = [
        row for row in result["overlap"]["examples"] if row["only"] in names and row["not"] in names
    ]
    return token_excerpts(study.traces, PAIRS["total"], list(map(_titled, chosen)))


def _titled(row: Row) -> TitledToken:
    sign = f"(A {'>' if row['advantage'] == '+' else '<'} 0)"
    title = f"{row['only']} blocks, {row['not']} keeps {sign}"
    token = from_json(KeptToken, {"token_id": None, "tv_topk": None, **row})
    return TitledToken(token, title, f"{only_blocked_by(row['only'])}{sign}")


def page_of_result(
    result: Mapping[str, Any], examples: Sequence[Excerpt], runs: Sequence[Path] = ()
) -> ReportView:
    """The page of a result (docs/json/clipstats.md); `runs` are the traces as the user types
    them.
    """
    subject = Subject(result)
    return ReportView(
        title="What do trust regions block?",
        about=_about(result),
        notes=_notes(result),
        headline=_headline(subject),
        leading=_leading(subject),
        outline=(
            algorithms_section(subject),
            overlap_section(subject, examples),
            tokens_section(subject),
            _updates_section(subject),
            thresholds_section(subject),
            approximation_section(subject),
            theory_section(subject),
        ),
        screen=screen(subject, _left_out(result), examples, runs),
        settings=settings_tables(from_json(About, result["about"])),
        command=command_line("clipstats", runs, *result["arguments"]),
        notation=_NOTATION,
    )


def _about(result: Row) -> Facts:
    counts = result["counts"]
    tokens = f"{numbers.count(counts['tokens'])} tokens"
    if result["has"]["advantages"]:
        signs = [f"{numbers.count(counts[key])} {key}" for key in ("positive", "negative")]
        tokens += f" with an advantage ({', '.join(signs)})"
    text = measured(SimpleNamespace(**counts), tokens) + (
        f", {numbers.count(counts['steps'])} steps" if counts["steps"] > 1 else ""
    )
    return (
        *who_facts(from_json(About, result["about"])),
        ("Recomputed policy π′", _RECOMPUTED[result["has"]["recomputed"]]),
        ("Judged", text),
    )


def _left_out(result: Row) -> list[str]:
    """What the numbers leave out."""
    notes = list(
        left_out_of(
            from_json(About, result["about"]),
            [(result["counts"][name], text) for name, text in _LEFT_OUT.items()],
        )
    )
    notes += [
        _LACKING.format(number=numbers.count(n), column=name)
        for name, n in result["counts"]["lacking"].items()
        if name != "logp_trainer"  # `left_out_of` names responses without a trainer score
    ]
    if "--theory" in result["arguments"] and not result["theory"]:
        way = way_to("reward", result["about"])
        notes.append(f"--theory needs rewards, and the trace has none. To get them: {way}.")
    return notes


def _notes(result: Row) -> tuple[str, ...]:
    notes = _left_out(result)
    if not result["has"]["advantages"]:
        notes.append(_NO_ADVANTAGES.format(way=way_to("advantage", result["about"])))
    return (*notes, *unsupported(result))


def _headline(subject: Subject) -> str:
    if subject.nothing_to_block:
        return ""
    if not subject.has_advantages:
        return "; ".join(map(_hypothetical, subject.leading)) + "." * bool(subject.leading)
    sentences = [_lost(row) for row in subject.leading]
    bad = subject.result["bad_updates"]
    if value_of(bad["over_negative"]) is not None:
        sentences.append(
            f"{share(bad['over_negative'])} of the tokens with A < 0 "
            f"({share(bad['over_tokens'])} of those with A ≠ 0) are bad updates: pushed down "
            f"although they already lost {bad['delta']:g} or more in probability."
        )
    return " ".join(sentences)


def _hypothetical(row: Row) -> str:
    shares = " and ".join(
        f"{share(row['blocked'][sign])} of the tokens {when(sign, False)}" for sign in SIGNS[1:]
    )
    return f"{row['name']} would block {shares}"


def _lost(row: Row) -> str:
    name, lost = row["name"], row["lost"]["all"]
    update = "the update" if row["weighs_by_ratio"] else "Σ |A|"
    if value_of(lost) is None:
        return f"How much of {update} {name} loses is unknown: {lost['note']}."
    if not value_of(row["blocked"]["all"]):
        return (
            f"{name} blocks no "
            f"token{f', but its cap takes {share(lost)} of {update}' if value_of(lost) else ''}."
        )
    return f"{name} loses {share(lost)} of {update}."


def _leading(subject: Subject) -> tuple[MetricRow, ...]:
    """What the compared algorithms block, then what they lose, then bad updates."""
    shares = [("all", "blocked"), ("all", "lost")]
    if not subject.has_advantages:
        shares = [(sign, "blocked") for sign in SIGNS[1:]]
    rows = []
    for sign, key in shares:
        which = "" if subject.has_advantages else f" {when(sign, False)}"
        for row in subject.leading:
            rows.append(metric_row(CLIPPING[key], row[key][sign], f"{key}{which} · {row['name']}"))
    if subject.has_advantages:
        rows.append(
            metric_row(CLIPPING["over_negative"], subject.result["bad_updates"]["over_negative"])
        )
    return tuple(rows)


def _updates_section(subject: Subject) -> Section:
    """Bad updates: how many, as a share of which tokens, and how they correlate with the reward."""
    bad, count = subject.result["bad_updates"], numbers.count
    steps = bad["by_step"]
    shares = [counted("of all tokens, if A < 0, %", "over_negative")]
    if subject.has_advantages:
        shares = [
            counted("of tokens with A ≠ 0, %", "over_tokens"),
            counted("of tokens with A < 0, %", "over_negative"),
        ]
    by_threshold = table(
        "By the threshold δ",
        bad["sweep"],
        [keyed("δ", "delta", "{:g}".format), counted("bad updates", "bad", count), *shares],
    )
    by_step = table(
        f"By step, δ = {bad['delta']:g}",
        steps[-_STEPS_SHOWN:] if len(steps) > 1 else (),
        [
            col("step", span),
            keyed("tokens", "tokens", count),
            keyed("with A < 0", "negative", count),
            counted("bad updates", "bad", count),
            *shares,
            counted("mean reward", "reward", plain),
            counted("its change", "reward_change", plain),
        ],
        note=f"The last {_STEPS_SHOWN} steps; the JSON has all."
        if len(steps) > _STEPS_SHOWN
        else "",
        fold="Bad updates by step",
        terminal_rows=0,
    )
    correlations = table(
        "Over the steps",
        bad["correlations"],
        [
            named("correlation of", "of"),
            named("with", "with"),
            keyed("steps", "steps", count),
            col("value", lambda row: numbers.estimate(*parts(row))[0], CLIPPING["correlations"]),
            col("95 % interval", interval_or_note),
        ],
        note=(
            "Steps follow each other and share a policy: a correlation over them does not show a "
            "cause."
        ),
    )
    return Section(
        "Bad updates", _updates_text(subject), tables=filled(by_threshold, by_step, correlations)
    )


def _updates_text(subject: Subject) -> str:
    bad = subject.result["bad_updates"]
    delta, over_tokens, over_negative = (
        bad["delta"],
        share(bad["over_tokens"]),
        share(bad["over_negative"]),
    )
    words = f"Bad update: {BAD_UPDATE.format(delta=delta)} (μ − π ≥ δ). "
    if subject.has_advantages:
        words += (
            f"At δ = {delta:g}: {over_tokens} of the tokens with A ≠ 0 and {over_negative} of "
            "those with A < 0. The paper does not name its denominator, so both are shown. "
        )
    else:
        everywhere = (
            f"if A were negative everywhere, {over_negative} of the tokens would be bad updates"
        )
        words += f"The trace has no advantages: {everywhere}. "
    if not bad["correlations"]:
        words += (
            "To correlate bad updates with the reward, use a training trace with several steps."
        )
    return words.rstrip()
