"""The page of a curation: an `Outline`, which terminal and HTML print."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli import DPPO
from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.gap_table import Metric
from mismatch_cli.probe.tasks.answers import without_answer
from mismatch_cli.report.outline import (
    Brief,
    Facts,
    MetricRow,
    Outline,
    Profile,
    Section,
    Table,
    Verdict,
)
from mismatch_cli.report.tables import col, number, parts, percent, plain, table, text
from mismatch_cli.studies.curation import CurationAnalysis, mean_over_problems

_NOTATION = (
    "The accuracy of a problem is the mean reward of its samples. Means are over problems, and "
    "intervals cover 95 % over problems."
)
_TEXT = (
    "A problem near an end of the range is there partly by luck, so its held-out accuracy is "
    "nearer to the mean. Trust the held-out column."
)
_PAPER = f"sanity test of arXiv 2510.26788, as {DPPO}, App. C"


def _metric(key: str, label: str, formula: str) -> Metric:
    return Metric(key, label, formula, "share", _PAPER, agreement=None)


KEPT = _metric("kept", "kept problems", "problems with an accuracy in the range / problems")
CHOSEN = _metric(
    "accuracy_of_kept",
    "accuracy when chosen",
    "mean accuracy of the kept problems on these samples",
)
HELD_OUT = _metric(
    "held_out_accuracy", "held-out accuracy", "mean accuracy of the kept problems on other samples"
)
STAYING = _metric(
    "staying", "stay in the range", "kept problems whose held-out accuracy is in the range / kept"
)


def page(analysis: CurationAnalysis) -> Outline:
    """Which problems were kept, and how good they are."""
    curation = analysis.curation
    problems = len(curation.accuracy)
    samples = f"{curation.samples} to choose, {curation.held_out_samples} held out"
    return Outline(
        title="Which problems are solved only sometimes?",
        about=(
            ("Model", analysis.model),
            ("Problems", f"{analysis.problems} · {numbers.count(problems)}"),
            ("Samples of each", samples),
        ),
        subject=(
            f"curate  {analysis.subject}",
            f"{problems:,} problems · samples of each: {samples}",
        ),
        notes=_notes(analysis),
        leading=_leading(analysis),
        verdict=_verdict(analysis),
        profiles=(_by_accuracy(analysis),),
        next=((analysis.training, "train on them"),) if analysis.training else (),
        parts=[Section("Accuracy, chosen and held out", _TEXT, tables=(_table(analysis),))],
        settings=(("Configuration", _settings(analysis.config)),),
        command=suggest(*analysis.command),
        notation=_NOTATION,
    )


def _notes(analysis: CurationAnalysis) -> tuple[str, ...]:
    notes = []
    if analysis.curation.unstated:
        samples = len(analysis.curation.accuracy) * analysis.curation.samples
        notes.append(without_answer(analysis.curation.unstated, samples))
    if analysis.reward:
        notes.append(
            f"Accuracy here is the mean reward, by {analysis.reward}. A problem whose "
            "samples all earn the same reward teaches nothing, even if that is in the range."
        )
    if analysis.confirm:
        notes.append(
            f"Only the {numbers.count(len(analysis.curation.confirmed))} problems confirmed on "
            "held-out samples were written. That selects on held-out accuracy, so the held-out "
            "numbers here cover all kept problems."
        )
    return tuple(notes)


def _settings(config: Mapping[str, Any]) -> Facts:
    """Every setting, with groups flattened."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        # Of settings with the same name in two groups, the last counts.
        flat.update(value if isinstance(value, Mapping) else {key: value})
    facts = []
    for name, value in flat.items():
        is_missing = value in (None, "")
        facts.append((name.replace("_", " "), numbers.MISSING if is_missing else str(value)))
    return tuple(facts)


def _verdict(analysis: CurationAnalysis) -> Verdict:
    curation = analysis.curation
    within = " to ".join(f"{100 * end:g} %" for end in curation.keep)
    mean = numbers.number(analysis.pairs_K2[:, 1].mean())
    return Verdict(
        f"{len(curation.kept):,} OF {len(curation.accuracy):,} PROBLEMS KEPT",
        f"They are solved in {within} of their samples. On held-out samples their mean accuracy is "
        f"{mean}, and {len(curation.confirmed):,} of them stay in the range.",
        "good",
    )


def _leading(analysis: CurationAnalysis) -> tuple[MetricRow, ...]:
    result = analysis.result
    rows = []
    for metric, estimate in (
        (KEPT, analysis.share_within(analysis.accuracy_P)),
        (CHOSEN, result.accuracy_of_kept),
        (HELD_OUT, result.held_out_accuracy),
        (STAYING, result.staying),
    ):
        value, interval = numbers.estimate(*parts(estimate))
        rows.append(MetricRow(metric, value, interval, note=estimate.note or ""))
    return tuple(rows)


def _by_accuracy(analysis: CurationAnalysis) -> Profile:
    """How many problems have each accuracy."""
    never = int((analysis.accuracy_P == 0).sum())
    always = int((analysis.accuracy_P == 1).sum())
    counts, _ = analysis.histogram
    return Profile(
        "by accuracy",
        tuple(map(float, counts)),
        "0",
        "1",
        f"problems; never solved {never:,}, always {always:,}",
        drawn=True,
    )


class _Kept(NamedTuple):
    """Kept problems, and their accuracies when chosen and held out."""

    label: str
    pairs_K2: np.ndarray


def _table(analysis: CurationAnalysis) -> Table:
    rows = [_Kept(f"{low:.3g} to {high:.3g}", pairs_K2) for low, high, pairs_K2 in analysis.bins]
    rows.append(_Kept("all kept", analysis.pairs_K2))
    return table(
        "By accuracy when chosen",
        rows,
        [
            text("accuracy", lambda row: row.label),
            col("kept problems", lambda row: numbers.count(len(row.pairs_K2))),
            col("mean", lambda row: number(row.pairs_K2[:, 0].mean()), CHOSEN),
            col("held out", lambda row: plain(mean_over_problems(row.pairs_K2[:, 1])), HELD_OUT),
            col(
                "stay in the range, %",
                lambda row: percent(analysis.share_within(row.pairs_K2[:, 1])),
                STAYING,
            ),
        ],
        brief=Brief.first(len(rows)),
    )
