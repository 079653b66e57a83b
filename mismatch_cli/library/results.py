"""The results that a run returns: a screen in notebooks and in print, the numbers of `--json`,
frames, figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base import numbers
from mismatch_cli.base.json_form import to_json

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure

    from mismatch_cli.metrics.gap_table import Metric
    from mismatch_cli.metrics.pair_summary import MetricEstimate
    from mismatch_cli.report.outline import Screen
    from mismatch_cli.studies.clipping import ClippingAnalysis
    from mismatch_cli.studies.comparison import ComparisonAnalysis
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis
    from mismatch_cli.studies.gate import GateAnalysis
    from mismatch_cli.studies.mismatch import MismatchAnalysis
    from mismatch_cli.studies.study import Study


class Result:
    """The result of a study.

    A notebook shows its screen, `print` the same as text, `repr` only the verdict.
    """

    def __init__(self, study: Study) -> None:
        self._study = study

    def to_json(self) -> dict[str, Any]:
        """What the command prints with `--json`, bit for bit."""
        return self._study.to_json()

    @property
    def plots(self) -> list[str]:
        """The names of the figures for which there is enough data."""
        from mismatch_cli.report.figures import plots_for

        return [name for name, _ in plots_for(self._study.plot_data)]

    def plot(self, name: str) -> Figure:
        """Draw one of `plots` as a matplotlib figure, which a notebook shows; a `UsageError` for
        an unknown name.
        """
        from mismatch_cli.report.figures import figure_of

        return figure_of(self._study.plot_data, name)

    def save(self, folder: str | PathLike[str], *, force: bool = False) -> Path:
        """Write `summary.json` and `report.html` into a folder, as the command does; `force`
        overwrites.
        """
        from mismatch_cli.report.output_files import HTML_FILE, write_report
        from mismatch_cli.report.pages import page_of
        from mismatch_cli.trace.run_folder import report_folder

        path = Path(folder).expanduser()
        with report_folder(path, self._study.FORMAT, force=force):
            write_report(self._study, page_of(self._study), path)
        return path / HTML_FILE

    @cached_property
    def _screen(self) -> Screen:
        from mismatch_cli.report.pages import page_of
        from mismatch_cli.report.screen import screen_of

        screen = screen_of(page_of(self._study))
        assert screen is not None  # studies of traces have one
        return screen

    def __repr__(self) -> str:
        verdict = self._screen.verdict
        return f"<{type(self).__name__}: {verdict.words}. {verdict.text}>"

    def __str__(self) -> str:
        from mismatch_cli.report.screen import as_text

        return as_text(self._screen)

    def _repr_html_(self) -> str:
        from mismatch_cli.report.html import render_screen

        return render_screen(self._screen)


class Report(Result):
    """How far trainer and rollout disagree, as `mismatch-cli report` shows it."""

    _study: MismatchAnalysis

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per pair and metric: value, 95 % interval, noise (the trainer against itself),
        unit, formula, note.

        `times_noise` is infinite beyond 1,000, where the noise is too close to zero to divide by.
        """
        from mismatch_cli.metrics.gap_table import METRICS

        rows = {}
        for name, pair in self._study.result.pairs.items():
            for key, estimate in pair.metrics.items():
                rows[name, key] = _metric_row(METRICS[key], estimate)
        return _frame(rows, ("pair", "metric"))


class Clipping(Result):
    """What trust regions block, as `mismatch-cli clipstats` shows it."""

    _study: ClippingAnalysis

    @cached_property
    def shares(self) -> pd.DataFrame:
        """A row per algorithm, a column per number of `--json`, such as `blocked_all`, with
        `…_low` and `…_high`.
        """
        rows = {row.name: dict(_flat(to_json(row))) for row in self._study.result.algorithms}
        return _frame(rows, ("algorithm",))

    @cached_property
    def skipped(self) -> dict[str, str]:
        """The algorithms that could not be analysed on this run, each with the reason."""
        return dict(self._study.support.skipped)

    @cached_property
    def blocked(self) -> pd.DataFrame:
        """A row per row of the run's `tokens`, a column per algorithm: whether it blocks the token.

        Tokens without an advantage, outside the loss or not measured are missing (`pd.NA`). In a
        run without advantages each algorithm has two columns, `NAME_if_positive` and
        `NAME_if_negative`.
        """
        from mismatch_cli.studies.tokens import blocked_tables

        return frame_of(list(blocked_tables(self._study.traces, self._study.summary.question)))


class Diagnosis(Result):
    """What is wrong with a run, as `mismatch-cli diagnose` shows it."""

    _study: DiagnosisAnalysis

    @property
    def faults(self) -> list[str]:
        """The checks that found a fault, root cause first."""
        return list(self._study.result.faults)


class Comparison(Result):
    """How runs differ, as `mismatch-cli compare` shows it."""

    _study: ComparisonAnalysis

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per other run and metric: both values, their difference and factor, each with
        its interval.
        """
        result = self._study.result
        rows = {}
        for other, differences in result.others:
            for key, difference in differences.metrics.items():
                rows[other.run, key] = {
                    "first": result.first.summary.metrics[key].value,
                    "other": other.summary.metrics[key].value,
                    **dict(_flat(to_json(difference))),
                }
        return _frame(rows, ("run", "metric"))


class Gate(Result):
    """Whether limits hold, as `mismatch-cli gate` shows it."""

    _study: GateAnalysis

    @property
    def passed(self) -> bool:
        """Whether every limit holds and no part of the run is missing, so that the command exits
        with 0.
        """
        return self._study.passed

    @cached_property
    def checks(self) -> pd.DataFrame:
        """A row per limit: the measured value, the allowed one, whether it holds, and the
        limit's source.
        """
        rows = dict(enumerate(to_json(self._study.result.checks)))
        return _frame(rows, ("check",))


def _metric_row(metric: Metric, estimate: MetricEstimate) -> dict[str, Any]:
    noise = estimate.noise
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "noise": noise and noise.floor,
        "times_noise": numbers.resolved(noise.times_floor if noise else None),
        "unit": metric.unit,
        "label": metric.label,
        "formula": metric.formula,
        "note": estimate.note,
    }


def frame_of(tables: Sequence[pa.Table]) -> pd.DataFrame:
    """Tables of one schema as a frame: missing numbers are NaN, flags may be missing, text is
    categorical.
    """
    import pandas as pd
    import pyarrow as pa

    types = {pa.bool_(): pd.BooleanDtype()}
    frame: pd.DataFrame = (
        pa.concat_tables(tables).unify_dictionaries().to_pandas(types_mapper=types.get)
    )
    return frame


def _frame(rows: Mapping[Any, Mapping[str, Any]], index: Sequence[str]) -> pd.DataFrame:
    """A row per key; number columns become floats, with NaN for missing values."""
    import pandas as pd

    frame = pd.DataFrame(list(rows.values()))
    if len(index) > 1:
        frame.index = pd.MultiIndex.from_tuples(list(rows), names=list(index))
    else:
        frame.index = pd.Index(list(rows), name=index[0])
    numeric = [name for name in frame if all(map(_is_number, frame[name]))]
    return frame.astype(dict.fromkeys(numeric, float))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and words of a row by their paths; the value of an estimate has the path of the
    estimate.

    Lists, and the notes on missing intervals, are only in the JSON.
    """
    for key, value in row.items():
        if isinstance(value, Mapping):
            for path, entry in _flat(value, f"{prefix}{key}_"):
                yield path.removesuffix("_value"), entry
        elif not isinstance(value, list) and key not in ("name", "note"):
            yield prefix + key, value
