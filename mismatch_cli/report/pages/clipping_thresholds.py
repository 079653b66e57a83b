"""What thresholds decide: bad updates by δ, other thresholds of a mask, approximate divergences, and the theory."""

from __future__ import annotations

from typing import Any

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING, THEORY
from mismatch_cli.report.pages.clipping_blocked import Subject, counted
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
from mismatch_cli.report.view import MetricGroup, Section

BAD_IN_WORDS = "one that pushes down a token whose probability has already fallen by δ = {delta:g} or more"
_STEPS_SHOWN = 100
_SWEEPS = {
    "ratio_clip": "Ratio clip, by ε",
    "binary_tv": "Binary TV, by δ",
    "top_k_tv": "Top-K TV, by δ",
    "binary_kl": "Binary KL, by δ in nats",
    "top_k_kl": "Top-K KL, by δ in nats",
}
_SWEEPS_FOLD = "The sweeps in numbers"
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


def updates_section(subject: Subject) -> Section:
    """Bad updates: how many there are, over which tokens they are counted, and how they go with the reward."""
    bad, advantages = subject.result["bad_updates"], subject.advantages
    shares = [counted("of all tokens, if A < 0, %", "over_negative")]
    if advantages:
        shares = [
            counted("of tokens with A ≠ 0, %", "over_tokens"),
            counted("of tokens with A < 0, %", "over_negative"),
        ]
    count = numbers.count
    by_threshold = table(
        "By the threshold δ",
        bad["sweep"],
        [col("δ", lambda row: f"{row['delta']:g}"), counted("bad updates", "bad", count), *shares],
        shrinks=True,
    )
    by_step = table(
        f"By step, δ = {bad['delta']:g}",
        bad["by_step"][-_STEPS_SHOWN:] if len(bad["by_step"]) > 1 else (),
        [
            col("step", span),
            keyed("tokens", "tokens", count),
            keyed("with A < 0", "negative", count),
            counted("bad updates", "bad", count),
            *shares,
            counted("mean reward", "reward", plain),
            counted("its change", "reward_change", plain),
        ],
        note=f"The last {_STEPS_SHOWN} steps; all of them are in the JSON."
        if len(bad["by_step"]) > _STEPS_SHOWN
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
        note="Steps follow each other and share their policy: an association over them shows no cause.",
    )
    return Section("Bad updates", _updates_text(bad, advantages), tables=filled(by_threshold, by_step, correlations))


def _updates_text(bad: Row, advantages: bool) -> str:
    words = (
        f"A bad update is {BAD_IN_WORDS.format(delta=bad['delta'])}, measured from the rollout's: A < 0 and μ − π ≥ δ. "
    )
    if advantages:
        words += (
            f"At δ = {bad['delta']:g} that is {share(bad['over_tokens'])} of the tokens with A ≠ 0, and "
            f"{share(bad['over_negative'])} of the tokens with A < 0. The paper does not name its denominator, so both "
            "are shown. "
        )
    else:
        words += (
            f"The trace has no advantages: were A < 0 everywhere, {share(bad['over_negative'])} of the tokens would be "
            "bad updates. "
        )
    if not bad["correlations"]:
        words += "Whether bad updates go with the reward takes a training trace with several steps."
    return words.rstrip()


def thresholds_section(subject: Subject) -> Section:
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
    sweeps = subject.result["sweeps"]
    columns = [
        keyed("threshold", "threshold", number),
        counted("blocked, %", "blocked"),
        counted("lost weight, %", "lost"),
    ]
    families = (
        table(title, sweeps.get(family) or (), columns, fold=_SWEEPS_FOLD, terminal_rows=0)
        for family, title in _SWEEPS.items()
    )
    caps = table(
        "Cap of the weight, by C",
        sweeps.get("cap") or (),
        [
            keyed("C", "cap", number),
            counted("tokens above, %", "share"),
            keyed("lost weight, %", "lost", percent, CLIPPING["capped"]),
        ],
        fold=_SWEEPS_FOLD,
        terminal_rows=0,
    )
    return Section(
        "What if",
        "Blocked tokens and lost weight as the threshold moves. An equal threshold is the one of another family that "
        "blocks as many tokens as the algorithm does; it need not block the same ones. The sweeps themselves stand in "
        "the HTML report and in the JSON.",
        tables=filled(equivalents, *families, caps),
    )


def approximation_section(subject: Subject) -> Section:
    """How good binary and top-K divergences are, against the full divergence or a bracket around it."""
    found = subject.result["approximation"]
    full = found["truth"] is not None
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
            text("divergence", lambda row: {"tv": "TV", "kl": "KL, nats"}.get(row["divergence"], row["divergence"])),
            keyed("K", "k", _partition),
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
            keyed("from K", "k", _partition),
            counted("at least", "low", plain),
            counted("at most", "high", plain),
            threshold,
            counted("decided, %", "decided", _nearly_all),
        ],
        shrinks=True,
    )
    words = _AGAINST_FULL.format(tokens=numbers.count(found["tokens"])) if full else _WITHOUT_FULL
    return Section("How good is the approximation", _APPROXIMATE + words, tables=filled(approximations, bracket))


def _partition(k: int) -> str:
    return "binary" if k == 0 else str(k)


def _near_1(found: Found) -> str:
    """A correlation with its half interval, as long as that is not lost beside a value that would read 1.00."""
    value, low, high = parts(found)
    narrow = low is None or high is None or (high - low) / 2 < _NARROW
    return numbers.near(value, 1) if narrow else plain(found)


def _nearly_all(found: Found) -> str:
    """A share in percent that does not round to 100."""
    value = value_of(found)
    return numbers.near(None if value is None else 100 * value, 100)


def theory_section(subject: Subject) -> Section:
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
