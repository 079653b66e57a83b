"""From the JSON of `clipstats` to what is shown: one `ReportView`, which terminal and HTML both print."""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_cli import numbers
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.update_table import CLIPPING, THEORY
from mismatch_cli.report.about import MASKED, command_line, left_out_of, measured, settings_tables, who_facts
from mismatch_cli.report.excerpts import token_excerpts
from mismatch_cli.report.pages.clipping_blocked import (
    SIGNS,
    Subject,
    algorithms_section,
    counted,
    overlap_section,
    tokens_section,
    when,
)
from mismatch_cli.report.tables import (
    Found,
    Row,
    col,
    filled,
    interval_or_note,
    keyed,
    metric_row,
    named,
    number,
    parts,
    percent,
    plain,
    share,
    span,
    table,
    text,
    value_of,
)
from mismatch_cli.report.view import Excerpt, Facts, MetricGroup, MetricRow, ReportView, Section
from mismatch_cli.studies.clipping import ClippingAnalysis

_NOTATION = (
    "Where nothing else is said, over judged tokens: those with an advantage A other than 0; without advantages all, "
    "once as if A > 0 and once as if A < 0. μ (q in the formulas of masks) is the rollout’s probability of the sampled "
    "token, π (p) the trainer’s, π′ (p′) that of the trainer at the weights that sampled; r = π/μ, r′ = π/π′, "
    "ρ = π′/μ. Σ runs over judged tokens (in the theory over the T tokens of a response with reward R), keep is 0 "
    "where a mask blocks and 1 elsewhere, weight is the algorithm’s, C its cap. Intervals cover 95 % over prompts."
)
_LEFT_OUT = {
    "masked": MASKED["masked"],
    "not_measured": "tokens lack one of the columns that the algorithms need",
    "out_of_support": "tokens lie outside the trainer's truncated support (π = 0): their ratio is 0, their KL infinite",
    "zero_advantage": "tokens have an advantage of 0: there is no update to block",
}
_NO_ADVANTAGES = (
    "The trace has no advantages, so every token is judged as if A > 0 and as if A < 0. Overlap, sweeps and means over "
    "blocked tokens count a token once for each sign under which it is blocked. "
    "To get them, record with graded answers: mismatch-cli probe --answer-field FIELD."
)
_LACKING = (
    "{number} responses have no {column} and are left out, so that every algorithm is judged on the same tokens. "
    "They count again when only algorithms that do without it are named with --algorithm."
)
_RECOMPUTED = {
    "measured": "measured, so that masks on both anchors are judged",
    "equal weights": "the trainer itself: its weights are those that sampled",
    "absent": "not measured",
}
_BAD_IN_WORDS = "one that pushes down a token whose probability has already fallen by δ = {delta:g} or more"
_STEPS_SHOWN = 100
_SWEEPS = {
    "ratio_clip": "Ratio clip, by ε",
    "binary_tv": "Binary TV, by δ",
    "top_k_tv": "Top-K TV, by δ",
    "binary_kl": "Binary KL, by δ in nats",
    "top_k_kl": "Top-K KL, by δ in nats",
    "cap": "Cap of the weight, by C",
}
_NARROW = 1e-4
_APPROXIMATE = (
    "Binary and top-K divergences look at the sampled token and at the K most probable ones and merge the rest; they "
    "never exceed the divergence over the whole vocabulary. "
)
_AGAINST_FULL = (
    "Here they stand beside it, on the {tokens} tokens whose full divergence was recorded: means, bias and rank "
    "correlation over all of them, wrong masks over those with an advantage; with the same δ for all, so that only the "
    "divergence differs."
)
_WITHOUT_FULL = (
    "This trace does not hold that one, so the table says between which two values its mean certainly lies. Record it "
    "with mismatch-cli probe --full-divergence N: bias, rank correlation and wrong masks stand here then, as they do "
    "for the bundled trace."
)
_THEORY = (
    "Sample values of the terms in the paper's bounds; no certificate: the bounds need the largest TV over all states, "
    "and a sample knows only the largest that it saw ({tv_max_of}). L′ − Δ equals the importance-weighted difference "
    "of rewards exactly, response by response."
)


def page(study: ClippingAnalysis) -> ReportView:
    """What every algorithm blocks, with tokens that only one of the two compared blocks."""
    return page_of_result(study.result, example_excerpts(study))


def example_excerpts(study: ClippingAnalysis) -> list[Excerpt]:
    """Tokens that one of the pair blocks and the other keeps, both ways, in their context."""
    result, names = study.result, study.result["compared"]
    rows = [
        row | {"title": f"{row['only']} blocks, {row['not']} keeps (A {'>' if row['advantage'] == '+' else '<'} 0)"}
        for row in result["overlap"]["examples"]
        if row["only"] in names and row["not"] in names
    ]
    return token_excerpts(study.traces, PAIRS["total"], rows)


