"""Thresholds: equal strictness, sweeps, and how accurate the approximations are."""

from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple, TypeVar

from mismatch_cli.base import numbers
from mismatch_cli.metrics.clipping.approximation import (
    ApproximationRow,
    Approximations,
    BracketRow,
)
from mismatch_cli.metrics.clipping.blocked_rows import SameStrictness
from mismatch_cli.metrics.clipping.sweeps import (
    ABOVE_SWEEP,
    BELOW_SWEEP,
    HIGHEST,
    LOWEST,
    SweepTables,
)
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.update_table import CLIPPING, THEORY
from mismatch_cli.report.outline import Brief, MetricGroup, Priority, Section, Table
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    filled,
    metric_row,
    number,
    parts,
    percent,
    plain,
    table,
    text,
    value_of,
)
from mismatch_cli.studies.clipping_result import ClippingResult

R = TypeVar("R")


class MaskFamily(NamedTuple):
    """Masks with one threshold, in words."""

    name: str
    short: str  # its threshold, in a sentence and in the head of a column
    sweep: str  # the title of its table
    typed: str  # its threshold, as a flag has it


FAMILIES = {
    "ratio_clip": MaskFamily("ratio clip", "ε", "Ratio clip, by ε", "ratio-clip:epsilon"),
    "binary_tv": MaskFamily("binary TV", "TV δ", "Binary TV, by δ", "dppo-binary-tv:delta"),
    "binary_kl": MaskFamily("binary KL", "KL δ", "Binary KL, by δ in nats", "dppo-binary-kl:delta"),
    "top_k_tv": MaskFamily("top-K TV", "top-K TV δ", "Top-K TV, by δ", "top-k-tv:delta"),
    "top_k_kl": MaskFamily("top-K KL", "top-K KL δ", "Top-K KL, by δ in nats", "top-k-kl:delta"),
}
# With a no-break space: it is one value, which a table puts below others
_BEYOND = {BELOW_SWEEP: f"<\u00a0{LOWEST:.2g}", ABOVE_SWEEP: f">\u00a0{HIGHEST:.3g}"}
_STRICTNESS = "Same strictness"
_SAME_SHARE = "Thresholds in a row block the same share of tokens, though not the same tokens."
_DIVERGENCES = {"tv": "TV", "kl": "KL, nats"}
_SWEEPS = "Sweeps as numbers"
_NARROW = 1e-4  # half an interval
_APPROXIMATE = (
    "Binary divergences keep the sampled token, top-K divergences also the K most probable, and "
    "merge the rest, so neither exceeds the divergence over the full vocabulary. "
)
_AGAINST_FULL = (
    "Compared with the full divergence on the {tokens} tokens that recorded it: means, bias and "
    "rank correlation over all of them, wrong masks over those with an advantage. All use the "
    "same δ, so only the divergence differs."
)
_WITHOUT_FULL = (
    "The full divergence was not recorded; the table gives guaranteed bounds on its mean. For "
    "bias, rank correlation and wrong masks, record it: mismatch-cli probe --full-divergence N."
)
_BOUNDS = ("quadratic_bound", "linear_bound", "composite_bound", "pinsker_bound")
_THEORY = (
    "Sample values of the terms in the paper's bounds, not a certificate: the bounds need the "
    "largest TV or KL over all states, and a sample has only the largest it saw ({seen}). L′ − Δ "
    "equals the importance-weighted difference of rewards exactly, response by response."
)


def counted(
    title: str,
    key: str,
    of: Callable[[R], Any],
    show: Callable[[Any], str] = percent,
    priority: Priority = Priority.USUAL,
) -> TextColumn[R]:
    """A column of numbers that links to the definition of a metric of updates."""
    return col(title, lambda row: show(of(row)), CLIPPING[key], priority=priority)


def same_strictness(result: ClippingResult) -> Table:
    """The compared algorithms, each with the threshold of every family that blocks the same share
    of tokens; a screen has top-K divergences only where an algorithm uses one.
    """
    rows = [row for row in result.same_strictness if row.thresholds]
    used = {row.family for row in rows}
    thresholds = [_threshold_of(family, used) for family in result.sweeps.families]
    return table(
        _STRICTNESS,
        rows,
        [text("as strict as", lambda row: row.algorithm), *thresholds],
        note=_SAME_SHARE,
        brief=Brief.first(len(rows), note=_SAME_SHARE, title=_STRICTNESS),
    )


def _threshold_of(family: str, used: Container[str | None]) -> TextColumn[SameStrictness]:
    """The equal threshold of a family; for an algorithm of that family, its own."""

    def cell(row: SameStrictness) -> str:
        if family == row.family:
            return row.settings.partition(" = ")[2]
        return _equal(row.thresholds[family])

    priority = Priority.USUAL
    if family.startswith("top_k") and family not in used:
        priority = Priority.FULL
    return counted(FAMILIES[family].short, "equivalents", cell, str, priority)


