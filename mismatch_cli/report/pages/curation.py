"""The page of a curation: a `ReportView`, which terminal and HTML print."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mismatch_cli import DPPO
from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.gap_table import Metric
from mismatch_cli.probe.tasks.answers import without_answer
from mismatch_cli.report.tables import col, number, parts, plain, table, text
from mismatch_cli.report.view import (
    Facts,
    MetricRow,
    Profile,
    ReportView,
    Screen,
    Section,
    Table,
    Verdict,
)
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


def page(analysis: CurationAnalysis) -> ReportView:
    """Which problems were kept, and how good they are."""
    curation = analysis.curation
    about = (
        ("Model", analysis.model),
        ("Problems", f"{analysis.problems} · {numbers.count(len(curation.accuracy))}"),
        ("Samples of each", f"{curation.samples} to choose, {curation.held_out_samples} held out"),
    )
    return ReportView(
        title="Which problems are solved only sometimes?",
        about=about,
        notes=_notes(analysis),
        leading=_leading(analysis),
        screen=_screen(analysis),
        outline=[Section("Accuracy, chosen and held out", _TEXT, tables=(_table(analysis),))],
        settings=(("Configuration", _settings(analysis.config)),),
        command=suggest(*analysis.command),
        notation=_NOTATION,
    )


def _screen(analysis: CurationAnalysis) -> Screen:
    curation, count_B = analysis.curation, analysis.histogram[0]
    samples = f"{curation.samples} samples each, {curation.held_out_samples} held out"
    ends = (
        f"problems; never solved {(analysis.accuracy_P == 0).sum():,}, always "
        f"{(analysis.accuracy_P == 1).sum():,}"
    )
    return Screen(
        subject=(f"curate  {analysis.subject}", f"{len(curation.accuracy):,} problems · {samples}"),
        notes=_notes(analysis),
        tables=(replace(_table(analysis), title=""),),
        remarks=tuple(
            (
                row.metric.label,
                row.value if row.interval == numbers.MISSING else f"{row.value} {row.interval}",
            )
            for row in _leading(analysis)
        ),
        profiles=(Profile("by accuracy", tuple(map(float, count_B)), "0", "1", ends),),
        verdict=_verdict(analysis),
        next=((analysis.training, "train on them"),) if analysis.training else (),
    )


def _notes(analysis: CurationAnalysis) -> tuple[str, ...]:
    notes = []
    if analysis.curation.unstated:
        samples = len(analysis.curation.accuracy) * analysis.curation.samples
        notes.append(without_answer(analysis.curation.unstated, samples))
    if analysis.config["reward"]:
        notes.append(
            f"Accuracy here is the mean reward, by {analysis.config['reward']}. A problem whose "
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
    flat = {
        name.replace("_", " "): value
        for key, group in config.items()
        for name, value in (group.items() if isinstance(group, Mapping) else [(key, group)])
    }
    return tuple(
        (name, numbers.MISSING if value in (None, "") else str(value))
        for name, value in flat.items()
    )


def _verdict(analysis: CurationAnalysis) -> Verdict:
    count = f"{len(analysis.curation.kept):,} OF {len(analysis.curation.accuracy):,} PROBLEMS KEPT"
    return Verdict(
        count,
        f"They are solved in {_range(analysis)} of their samples. {_held_out(analysis)}",
        "good",
    )


def _range(analysis: CurationAnalysis) -> str:
    return " to ".join(f"{100 * end:g} %" for end in analysis.curation.keep)


def _held_out(analysis: CurationAnalysis) -> str:
    mean = numbers.number(analysis.pairs_K2[:, 1].mean())
    staying = f"{len(analysis.curation.confirmed):,} of them stay in the range"
    return f"On held-out samples their mean accuracy is {mean}, and {staying}."


def _leading(analysis: CurationAnalysis) -> tuple[MetricRow, ...]:
    chosen_K, held_out_K = analysis.pairs_K2.T
    kept = mean_over_problems(
        [analysis.curation.within(accuracy) for accuracy in analysis.accuracy_P]
    )
    found = {
        KEPT: kept,
        CHOSEN: mean_over_problems(chosen_K),
        HELD_OUT: mean_over_problems(held_out_K),
        STAYING: analysis.staying,
    }
    return tuple(
        MetricRow(metric, *numbers.estimate(*parts(estimate)), note=estimate.note or "")
        for metric, estimate in found.items()
    )


def _table(analysis: CurationAnalysis) -> Table:
    def staying(accuracy_K: np.ndarray) -> float:
        return sum(map(analysis.curation.within, accuracy_K)) / len(accuracy_K)

    return table(
        "By accuracy when chosen",
        analysis.bins,  # each (low, high, accuracies when chosen and held out)
        [
            text("accuracy", lambda row: f"{row[0]:.3g} to {row[1]:.3g}"),
            col("kept problems", lambda row: numbers.count(len(row[2]))),
            col("mean", lambda row: number(row[2][:, 0].mean()), CHOSEN),
            col("held out", lambda row: plain(mean_over_problems(row[2][:, 1])), HELD_OUT),
            col("stay in the range, %", lambda row: number(100 * staying(row[2][:, 1])), STAYING),
        ],
    )