def page_of_result(result: Mapping[str, Any], examples: Sequence[Excerpt]) -> ReportView:
    """The whole page of a result (docs/clipstats.md)."""
    subject = Subject(result)
    return ReportView(
        title="Trust regions: what do they throw away?",
        about=_about(result),
        notes=_notes(result),
        headline=_headline(subject),
        leading=_leading(subject),
        outline=(
            algorithms_section(subject),
            overlap_section(subject, examples),
            tokens_section(subject),
            _updates_section(subject),
            _thresholds_section(subject),
            _approximation_section(subject),
            _theory_section(subject),
        ),
        settings=settings_tables(result),
        command=command_line(result, "clipstats", *result["arguments"]),
        notation=_NOTATION,
    )


def _about(result: Row) -> Facts:
    counts = result["counts"]
    tokens = f"{numbers.count(counts['tokens'])} tokens"
    if result["has"]["advantages"]:
        signs = [f"{numbers.count(counts[key])} {key}" for key in ("positive", "negative")]
        tokens += f" with an advantage ({', '.join(signs)})"
    text = measured(counts, tokens) + (f", {numbers.count(counts['steps'])} steps" if counts["steps"] > 1 else "")
    return (
        *who_facts(result["about"]),
        ("Recomputed policy π′", _RECOMPUTED[result["has"]["recomputed"]]),
        ("Judged", text),
    )


def _notes(result: Row) -> tuple[str, ...]:
    notes = list(left_out_of(result["about"], result["counts"], _LEFT_OUT))
    notes += [
        _LACKING.format(number=numbers.count(n), column=name)
        for name, n in result["counts"]["lacking"].items()
        if name != "logp_trainer"  # responses without a trainer's score are named elsewhere
    ]
    if "--theory" in result["arguments"] and not result["theory"]:
        notes.append("--theory needs rewards, and the trace has none: record it with --answer-field FIELD.")
    if not result["has"]["advantages"]:
        notes.append(_NO_ADVANTAGES)
    by_reason: dict[str, list[str]] = {}
    for skipped in result["skipped"]:
        by_reason.setdefault(skipped["reason"], []).append(skipped["algorithm"])
    notes += [f"{', '.join(names)}: {reason}." for reason, names in by_reason.items()]
    return tuple(notes)


def _headline(subject: Subject) -> str:
    if not subject.rows:
        return "No algorithm is applicable to this trace."
    if not subject.has_advantages:
        return "; ".join(map(_hypothetical, subject.leading)) + "."
    if not subject.result["counts"]["tokens"]:
        return "No token has an advantage other than 0: no update would follow, and there is nothing to block."
    sentences = [_in_words(row) for row in subject.leading]
    bad = subject.result["bad_updates"]
    if value_of(bad["over_negative"]) is not None:
        sentences.append(
            f"{share(bad['over_negative'])} of the tokens with A < 0 ({share(bad['over_tokens'])} of those with A ≠ 0) "
            f"get a bad update, {_BAD_IN_WORDS.format(delta=bad['delta'])}."
        )
    return " ".join(sentences)


def _hypothetical(row: Row) -> str:
    shares = " and ".join(f"{share(row['blocked'][sign])} of the tokens {when(sign, False)}" for sign in SIGNS[1:])
    return f"{row['name']} would block {shares}"


def _in_words(row: Row) -> str:
    name, blocked, lost = row["name"], row["blocked"]["all"], row["lost"]["all"]
    weight = "the update weight" if row["weighs_by_ratio"] else "Σ |A|"
    if not value_of(blocked):
        capped = f", but its cap takes {share(lost)} of {weight}" if value_of(lost) else ""
        return f"{name} blocks no token{capped}."
    known = value_of(lost) is not None
    loses = f" and loses {share(lost)} of {weight}." if known else f"; of {weight}, {lost['note']}."
    return f"{name} blocks {share(blocked)} of the tokens{loses}"


def _leading(subject: Subject) -> tuple[MetricRow, ...]:
    """What the leading algorithms block, then what they lose, so that the two stand beside each other; bad updates."""
    shares = [("all", "blocked"), ("all", "lost")]
    if not subject.has_advantages:
        shares = [(sign, "blocked") for sign in SIGNS[1:]]
    rows = []
    for sign, key in shares:
        which = "" if subject.has_advantages else f" {when(sign, False)}"
        for row in subject.leading:
            rows.append(metric_row(CLIPPING[key], row[key][sign], f"{key}{which} · {row['name']}"))
    if subject.has_advantages:
        rows.append(metric_row(CLIPPING["over_negative"], subject.result["bad_updates"]["over_negative"]))
    return tuple(rows)


def _updates_section(subject: Subject) -> Section:
    """Bad updates: how many there are, over which tokens they are counted, and how they go with the reward."""
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
        shrinks=True,
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
        note=f"The last {_STEPS_SHOWN} steps; all of them are in the JSON." if len(steps) > _STEPS_SHOWN else "",
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
        note="Steps follow each other and share their policy: an association over them shows no cause.",
    )
    return Section("Bad updates", _updates_text(subject), tables=filled(by_threshold, by_step, correlations))


