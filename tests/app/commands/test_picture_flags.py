"""The flags that decide what is drawn, and into which files."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mismatch_cli.app.cli import run

TWO = ("-a", "grpo-clip-higher", "-a", "dppo-binary-tv")


@pytest.fixture
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the blank pictures of this folder, those of one plot."""
    from mismatch_cli.report import figures

    monkeypatch.undo()
    plots = figures.plots_for
    monkeypatch.setattr(
        figures,
        "plots_for",
        lambda data: [plot for plot in plots(data) if plot[0] == "mask-regions"],
    )


def clipstats(*arguments: str) -> int:
    return run(["clipstats", *TWO, *arguments, "--quiet"])


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_json_alone_draws_nothing_and_leaves_no_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mismatch_cli.report.figures.figure_views", None)
    for command in ("clipstats", "compare", "diagnose", "report"):
        assert run([command, "--json", "--quiet"]) == 0
    assert files_in(tmp_path) == []
    assert capfd.readouterr().out.count('"format": "mismatch-cli') == 4


def test_json_with_a_folder_writes_all(tmp_path):
    assert clipstats("--json", "--output", str(tmp_path / "c")) == 0
    assert files_in(tmp_path / "c") == ["report.html", "summary.json"]


def test_no_plots(tmp_path):
    folder = tmp_path / "c"
    assert clipstats("-o", str(folder), "--plots", "png") == 0
    (folder / "plots" / "notes.txt").write_text("mine")
    assert clipstats("-o", str(folder), "--no-plots") == 1  # a foreign file is in the way
    (folder / "plots" / "notes.txt").unlink()
    assert clipstats("-o", str(folder), "--no-plots") == 0
    assert files_in(folder) == ["report.html", "summary.json"]
    assert "<figure" not in (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("_drawn")
def test_files_for_a_paper(tmp_path):
    folder, plots = tmp_path / "c", tmp_path / "c" / "plots"
    assert clipstats("-o", str(folder), "--plots", "svg,PDF", "--plot-width", "3.25in") == 0
    assert files_in(plots) == ["mask-regions.pdf", "mask-regions.svg"]
    pdf = (plots / "mask-regions.pdf").read_bytes()
    assert re.search(rb"/MediaBox \[ 0 0 234 ", pdf)  # points
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    svg = (plots / "mask-regions.svg").read_text()
    assert ElementTree.fromstring(svg).attrib["width"] == "234pt"
    # Typesetting programs support neither
    assert "var(" not in svg and "prefers-color-scheme" not in svg
    assert "trainer probability π</text>" in svg and "δ = 0.15" in svg
    assert clipstats("-o", str(folder), "--plots", "png", "--plot-width", "82mm") == 0
    assert files_in(plots) == ["mask-regions.png"]  # and no others


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plots", "gif"], "Unknown format 'gif'"),
        (["--plots", "svgz"], "Did you mean svg?"),
        (["--plot-width", "wide"], "is not a width"),
        (["--plot-width", "3.25"], "such as 3.25in"),
        (["--plot-width", "1in"], "Choose 2.5in to 12in"),
        (["--no-plots", "--plots", "pdf"], "leave out plots"),
        (["--no-plots", "--plot-width", "3in"], "leave out plot_width"),
    ],
)
def test_what_cannot_be_drawn_is_reported_at_once(tmp_path, capfd, flags, said):
    assert clipstats("-o", str(tmp_path / "c"), *flags) == 2
    assert said in capfd.readouterr().err
    assert files_in(tmp_path) == []