def _equal(threshold: Estimate) -> str:
    """An equal threshold, or the end of the sweep beyond which it is."""
    return _BEYOND.get(threshold.note or "") or plain(threshold)


def thresholds_section(result: ClippingResult) -> Section:
    """The sweeps, and thresholds of two families that block equally much."""
    equivalents = table(
        "Equal thresholds",
        result.equivalents,
        [
            text("algorithm", lambda row: row.algorithm),
            counted("blocked, %", "blocked", lambda row: row.blocked),
            text("mask family", lambda row: FAMILIES[row.family].name),
            counted("equal δ or ε", "equivalents", lambda row: row.threshold, _equal),
        ],
        note="The threshold at which each mask family blocks the same share of tokens, within 3 %.",
    )
    return Section(
        "Threshold sweeps",
        "Blocked tokens and lost update by threshold.",
        tables=filled(equivalents, *_sweeps(result.sweeps)),
    )


def _sweeps(sweeps: SweepTables) -> Iterator[Table]:
    for name, rows in sweeps.families.items():
        yield table(
            FAMILIES[name].sweep,
            rows,
            [
                col("threshold", lambda row: number(row.threshold)),
                counted("blocked, %", "blocked", lambda row: row.blocked),
                counted("lost update, %", "lost", lambda row: row.lost),
            ],
            fold=_SWEEPS,
            terminal_rows=0,
        )
    yield table(
        "Cap of the weight, by C",
        sweeps.cap,
        [
            col("C", lambda row: number(row.cap)),
            counted("tokens above, %", "share", lambda row: row.share),
            counted("lost update, %", "capped", lambda row: row.lost),
        ],
        fold=_SWEEPS,
        terminal_rows=0,
    )


def approximation_section(result: ClippingResult) -> Section:
    """How accurate binary and top-K divergences are, compared with the full divergence or with
    bounds on it.
    """
    measured = result.approximation
    comparison = _AGAINST_FULL.format(tokens=numbers.count(measured.tokens))
    if measured.truth is None:
        comparison = _WITHOUT_FULL
    return Section(
        "Accuracy of the approximations",
        _APPROXIMATE + comparison,
        tables=filled(_approximations(measured), _bracket(measured)),
    )


def _approximations(measured: Approximations) -> Table:
    columns: list[TextColumn[ApproximationRow]] = [
        text("divergence", lambda row: _DIVERGENCES[row.divergence]),
        col("K", _partition),
        col("threshold δ", _delta, priority=Priority.SPARE),
        counted("mean", "mean", lambda row: row.mean, plain),
    ]
    if measured.truth is not None:
        correlation = "rank_correlation"
        columns += [
            counted("bias", "bias", lambda row: row.bias, plain),
            counted("rank correlation", correlation, lambda row: row.rank_correlation, _near_1),
            counted("wrong mask, %", "wrong_mask", lambda row: row.wrong_mask),
        ]
    return table("Approximations of TV and KL", measured.rows, columns)


def _bracket(measured: Approximations) -> Table:
    """Bounds; empty where the full divergence itself was recorded."""
    return table(
        "Bounds on the mean full TV",
        measured.bracket if measured.truth is None else (),
        [
            col("from K", _partition),
            counted("at least", "low", lambda row: row.low, plain),
            counted("at most", "high", lambda row: row.high, plain),
            col("threshold δ", _delta, priority=Priority.SPARE),
            counted("decided, %", "decided", lambda row: row.decided, _nearly_all),
        ],
    )


def _partition(row: ApproximationRow | BracketRow) -> str:
    return str(row.k) if row.k else "binary"


def _delta(row: ApproximationRow | BracketRow) -> str:
    return f"{row.threshold:g}"


def _near_1(correlation: Estimate) -> str:
    """A correlation with half its interval, which is dropped where it is too narrow to show
    beside a value near 1.
    """
    value, low, high = parts(correlation)
    if low is None or high is None or (high - low) / 2 < _NARROW:
        return numbers.near(value, 1)
    return plain(correlation)


def _nearly_all(share: Estimate) -> str:
    """A share in percent that does not round to 100."""
    return numbers.near(None if share.value is None else 100 * share.value, 100)


def theory_section(result: ClippingResult) -> Section:
    """The terms of the paper's bounds; empty without `--theory`."""
    theory = result.theory
    if theory is None:
        return Section("Theory")
    words = _THEORY.format(seen=f"{theory.tv_max_of}; {theory.kl_max_of}")
    # Rewards are between −ξ and ξ: a lower bound below −2ξ holds for every policy.
    vacuous = []
    for key in _BOUNDS:
        bound = value_of(theory.term(key)) or 0
        if bound < -2 * theory.xi:
            vacuous.append(f"the {THEORY[key].label}")
    if vacuous:
        names = ", ".join(vacuous)
        words += f" Vacuous here, because no mean reward changes by more than 2ξ: {names}."
    rows = tuple(metric_row(metric, theory.term(key)) for key, metric in THEORY.items())
    groups = (MetricGroup("Terms of the bounds, over responses", rows),)
    return Section("Theory", words, groups=groups)