def _updates_text(subject: Subject) -> str:
    bad = subject.result["bad_updates"]
    delta, over_tokens, over_negative = bad["delta"], share(bad["over_tokens"]), share(bad["over_negative"])
    words = f"A bad update is {_BAD_IN_WORDS.format(delta=delta)}, measured from the rollout's: A < 0 and μ − π ≥ δ. "
    if subject.has_advantages:
        words += (
            f"At δ = {delta:g} that is {over_tokens} of the tokens with A ≠ 0, and {over_negative} of the tokens with "
            "A < 0. The paper does not name its denominator, so both are shown. "
        )
    else:
        everywhere = f"were A < 0 everywhere, {over_negative} of the tokens would be bad updates"
        words += f"The trace has no advantages: {everywhere}. "
    if not bad["correlations"]:
        words += "Whether bad updates go with the reward takes a training trace with several steps."
    return words.rstrip()


def _thresholds_section(subject: Subject) -> Section:
    """The sweeps, and which thresholds of two families block as much as each other."""
    equivalents = table(
        "Equal thresholds",
        subject.result["equivalents"],
        [
            named("algorithm", "algorithm"),
            counted("blocks, %", "blocked"),
            text("as many as", lambda row: row["family"].replace("_", "-")),
            keyed("at", "threshold", plain, CLIPPING["equivalents"]),
        ],
        note="The threshold of that family which blocks as many tokens as the algorithm does, at most 3 % off.",
        shrinks=True,
    )
    threshold, lost = keyed("threshold", "threshold", number), counted("lost weight, %", "lost")
    cap, capped = keyed("C", "cap", number), keyed("lost weight, %", "lost", percent, CLIPPING["capped"])
    sweeps = (
        table(
            title,
            subject.result["sweeps"].get(family) or (),
            [cap, counted("tokens above, %", "share"), capped]
            if family == "cap"
            else [threshold, counted("blocked, %", "blocked"), lost],
            fold="The sweeps in numbers",
            terminal_rows=0,
        )
        for family, title in _SWEEPS.items()
    )
    return Section(
        "What if",
        "Blocked tokens and lost weight as the threshold moves. An equal threshold is the one of another family that "
        "blocks as many tokens as the algorithm does; it need not block the same ones. The sweeps themselves stand in "
        "the HTML report and in the JSON.",
        tables=filled(equivalents, *sweeps),
    )


def _approximation_section(subject: Subject) -> Section:
    """How good binary and top-K divergences are, against the full divergence or a bracket around it."""
    found = subject.result["approximation"]
    full = found["truth"] is not None

    def partition(k: int) -> str:
        return str(k) if k else "binary"

    against_full = [
        counted("bias", "bias", plain),
        counted("rank correlation", "rank_correlation", _near_1),
        counted("wrong mask, %", "wrong_mask"),
    ]
    threshold = keyed("threshold δ", "threshold", "{:g}".format, optional=True)
    approximations = table(
        "Approximations of TV and KL",
        found["rows"],
        [
            text("divergence", lambda row: {"tv": "TV", "kl": "KL, nats"}[row["divergence"]]),
            keyed("K", "k", partition),
            threshold,
            counted("mean", "mean", plain),
            *(against_full if full else ()),
        ],
        shrinks=True,
    )
    bracket = table(
        "Where the mean full TV certainly lies",
        () if full else found["bracket"],
        [
            keyed("from K", "k", partition),
            counted("at least", "low", plain),
            counted("at most", "high", plain),
            threshold,
            counted("decided, %", "decided", _nearly_all),
        ],
        shrinks=True,
    )
    words = _AGAINST_FULL.format(tokens=numbers.count(found["tokens"])) if full else _WITHOUT_FULL
    return Section("How good is the approximation", _APPROXIMATE + words, tables=filled(approximations, bracket))


def _near_1(found: Found) -> str:
    """A correlation with its half interval, as long as that is not lost beside a value that would read 1.00."""
    value, low, high = parts(found)
    narrow = low is None or high is None or (high - low) / 2 < _NARROW
    return numbers.near(value, 1) if narrow else plain(found)


def _nearly_all(found: Found) -> str:
    """A share in percent that does not round to 100."""
    value = value_of(found)
    return numbers.near(None if value is None else 100 * value, 100)


def _theory_section(subject: Subject) -> Section:
    """Empty, and hence left out, without `--theory`."""
    theory: dict[str, Any] = subject.result["theory"]
    if not theory:
        return Section("Theory")
    words = _THEORY.format(tv_max_of=theory["tv_max_of"])
    bounds = {"quadratic": theory["quadratic_bound"], "linear": theory["linear_bound"]}
    vacuous = [name for name, found in bounds.items() if (value_of(found) or 0) < -theory["xi"]]
    if vacuous:
        words += f" Vacuous here, because no reward changes by more than ξ: the {' and the '.join(vacuous)} bound."
    rows = tuple(metric_row(metric, theory[key]) for key, metric in THEORY.items())
    return Section("Theory", words, groups=(MetricGroup("Terms of the bounds, over responses", rows),))
