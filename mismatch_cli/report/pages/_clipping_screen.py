"""The screen of `clipstats`: how much each algorithm blocks, equally strict thresholds, and what
to try next.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace
from typing import TypeVar

from mismatch_cli.base import numbers, registry
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.json_form import from_json
from mismatch_cli.metrics.update_table import THEORY
from mismatch_cli.report.about import subject_lines
from mismatch_cli.report.pages.clipping_blocked import NOT_BY_RATIO, ROW_KEYS, share_columns
from mismatch_cli.report.pages.clipping_subject import SIGNS, Subject, unsupported, way_to, when
from mismatch_cli.report.pages.clipping_thresholds import SHORT, same_strictness
from mismatch_cli.report.tables import Row, filled, in_words, number, share, table, text, value_of
from mismatch_cli.report.view import Excerpt, Facts, Screen, Table, Verdict
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.trace.origin import About

_T = TypeVar("_T")
_ROWS, _NOTES, _COLUMNS = 8, 1, 80
_MARKS = ("  ", "▸ ")
_TYPED = {  # a threshold of each family, as a flag has it
    "ratio_clip": "ratio-clip:epsilon",
    "binary_tv": "dppo-binary-tv:delta",
    "binary_kl": "dppo-binary-kl:delta",
    "top_k_tv": "top-k-tv:delta",
    "top_k_kl": "top-k-kl:delta",
}
_LATER = "score with a later trainer, where masks have something to block"
_SAME = "EQUALLY STRICT"
_ALIKE = 1.05  # times as many blocked tokens still count as equally strict
_TERMS = ("surrogate", "correction", "quadratic_bound")  # of the theory


def screen(
    subject: Subject, notes: Sequence[str], examples: Sequence[Excerpt], runs: Sequence[Path]
) -> Screen:
    """Masks from strict to loose, equally strict thresholds, overlap and a verdict."""
    result, notes = subject.result, _notes(subject, notes)
    # Notes and theory take rows from the table: a screen has 40 lines at 80 columns
    lines = sum(len(wrap(f"! {note}", _COLUMNS)) for note in notes)
    rows = _ROWS - max(0, lines - _NOTES) - bool(result["theory"])
    tables = (
        ()
        if subject.nothing_to_block
        else (_from_strict_to_loose(subject, rows), same_strictness(subject, fewest=True))
    )
    verdict = _verdict(subject)
    return Screen(
        subject=subject_lines(
            from_json(About, result["about"]), SimpleNamespace(**result["counts"])
        ),
        notes=notes,
        tables=filled(*tables),
        remarks=_remarks(subject),
        excerpts=_one_each_way(subject, examples),
        verdict=verdict,
        next=_next(subject, verdict, runs),
    )


def _notes(subject: Subject, notes: Sequence[str]) -> tuple[str, ...]:
    result = subject.result
    left, skipped = len(notes) - _NOTES, len(result["skipped"])
    shown = list(notes[:_NOTES])
    if left > 0:
        shown.append(f"{numbers.things(left, 'more note')}: --full")
    if not subject.has_advantages:
        shown.append(
            "No advantages: tokens are judged for both signs. To get them: "
            f"{way_to('advantage', result['about'])}"
        )
    if "--algorithm" in result["arguments"]:
        shown += unsupported(result)  # named algorithms, so the reason belongs here
    elif skipped:
        shown.append(
            f"{numbers.things(skipped, 'algorithm')} cannot be judged on this trace: --full says "
            "why"
        )
    return tuple(shown)


def _from_strict_to_loose(subject: Subject, rows: int) -> Table:
    """Some masks, always the compared ones; the same mask on π′ is on the page only."""
    masks = subject.masks(subject.rows, *ROW_KEYS)
    ranked = sorted(masks, key=lambda mask: -subject.strictness(mask.row))
    compared = [mask for mask in ranked if mask.row in subject.leading]
    others = [mask for mask in ranked if mask not in compared and subject.strictness(mask.row)]
    others = _evenly(
        [mask for mask in others if not subject.is_twin(mask.row)], rows - len(compared)
    )
    shown = [mask for mask in ranked if mask in compared or mask in others]
    left = len(masks) - len(shown)
    notes = [f"… {left} more: --full"] * (left > 0)
    if any(not mask.row["weighs_by_ratio"] for mask in shown):
        notes.append(f"{NOT_BY_RATIO} share of Σ |A|: its weight is not r")
    return table(
        "",
        shown,
        [
            text("algorithm", lambda mask: _MARKS[mask in compared] + mask.label),
            *share_columns(subject, fewest=True),
        ],
        note="   ".join(notes),
    )


def _evenly(ranked: Sequence[_T], most: int) -> list[_T]:
    """The first, the last, and some between them at equal steps."""
    if len(ranked) <= most:
        return list(ranked)
    return [ranked[round(place * (len(ranked) - 1) / max(most - 1, 1))] for place in range(most)]


def _remarks(subject: Subject) -> Facts:
    found = (
        ("Overlap", _overlap(subject)),
        ("Bad updates", _bad_updates(subject)),
        ("Theory", _theory(subject)),
    )
    guide = ("Guide", "mismatch-cli guide choosing-a-threshold: what ε and δ limit")
    return (*((label, words) for label, words in found if words), guide)


def _overlap(subject: Subject) -> str:
    overlap, compared = subject.result["overlap"], subject.result["compared"]
    if len(compared) < 2 or not any(subject.strictness(row) for row in subject.leading):
        return ""
    i, j = map(overlap["names"].index, compared)
    only = (overlap["only_row"][i][j], overlap["only_row"][j][i])
    parts = (f"{numbers.count(n)} only by {name}" for n, name in zip(only, compared, strict=True))
    jaccard = number(overlap["jaccard"][i][j])
    return (
        f"{numbers.things(overlap['both'][i][j], 'token')} blocked by both, {', '.join(parts)} "
        f"(Jaccard {jaccard})"
    )


def _bad_updates(subject: Subject) -> str:
    bad = subject.result["bad_updates"]
    if value_of(bad["over_negative"]) is None:
        return ""
    where = "of tokens with A < 0" if subject.has_advantages else "of tokens, if A < 0"
    return f"{share(bad['over_negative'])} {where}: pushed down after losing ≥ {bad['delta']:g}"


def _theory(subject: Subject) -> str:
    theory = subject.result["theory"]
    if not theory:
        return ""
    return ", ".join(
        f"{THEORY[key].label} {in_words(THEORY[key], theory[key])[0]}" for key in _TERMS
    )


def _one_each_way(subject: Subject, examples: Sequence[Excerpt]) -> tuple[Excerpt, ...]:
    """A token that only the first algorithm blocks, and one that only the second blocks."""
    beginnings = map(only_blocked_by, subject.result["compared"])
    of_each = (
        [example for example in examples if example.short.startswith(beginning)]
        for beginning in beginnings
    )
    return tuple(replace(found[0], title=found[0].short) for found in of_each if found)


def only_blocked_by(name: str) -> str:
    """The beginning of the title of a token that only this algorithm blocks."""
    return f"Only {name} blocks "


def _verdict(subject: Subject) -> Verdict:
    """How much stricter one algorithm is, and the thresholds at which both are equally strict."""
    rows, names = subject.leading, " and ".join(subject.result["compared"])
    if not rows:
        return Verdict("NOTHING JUDGED", "No algorithm can be applied to this trace.")
    if subject.nothing_to_block:
        return Verdict("NOTHING TO BLOCK", "Every advantage is 0, so there is no update.")
    ranked = sorted(rows, key=lambda row: -subject.strictness(row))
    high, low = (subject.strictness(row) for row in (ranked[0], ranked[-1]))
    if not high:
        return Verdict("NOTHING BLOCKED", f"{names} would keep every update of this trace.")
    text = (
        f"{', '.join(_share_blocked(subject, row) for row in ranked)}. {_equal(subject)}".rstrip()
    )
    if high <= _ALIKE * low:
        return Verdict(_SAME if len(rows) > 1 else f"{numbers.share(high)[0]} BLOCKED", text)
    return Verdict(
        f"{numbers.number(high / low, 2)} × AS STRICT" if low else "ONLY ONE BLOCKS", text
    )


def _share_blocked(subject: Subject, row: Row) -> str:
    """`grpo-clip-higher blocks 3.30 % (mean μ 0.343)`."""
    if subject.has_advantages:
        shares = share(row["blocked"]["all"])
    else:
        shares = " and ".join(
            f"{share(row['blocked'][sign])} {when(sign, False)}" for sign in SIGNS[1:]
        )
    mean = number(row["mu_blocked"])
    return f"{row['name']} blocks {shares}" + (
        "" if mean == numbers.MISSING else f" (mean μ {mean})"
    )


def _equal(subject: Subject) -> str:
    """The equally strict threshold of another family for each compared algorithm."""
    found = [
        f"{row['algorithm']} and {SHORT[family]} = {numbers.number(value)}"
        for row, family, value in _equal_thresholds(subject)
    ]
    return f"Equally strict: {'; '.join(found)}." if found else ""


def _equal_thresholds(subject: Subject) -> list[tuple[Row, str, float]]:
    """For each compared algorithm: TV for a ratio clip and for one without a family, otherwise
    the ratio clip.
    """
    rows = subject.result.get("same_strictness", ())
    other = [
        (row, "binary_tv" if row["family"] in ("ratio_clip", None) else "ratio_clip")
        for row in rows
    ]
    found = [(row, family, value_of(row["thresholds"].get(family))) for row, family in other]
    return [(row, family, value) for row, family, value in found if value is not None]


def _next(subject: Subject, verdict: Verdict, runs: Sequence[Path]) -> Facts:
    """The first compared algorithm against another family at equal strictness, and the full
    output.
    """
    names = subject.result["compared"]
    # A user's file is named here, but its path is not
    typed = {*TABLE, *registry.names(trust_regions.PACKAGE)}
    trials = [
        (
            suggest(
                "clipstats",
                *runs,
                "-a",
                row["algorithm"],
                "-a",
                f"{_TYPED[family]}={value:.3g}",
            ),
            "equally strict: which tokens differ?",
        )
        for row, family, value in _equal_thresholds(subject)
        if row["algorithm"].partition(":")[0] in typed
    ]
    if subject.result["has"]["recomputed"] == "equal weights":
        trials = [
            (suggest("rescore", *runs, "--trainer-model", "LATER", "--weights", "newer"), _LATER)
        ]
    elif verdict.words == _SAME and all(name.partition(":")[0] in typed for name in names):
        trials = [
            (
                suggest("train", *(word for name in names for word in ("-a", name))),
                "equally strict: which learns more?",
            )
        ]
    elif subject.nothing_to_block:
        trials = [
            (suggest("curate", "MODEL", "--prompts", "FILE"), "problems solved only sometimes")
        ]
    elif not trials:
        trials = [(suggest("clipstats", *runs, "-a", "dppo-binary-tv:delta=0.05"), "another δ")]
    return (
        trials[0],
        (suggest("clipstats", *runs, "--full"), "every algorithm, bin, step and token"),
    )
