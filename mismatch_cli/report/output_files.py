"""What a study writes into a folder: its numbers, its page and its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from mismatch_cli.report.outline import Outline
from mismatch_cli.report.picture_files import PictureFiles
from mismatch_cli.studies.study import Study
from mismatch_cli.trace.files import replacing_entries, write_atomically

SUMMARY_FILE, HTML_FILE, PLOTS_FOLDER = "summary.json", "report.html", "plots"
_Working = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def write_numbers(study: Study, folder: Path) -> Path:
    """Write `summary.json`: what `--json` prints."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(study.to_json(), indent=2) + "\n")
    return folder / SUMMARY_FILE


def write_report(
    study: Study,
    view: Outline,
    folder: Path,
    files: PictureFiles | None = PictureFiles(),
    working: _Working = lambda _phase, _total: nullcontext(lambda _done: None),
) -> bool:
    """Replace the report in a folder, all at once; return whether the new one has `plots/`.

    It is `summary.json`, `report.html`, and `plots/` if `files` has formats; without `files`
    nothing is drawn. `working` gets the name of each long phase and how much it has to do; what it
    yields, how much is done.
    """
    from mismatch_cli.report.explorer import explorer_view
    from mismatch_cli.report.figures import figure_views, plots_for
    from mismatch_cli.report.html import write_html
    from mismatch_cli.trace.ownership import pictures_in

    with replacing_entries(folder / HTML_FILE, lambda: pictures_in(folder / PLOTS_FOLDER)) as new:
        # All is written into a draft, which replaces the old report when this block ends.
        # Whatever fails or is interrupted before leaves the old one whole.
        write_numbers(study, new)
        responses = study.explored_responses
        if responses:
            with working("Exploring", 2 * responses) as on_responses:
                explored = study.exploration(on_responses)
            if explored is not None:
                view = replace(view, explorer=explorer_view(explored))
        plots = [] if files is None else list(plots_for(study.plot_data))
        if files is not None and plots:
            with working("Drawing", len(plots)) as on_drawn:
                figures = figure_views(
                    study.plot_data,
                    new / PLOTS_FOLDER,
                    files,
                    explored=view.explorer is not None,
                    on_drawn=on_drawn,
                )
            view = replace(view, figures=figures)
        write_html(new / HTML_FILE, view)
        return (new / PLOTS_FOLDER).exists()
