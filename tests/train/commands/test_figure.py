"""`report --figure NAME`: one figure, its file, and what is said where it cannot be drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from tests.train.training_runs import make_run, saved

FLOAT32 = str(bundled("traces") / "float32")
GOOD = {"bad_over_negative": 0.0, "bad_over_tokens": 0.0}


def figure(capfd, *arguments: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = run(["report", *arguments, "--quiet"])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    for name in ("pg-is", "dppo-binary-tv"):
        saved(tmp_path / "trained", make_run(name, steps=5))
    return tmp_path / "trained"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_one_figure_of_a_trace_and_nothing_else(tmp_path, capfd):
    code, out, _ = figure(capfd, FLOAT32, "--figure", "ratio-and-tv", "--output", f"{tmp_path}/f")
    path = tmp_path / "f" / "plots" / "ratio-and-tv.png"
    assert (code, out) == (0, f"{path}\n")
    assert files_in(tmp_path) == ["f/plots/ratio-and-tv.png"]


def test_figures_gather_and_a_report_replaces_them(tmp_path, capfd):
    folder = tmp_path / "f"
    where = ("--output", str(folder))
    for name in ("paper-2", "overlap"):
        assert figure(capfd, FLOAT32, "--figure", name, *where)[0] == 0
    assert files_in(folder) == ["plots/overlap.png", "plots/ratio-and-tv.png"]
    assert run(["report", FLOAT32, *where, "--plots", "png", "--quiet"]) == 0
    drawn = files_in(folder)
    assert "report.html" in drawn and "plots/overlap.png" not in drawn
    before = (folder / "report.html").read_bytes()
    assert figure(capfd, FLOAT32, "--figure", "overlap", *where)[0] == 0
    assert files_in(folder) == sorted([*drawn, "plots/overlap.png"])
    assert (folder / "report.html").read_bytes() == before


def test_formats_and_width_are_those_of_a_report(trained, tmp_path, capfd, monkeypatch):
    monkeypatch.undo()  # pictures are drawn
    how = ("--plots", "pdf,svg", "--plot-width", "3.25in", "--output", str(tmp_path / "f"))
    code, out, _ = figure(capfd, str(trained), "--figure", "time", *how)
    assert code == 0 and out.split() == [
        f"{tmp_path}/f/plots/time.{kind}" for kind in ("pdf", "svg")
    ]
    assert 'width="234pt"' in (tmp_path / "f" / "plots" / "time.svg").read_text()


def test_runs_that_are_named_give_the_end_of_training_by_threshold(tmp_path, capfd):
    """Figure 19 of the paper needs no folder around its runs: a loop of a shell makes them."""
    names = [f"dppo-binary-tv:max_tv={threshold}" for threshold in (0.1, 0.2)]
    runs = [
        str(saved(tmp_path / f"run-{number}", make_run(name, steps=5)))
        for number, name in enumerate([*names, "pg-is"])
    ]
    where = tmp_path / "f"
    code, out, _ = figure(capfd, *runs, "--figure", "paper-19", "--output", str(where))
    assert (code, out) == (0, f"{where}/plots/sensitivity.png\n")
    assert figure(capfd, *runs[1:], "--figure", "paper-19", "--output", str(where))[0] == 1


def test_training_runs_get_it_in_their_own_folder(trained, capfd):
    code, out, _ = figure(capfd, str(trained), "--figure", "paper-5")
    assert code == 0 and out == f"{trained}/plots/reward-and-bad-updates.png\n"
    code, out, _ = figure(capfd, str(trained / "pg-is-seed-0"), "--figure", "paper-3")
    assert code == 0 and out == f"{trained}/pg-is-seed-0/plots/training-curves.png\n"


def test_a_number_of_the_paper_is_what_the_data_can_draw(trained, tmp_path, capfd):
    # Runs of one setting have no panels by setting; without α, figure 6 is that of blocked tokens
    where = ("--output", str(tmp_path / "f"))
    for number, name in (("paper-8", "training-curves"), ("paper-6", "blocked-tokens")):
        code, out, _ = figure(capfd, str(trained), "--figure", number, *where)
        assert code == 0 and out.endswith(f"/{name}.png\n")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rewrad", ", reward-difference or "),
        ("bad update", "Nearest: bad-updates, reward-and-bad-updates or paper-5."),
        ("paper-99", "All figures: mismatch-cli guide report"),
        ("layer-error", "is drawn by another command: mismatch-cli bisect"),
        ("metric-factors", "is drawn by another command: mismatch-cli compare"),
        ("time", "is drawn of training runs, and this is a trace"),
    ],
)
def test_what_is_no_figure_of_a_trace(tmp_path, capfd, name, words):
    where = ("--output", str(tmp_path / "f"))
    code, out, err = figure(capfd, FLOAT32, "--figure", name, *where)
    assert (code, out) == (2, "") and words in err
    assert files_in(tmp_path) == []


def test_training_runs_have_no_figure_of_tokens(trained, capfd):
    before = files_in(trained)
    code, _, err = figure(capfd, str(trained), "--figure", "paper-2")
    assert code == 2 and "RUN/traces/step-N" in err and "--trace-every" in err
    assert files_in(trained) == before


def test_which_data_is_missing(tmp_path, capfd):
    training = make_run("pg-is", steps=3)
    records = [record | GOOD for record in training.records]
    own = saved(tmp_path, replace(training, records=records))
    before = files_in(tmp_path)
    code, _, err = figure(capfd, str(own), "--figure", "paper-5")
    assert code == 1 and "it needs the reward and bad updates of each step, and a bad" in err
    assert "The data suffices for: training-curves" in err
    assert "`bounds` in metrics.jsonl" in figure(capfd, str(own), "--figure", "bound-quality")[2]
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    "other", [["--json"], ["--no-plots"], ["--full"], ["--export", "csv"], ["--as", "verl"]]
)
def test_nothing_else_is_written_or_printed(tmp_path, capfd, other):
    where = ("--output", str(tmp_path / "f"))
    code, _, err = figure(capfd, FLOAT32, "--figure", "paper-2", *where, *other)
    assert code == 2 and f"leave out {other[0]}" in err


def test_a_foreign_file_is_never_replaced(tmp_path, capfd):
    plots = tmp_path / "f" / "plots"
    plots.mkdir(parents=True)
    (plots / "ratio-and-tv.png").write_text("mine")
    where = ("--output", str(tmp_path / "f"))
    assert figure(capfd, FLOAT32, "--figure", "paper-2", *where)[0] == 1
    assert figure(capfd, FLOAT32, "--figure", "paper-2", *where, "--force")[0] == 1
    assert (plots / "ratio-and-tv.png").read_text() == "mine"
