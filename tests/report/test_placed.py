"""Where figures are on a page: in the section that their plot names, and every drawn figure is
somewhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base import registry
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.diagnose import module
from mismatch_cli.report.figures import PLOTS, FigureView, Picture, plots_of
from mismatch_cli.report.outline import Section, with_figures
from tests.pictures import leave_blank

PICTURE = Picture("data:,", 1, 1)
NEW = '''"""Length of the responses."""

TITLE = "Lengths of the responses"
CAPTION = "Responses by their length."
{section}

def needs(data):
    return len(data.length_S) > 0


def draw(figure, data):
    figure.add_axes((0.1, 0.1, 0.8, 0.8)).hist(data.length_S)
'''


def figure(name: str, *sections: str) -> FigureView:
    return FigureView(name, name, "", sections, PICTURE, PICTURE, "")


def placed(*figures: FigureView) -> dict[str, list[str]]:
    sections = with_figures(
        [Section("A", stays=True), Section("B"), Section("C", "alone")], figures
    )
    return {section.title: [figure.name for figure in section.figures] for section in sections}


def test_a_figure_is_in_the_first_section_that_it_names() -> None:
    assert placed(figure("b", "C", "B"), figure("a", "B"), figure("c", "no such section", "C")) == {
        "A": [],
        "B": ["b", "a"],
        "C": ["c"],
    }


def test_a_figure_without_a_section_comes_last() -> None:
    assert placed(figure("a"), figure("b", "D")) == {"A": [], "More figures": ["a", "b"]}
    assert placed() == {"A": []}


@pytest.mark.parametrize(
    ("section", "where"), [("", "More figures"), ('SECTION = "Whole responses"', None)]
)
def test_a_new_plot_is_on_the_page(
    section: str, where: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_blank(monkeypatch)
    modules = registry.modules
    (tmp_path / "lengths.py").write_text(NEW.format(section=section), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lengths", raising=False)
    monkeypatch.setattr(
        registry,
        "modules",
        lambda package: modules(package) | ({"lengths": "lengths"} if package == PLOTS else {}),
    )
    trace = bundled("traces") / "float32"
    words = ["--output", str(tmp_path / "report"), "--plots", "png", "--quiet"]
    assert run(["report", str(trace), *words]) == 0
    page = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    before, new_part, _ = page.partition("Lengths of the responses")
    assert new_part
    assert re.findall(r"<h2>(.*?)</h2>", before)[-1] == (where or "Whole responses")
    assert (tmp_path / "report/plots/lengths.png").exists()


STUDIES = {
    "report": "mismatch",
    "clipstats": "clipping",
    "compare": "comparison",
    "diagnose": "diagnosis",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", STUDIES)
def test_every_page_has_the_sections_that_its_plots_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_blank(monkeypatch)
    # No trace has a section for everything
    arguments = {"compare": ["fp8-kv float32"], "report": ["moe", "fp8-kv"]}
    titles = set()
    for names in arguments.get(command, ["fp8-kv"]):
        traces = [str(bundled("traces") / name) for name in names.split()]
        assert run([command, *traces, "--output", str(tmp_path / names), "--quiet"]) == 0
        page = (tmp_path / names / "report.html").read_text(encoding="utf-8")
        titles |= set(re.findall(r"<h2>(.*?)</h2>", page))
    assert "More figures" not in titles
    checks = {module(name).TITLE for name in registry.names("mismatch_cli.diagnosis.checks")}
    plots = plots_of(STUDIES[command])
    leading = re.search('<figure id="figure-(.*?)">', page)
    assert leading and plots.pop(leading[1])  # it is beside the verdict
    for plot in plots.values():
        named = [plot.SECTION] if isinstance(plot.SECTION, str) else plot.SECTION
        assert set(named) & titles
        assert not isinstance(plot.STUDY, str) or set(named) <= titles | checks
