"""The screen of one comparison, and its table and figure on the page."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mismatch_cli.report.drawing.style import NARROW, WIDE
from mismatch_cli.report.figures import plots_of
from mismatch_cli.report.outline import Outline, Table, Verdict
from mismatch_cli.report.screen import print_view, screen_of
from mismatch_cli.train.pages.training import page
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.report.plots.drawing import check_texts, drawn
from tests.train.training_runs import make_run

PAIR = ("dppo-binary-tv", "pg-tis")


def view_of(runs: list[TrainingRun], *pair: str) -> Outline:
    own, rival = pair
    return page(replace(TrainingAnalysis.of(runs), claimed=(own, rival)))


def verdict_of(runs: list[TrainingRun], *pair: str) -> Verdict:
    verdict = view_of(runs, *pair).verdict
    assert verdict is not None
    return verdict


def claims(view: Outline) -> Table:
    """The table of all measures."""
    (section,) = (each for each in view.sections if each.title == "Which learns faster")
    (table,) = section.tables
    return table


def on_screen(view: Outline) -> Table:
    """The only table of the screen."""
    screen = screen_of(view)
    assert screen is not None
    (table,) = screen.tables
    return table


def seeds(*names: str, count: int = 3, steps: int = 60, **config: object) -> list[TrainingRun]:
    return [make_run(name, seed, steps, **config) for name in names for seed in range(count)]


def test_a_claim_is_shown_or_contradicted_by_the_area() -> None:
    runs = seeds(*PAIR)
    shown, against = verdict_of(runs, *PAIR), verdict_of(runs, *reversed(PAIR))
    areas = [
        [run.series("reward").mean() for run in runs if run.algorithm == name] for name in PAIR
    ]
    apart_S = np.subtract(*areas)
    assert (shown.words, shown.status) == ("SHOWN", "good")
    assert f"mean reward over steps 1 to 60 differs by {apart_S.mean():.3f} ± " in shown.text
    assert "paired over 3 seeds. Shown: final reward; bad, % of A ≠ 0" in shown.text
    assert (against.words, against.status) == ("CONTRADICTED", "bad")
    assert against.text.startswith("pg-tis learns more slowly than dppo-binary-tv")
    rows = {row[0]: row[-1] for row in claims(view_of(runs, *reversed(PAIR))).rows}
    assert rows["area (mean reward)"] == "✘ contradicted"
    assert rows["steps to 0.69"] == "not shown"


def test_one_seed_each_shows_nothing() -> None:
    verdict = verdict_of(seeds(*PAIR, count=1), *PAIR)
    assert (verdict.words, verdict.status) == ("ONE SEED", "")
    assert "Repeat both with --seeds 3." in verdict.text and "paired" not in verdict.text


def test_a_third_algorithm_changes_neither_the_steps_nor_the_answer() -> None:
    runs, short = seeds(*PAIR), make_run("pg-is", 0, 5)
    alone, beside = view_of(runs, *PAIR), view_of([*runs, short], *PAIR)
    assert (beside.verdict, claims(beside)) == (alone.verdict, claims(alone))
    assert beside.notes == () and "pg-is-seed-0 ends there" in beside.sections[1].text


def test_runs_that_do_not_reach_the_reward_are_named_on_the_screen() -> None:
    runs = seeds(*PAIR)
    flat = [{**record, "reward": 0.2} for record in runs[-1].records]
    view = view_of([*runs[:-1], replace(runs[-1], records=flat)], *PAIR)
    assert ("Not reached", "by 1 run: pg-tis-seed-2") in view.remarks
    (steps,) = (row for row in claims(view).rows if row[0].startswith("steps to"))
    assert steps[2:] == ("2 of 3 runs", "—", "0", "not reached")


def rows_of(runs: list[TrainingRun]) -> list[dict[str, str]]:
    """The rows of the screen of all algorithms, by the titles without the reward to reach."""
    table = on_screen(page(TrainingAnalysis.of(runs)))
    titles = [re.sub(r" to 0\.\d+$", "", column.title) for column in table.columns]
    return [dict(zip(titles, row, strict=True)) for row in table.rows]


def test_the_table_of_all_algorithms_has_what_was_measured_of_their_speed() -> None:
    runs = seeds(*PAIR)
    for record in runs[-1].records:
        record["reward"] = 0.2
    own, rival = rows_of(runs)
    assert own["area"] == f"{np.mean([run.series('reward').mean() for run in runs[:3]]):.3f}"
    assert rival["steps"] == rival["s"] == "2 of 3 runs"
    assert 9 < float(own["steps"]) < 15 and float(own["s"]) > 40
    for run in runs:
        for record in run.records:
            del record["seconds"]
    assert [row["s"] for row in rows_of([replace(run) for run in runs])] == ["—", "—"]


def test_several_settings_have_a_row_each() -> None:
    runs = [*seeds(*PAIR, epochs=2), *seeds(*PAIR, epochs=16)]
    rows = on_screen(view_of(runs, *PAIR)).rows
    assert [row[0] for row in rows if row[1].startswith("area")] == ["epochs 2", "epochs 16"]
    assert verdict_of(runs, *PAIR).words == "SHOWN IN 2 OF 2 SETTINGS"
    other = verdict_of(runs, *reversed(PAIR))
    assert other.words == "SHOWN IN 0 OF 2 SETTINGS, CONTRADICTED IN 2"
    assert other.status == "bad"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_a_screen_and_never_loses_the_answer(width: int) -> None:
    name = "my_mask_with_a_long_name:max_tv=0.123"
    for pair in (PAIR, (name, "dppo-binary-tv-recompute")):
        file = io.StringIO()
        print_view(view_of(seeds(*pair), *pair), Console(file=file, width=width))
        lines = file.getvalue().splitlines()
        assert len(lines) <= (40 if width >= 80 else 50) and max(map(len, lines)) <= width
        assert any(line.rstrip().endswith("not shown") for line in lines)


def test_what_to_type_next_keeps_the_pair(tmp_path: Path) -> None:
    runs = [replace(run, folder=tmp_path / run.name) for run in seeds(*PAIR, count=1, steps=2)]
    (tmp_path / runs[0].name / "traces" / "step-2").mkdir(parents=True)
    lines = [line for line, _ in view_of(runs, *PAIR).next]
    assert lines[0].startswith("mismatch-cli clipstats ")
    assert lines[1].startswith("mismatch-cli report ")
    assert all("-a dppo-binary-tv -a pg-tis" in line for line in lines)
    assert page(TrainingAnalysis.of(runs)).next[1][0].endswith("-a dppo-binary-tv -a pg-tis")
    assert page(replace(TrainingAnalysis.of(runs), claimed=PAIR)).command.endswith(
        "-a dppo-binary-tv -a pg-tis"
    )


def test_the_page_has_every_comparison_with_the_first_algorithm() -> None:
    runs = seeds("dppo-binary-tv", "pg-tis", "pg-is", count=2)
    for study, names in (
        (TrainingAnalysis.of(runs), {"dppo-binary-tv − pg-tis", "dppo-binary-tv − pg-is"}),
        (replace(TrainingAnalysis.of(runs), claimed=("pg-is", "pg-tis")), None),
    ):
        section = page(study).sections[0]
        assert section.title == "Which learns faster"
        (shown,) = section.tables
        if names is None:
            assert shown.title == "pg-is − pg-tis, over the steps that both share"
            assert len(shown.rows) == 6
        else:
            assert {row[0] for row in shown.rows} == names and len(shown.rows) == 12
    alone = page(TrainingAnalysis.of(seeds("pg-is")))
    assert all(section.title != "Which learns faster" for section in alone.sections)


def test_the_curve_is_the_paired_difference_with_its_interval() -> None:
    plot = plots_of(TrainingAnalysis.STUDY)["reward-difference"]
    runs = seeds("dppo-binary-tv", "pg-tis", "pg-is", steps=19)
    study = TrainingAnalysis.of(runs)
    for style in (WIDE, NARROW):
        figure = drawn(plot, study, style)
        check_texts(figure, style)
        assert len(figure.axes) == 2
    own_SN, rival_SN = (
        np.array([run.series("reward") for run in runs if run.algorithm == name]) for name in PAIR
    )
    apart_SN = own_SN - rival_SN
    line = next(line for line in figure.axes[0].lines if len(line.get_xdata()) == 19)
    np.testing.assert_allclose(line.get_ydata(), apart_SN.mean(axis=0))
    half_N = 4.303 * apart_SN.std(axis=0, ddof=1) / np.sqrt(3)
    y_N = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert y_N.max() == pytest.approx((apart_SN.mean(axis=0) + half_N).max())
    assert not plot.needs(TrainingAnalysis.of(seeds("pg-is")))
