"""`report --figure NAME`: one figure of a trace or of training runs, without the page around it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.registry import alternatives

if TYPE_CHECKING:
    from mismatch_cli.app.common import Common
    from mismatch_cli.studies.study import Study
    from mismatch_cli.trace.reader import Trace

_NEAREST = 3  # names that an unknown one is answered with
# The studies of a trace, each with the word of its progress bar
_PHASES = {"mismatch": "Measuring", "clipping": "Analysing", "diagnosis": "Reading"}
_TRAINING = "training"
_ELSEWHERE = {"comparison": "compare", "bisection": "bisect", "curation": "curate"}


class FigurePlace(NamedTuple):
    """The folder of a report that a figure goes into; `own` is that of the run itself."""

    folder: Path
    own: bool

    @property
    def plots(self) -> Path:
        from mismatch_cli.report.output_files import PLOTS_FOLDER

        return self.folder / PLOTS_FOLDER

    def held(self, common: Common) -> AbstractContextManager[None]:
        """Hold the folder while the figure is drawn."""
        from mismatch_cli.trace.run_folder import picture_folder

        return picture_folder(self.folder, force=common.force or self.own)


def figure_names() -> list[str]:
    """Every name that `--figure` takes; imports no plot."""
    from mismatch_cli.report.figures import plot_names
    from mismatch_cli.report.paper_figures import PAPER_FIGURES

    return [*PAPER_FIGURES, *plot_names()]


def check_figure(name: str) -> None:
    """A `UsageError` with the nearest names by meaning for an unknown one."""
    if name not in figure_names():
        raise UsageError(
            f"Unknown figure '{name}'. Nearest: {alternatives(_nearest(name))}. All figures: "
            f"{suggest('guide', 'report')}"
        )


def _nearest(name: str) -> list[str]:
    """The figures whose name and first line say most about the words of a name, then those that are
    spelled alike.
    """
    from mismatch_cli.app.guide_search import search
    from mismatch_cli.report.figures import first_lines
    from mismatch_cli.report.paper_figures import PAPER_FIGURES

    texts = first_lines() | {paper: figure.shows for paper, figure in PAPER_FIGURES.items()}
    hits = [hit.page for hit in search(name.replace("-", " "), texts).hits]
    alike = difflib.get_close_matches(name.lower(), figure_names(), n=_NEAREST, cutoff=0)
    return list(dict.fromkeys([*hits, *alike]))[:_NEAREST]


def choices_in(name: str, studies: Sequence[str]) -> dict[str, str]:
    """The plots of a name that these studies have, each with its study; a `UsageError` that says
    what draws it if there is none.
    """
    from mismatch_cli.report.figures import studies_of
    from mismatch_cli.report.paper_figures import plots_named

    study_of: dict[str, str] = {}
    for plot in plots_named(name):
        for study in studies:
            if study in studies_of(plot):
                study_of.setdefault(plot, study)
    if not study_of:
        raise _drawn_elsewhere(name, plots_named(name)[0])
    return study_of


def _drawn_elsewhere(name: str, plot: str) -> UsageError:
    from mismatch_cli.report.figures import studies_of

    study = studies_of(plot)[0]
    if study in _ELSEWHERE:
        return UsageError(f"{name} is drawn by another command: {suggest(_ELSEWHERE[study])}")
    if study == _TRAINING:
        return UsageError(
            f"{name} is drawn of training runs, and this is a trace: name their folders."
        )
    return UsageError(
        f"{name} is drawn of a trace, and these are training runs. Name one of their traces, "
        "RUN/traces/step-N, which `train` keeps with --trace-every."
    )


def draw_training(
    study_of_runs: Callable[[], Study], name: str, place: FigurePlace, common: Common
) -> None:
    """Draw a figure of training runs."""
    choices = choices_in(name, (_TRAINING,))
    with place.held(common):
        _draw(list(choices), study_of_runs(), place, common)


def draw_traces(
    open_traces: Callable[[], list[Trace]], name: str, place: FigurePlace, common: Common
) -> None:
    """Draw the first of a name's plots that the traces have data for."""
    choices = choices_in(name, tuple(_PHASES))
    # A study takes a pass over the traces: only plots of the first plot's study are candidates.
    study, *_ = choices.values()
    plots = [plot for plot in choices if choices[plot] == study]
    with place.held(common):
        traces = open_traces()
        total = sum(trace.num_responses for trace in traces)
        with common.progress.counting(_PHASES[study], total) as advance:
            analysis = _analysed(study, traces, common, advance)
        _draw(plots, analysis, place, common)


def _draw(plots: Sequence[str], study: Study, place: FigurePlace, common: Common) -> None:
    """Write the first plot that the data suffices for, and print its files."""
    from mismatch_cli.report.figures import lacking, plots_for, write_figure

    data = study.plot_data
    drawable = dict(plots_for(data))
    for plot in plots:
        if plot in drawable:
            for path in write_figure(data, plot, place.plots, common.files):
                print(path)
            return
    raise lacking(data, plots[0])


def _analysed(study: str, traces: Sequence[Trace], common: Common, advance: Any) -> Study:
    reading = {"workers": common.read_by, "on_responses": advance}
    if study == "clipping":
        from mismatch_cli.library import named_choices
        from mismatch_cli.studies.clipping import analyse_clipping

        return analyse_clipping(traces, *named_choices.algorithms((), ()), **reading)
    if study == "diagnosis":
        from mismatch_cli.studies.diagnosis import analyse_diagnosis

        return analyse_diagnosis(traces, **reading)
    from mismatch_cli.studies.mismatch import analyse_mismatch

    return analyse_mismatch(traces, **reading)
