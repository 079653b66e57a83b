"""Every figure of the paper has plots that exist, and the guide lists all of them."""

from __future__ import annotations

import re

from mismatch_cli.report.figures import first_lines, plot_names, plots_of, studies_of
from mismatch_cli.report.paper_figures import PAPER_FIGURES, plots_named
from tests.paths import DOCS

GUIDE = (DOCS / "report.md").read_text(encoding="utf-8")


def test_the_plots_exist():
    for name, figure in PAPER_FIGURES.items():
        assert re.fullmatch(r"paper-\d+", name) and set(figure.plots) <= set(plot_names()), name
    assert plots_named("paper-5")[0] == "reward-and-bad-updates"
    assert plots_named("time") == ("time",)


def test_the_guide_lists_every_figure_of_the_paper():
    """In brackets behind a plot: the figures of the paper that it draws."""
    listed = {
        (f"paper-{number}", plot)
        for plot, numbers in re.findall(r"`([a-z-]+)` \(([\d, ]+)\)", GUIDE)
        for number in numbers.split(", ")
    }
    assert listed == {(name, plot) for name, of in PAPER_FIGURES.items() for plot in of.plots}


def test_the_guide_lists_every_plot_that_report_draws():
    for name in plot_names():
        if {"mismatch", "clipping", "diagnosis", "training"} & set(studies_of(name)):
            assert f"`{name}`" in GUIDE, name


def test_every_plot_says_what_it_draws_and_needs():
    for name, line in first_lines().items():
        plot = plots_of(studies_of(name)[0])[name]
        assert line, name
        assert plot.DATA and not plot.DATA.endswith(".") and plot.DATA[0].islower(), name
