"""Thresholds: equal strictness, sweeps, and how accurate the approximations are."""

from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.metrics.update_table import CLIPPING, THEORY
from mismatch_cli.report.pages.clipping_subject import Subject, counted
from mismatch_cli.report.tables import (
    Col,
    Found,
    Row,
    col,
    filled,
    keyed,
    metric_row,
    named,
    number,
    parts,
    percent,
    plain,
    table,
    text,
    value_of,
)
from mismatch_cli.report.view import MetricGroup, Section, Table

FAMILIES = {
    "ratio_clip": "ratio clip, ε",
    "binary_tv": "binary TV, δ",
    "binary_kl": "binary KL, δ",
    "top_k_tv": "top-K TV, δ",
    "top_k_kl": "top-K KL, δ",
}
SHORT = {  # in a sentence, and in a table that says what blocks the same share
    "ratio_clip": "ε",
    "binary_tv": "TV δ",
    "binary_kl": "KL δ",
    "top_k_tv": "top-K TV δ",
    "top_k_kl": "top-K KL δ",
}
SAME_STRICTNESS = "Thresholds in a row block the same share of tokens, though not the same tokens."
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


def same_strictness(subject: Subject, *, fewest: bool = False) -> Table:
    """The compared algorithms, each with the threshold of every family that blocks the same share
    of tokens.

    `fewest` leaves out top-K divergences, unless an algorithm uses one.
    """
    found: list[Row] = subject.result.get("same_strictness", [])
    rows = [
        row
        for row in found
        if any(value_of(threshold) is not None for threshold in row["thresholds"].values())
    ]
    used = {row["family"] for row in rows}
    families = [
        name for name in FAMILIES if name in used or any(name in row["thresholds"] for row in rows)
    ]
    if fewest:
        families = [name for name in families if name in used or not name.startswith("top_k")]
    return table(
        "Same strictness",
        rows,
        [text("as strict as", lambda row: str(row["algorithm"])), *map(_threshold_of, families)],
        note=SAME_STRICTNESS,
    )


def _threshold_of(family: str) -> Col[Row]:
    """The equal threshold of a family; for an algorithm of that family, its own."""

    def cell(row: Row) -> str:
        if family == row["family"]:
            return str(row["settings"].partition(" = ")[2])
        return plain(row["thresholds"][family])

    return col(SHORT[family], cell, CLIPPING["equivalents"], optional=family.startswith("top_k"))


def thresholds_section(subject: Subject) -> Section:
    """The sweeps, and thresholds of two families that block equally much."""
    equivalents = table(
        "Equal thresholds",
        subject.result["equivalents"],
        [
            named("algorithm", "algorithm"),
            counted("blocked, %", "blocked"),
            text("mask family", lambda row: FAMILIES[row["family"]].partition(",")[0]),
            keyed("equal δ or ε", "threshold", plain, CLIPPING["equivalents"]),
        ],
        note="The threshold at which each mask family blocks the same share of tokens, within 3 %.",
    )
    threshold, lost = keyed("threshold", "threshold", number), counted("lost update, %", "lost")
    cap, capped = (
        keyed("C", "cap", number),
        keyed("lost update, %", "lost", percent, CLIPPING["capped"]),
    )
    sweeps = (
        table(
            title,
            subject.result["sweeps"].get(family) or (),
            [cap, counted("tokens above, %", "share"), capped]
            if family == "cap"
            else [threshold, counted("blocked, %", "blocked"), lost],
            fold="Sweeps as numbers",
            terminal_rows=0,
        )
        for family, title in _SWEEPS.items()
    )
    return Section(
        "Threshold sweeps",
        "Blocked tokens and lost update by threshold.",
        tables=filled(equivalents, *sweeps),
    )


def approximation_section(subject: Subject) -> Section:
    """How accurate binary and top-K divergences are, compared with the full divergence or with
    bounds on it.
    """
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
    )
    bracket = table(
        "Bounds on the mean full TV",
        () if full else found["bracket"],
        [
            keyed("from K", "k", partition),
            counted("at least", "low", plain),
            counted("at most", "high", plain),
            threshold,
            counted("decided, %", "decided", _nearly_all),
        ],
    )
    words = _AGAINST_FULL.format(tokens=numbers.count(found["tokens"])) if full else _WITHOUT_FULL
    return Section(
        "Accuracy of the approximations",
        _APPROXIMATE + words,
        tables=filled(approximations, bracket),
    )


def _near_1(found: Found) -> str:
    """A correlation with half its interval, which is dropped where it is too narrow to show
    beside a value near 1.
    """
    value, low, high = parts(found)
    narrow = low is None or high is None or (high - low) / 2 < _NARROW
    return numbers.near(value, 1) if narrow else plain(found)


def _nearly_all(found: Found) -> str:
    """A share in percent that does not round to 100."""
    value = value_of(found)
    return numbers.near(None if value is None else 100 * value, 100)


def theory_section(subject: Subject) -> Section:
    """The terms of the paper's bounds; empty without `--theory`."""
    theory: dict[str, Any] = subject.result["theory"]
    if not theory:
        return Section("Theory")
    words = _THEORY.format(seen=f"{theory['tv_max_of']}; {theory['kl_max_of']}")
    vacuous = [
        f"the {THEORY[key].label}"
        for key in _BOUNDS
        if (value_of(theory[key]) or 0) < -theory["xi"]
    ]
    if vacuous:
        words += f" Vacuous here, because no reward changes by more than ξ: {', '.join(vacuous)}."
    rows = tuple(metric_row(metric, theory[key]) for key, metric in THEORY.items())
    return Section(
        "Theory", words, groups=(MetricGroup("Terms of the bounds, over responses", rows),)
    )
