"""The text instead of a picture: axes and numbers of every plot, and the right numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.report.drawing.marks import OpacityScale, draw_heat, draw_points
from mismatch_cli.report.drawing.panels import Sheet, plain_label
from mismatch_cli.report.drawing.style import WIDE
from mismatch_cli.report.drawing.words import MOST, in_words
from mismatch_cli.report.figures import Drawable, alternative_text, draw, plot_names, plots_of
from mismatch_cli.report.html import render_html
from mismatch_cli.studies.comparison import ComparisonAnalysis
from mismatch_cli.studies.curation import Curation, CurationAnalysis
from mismatch_cli.studies.diagnosis import analyse_diagnosis
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.bisect.searches import analysis as search_of
from tests.studies.compared import with_turns
from tests.train.plots.test_training_plots import bounded, by_threshold, in_settings, relaxed
from tests.train.training_runs import eight_algorithms, limit, make_run, watched

CURVE = {0: 0.3, 1: 0.9, 2: 0.1, 3: 0.5}


@pytest.fixture(scope="module")
def studies(
    measured: SimpleNamespace,
    analysis: ComparisonAnalysis,
    many: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Drawable]:
    """Data that suffices for every plot."""
    comparison = with_turns(analysis.plot_data.result)
    chosen, held_out = {0: 0.75, 1: 0.75, 2: 0.25}, {0: 0.0, 1: 0.25, 2: 1.0}
    config = {"model": "m", "prompts": {"location": "p"}}
    stale = [make_run(name, staleness=n) for name in ("dppo-binary-tv", "pg-is") for n in (0, 4)]
    eight = eight_algorithms()
    runs = (eight, in_settings(), by_threshold(), relaxed(), bounded(eight), stale)
    return [
        measured.plot_data,
        replace(analysis.plot_data, result=comparison),
        many,
        analyse_diagnosis([Trace.open(bundled("traces") / "fp8-kv")]),
        search_of(tmp_path_factory.mktemp("search")),
        CurationAnalysis(Curation((0.2, 0.8), 4, 4, chosen, held_out), config=config),
        *map(TrainingAnalysis.of, runs),
        watched(limit("tv_binary_mean", "max", 0.01), alarms=((3, 5),)),
    ]


def texts(studies: list[Drawable]) -> Iterator[tuple[str, str]]:
    """Every plot of every study, and the text instead of it."""
    for data in studies:
        for name, plot in plots_of(data.STUDY).items():
            if plot.needs(data):
                yield name, alternative_text(plot, data, draw(plot, data, WIDE))


def test_every_plot_says_its_axes_and_a_number(studies: list[Drawable]) -> None:
    described = set()
    for name, text in texts(studies):
        described.add(name)
        assert len(text) <= MOST, name
        assert re.search(r"\d", text) and "nan" not in text and "  " not in text, text
        assert "orizontal: " in text or "eat map" in text, text
        assert text.startswith(text[0].upper()) and text.endswith((".", "…")), text
    assert described == set(plot_names())


def test_a_line_has_its_ends_and_its_extremes() -> None:
    run = TrainingRun("x", "grpo", 0, [{"step": n, "reward": y} for n, y in CURVE.items()])
    plot = plots_of("training")["training-curves"]
    data = TrainingAnalysis.of([run])
    text = alternative_text(plot, data, draw(plot, data, WIDE))
    assert text == (
        "Lines. Horizontal: step, from 0 to 3. Vertical: Mean reward. grpo: from 0.300 to 0.500, "
        "highest 0.900 at 1, lowest 0.100 at 2."
    )


def words_of(draw_on: Callable[[Sheet], None]) -> str:
    plot = ModuleType("own")
    plot.draw = lambda figure, _data: draw_on(figure)  # type: ignore[attr-defined]
    return in_words(draw(plot, SimpleNamespace(subject=""), WIDE))  # type: ignore[arg-type]


def test_shares_are_in_percent_and_thresholds_have_names() -> None:
    def draw_on(sheet: Sheet) -> None:
        (axes,) = sheet.panels(1)
        axes.plot([0.1, 1, 10], [0.25, 0.5, 0.0], label="blocked")
        axes.axhline(0.3)
        axes.annotate("PPO", (0.2, 1), xycoords=("data", "axes fraction"))
        axes.logarithmic("x")
        axes.in_percent()
        axes.set_xlabel("ε")
        axes.headline("Blocked, %")

    assert words_of(draw_on) == (
        "Lines. Horizontal: ε, from 0.100 to 10, logarithmic. Vertical: Blocked, %. blocked: from "
        "25.0 to 0, highest 50.0 at 1; marked: PPO at 0.200."
    )


def test_points_are_counted_and_a_heat_map_has_its_largest_cell() -> None:
    def draw_on(sheet: Sheet) -> None:
        points, heat = sheet.panels(2)
        points.set_xlim(0, 10)
        points.set_ylim(0, 1)
        points.set_xlabel("length")
        x_N, y_N = np.array([1.0, 4.0, 99.0]), np.array([0.5, 0.25, 0.5])
        draw_points(points, x_N, y_N, sheet.theme.blue)  # the last one is outside
        points.headline("|d|")
        share_RC = np.array([[0.1, 0.02, 0.1], [0, np.nan, 0.3]])
        draw_heat(heat, share_RC, OpacityScale(sheet.theme.orange, 1.0), ["ppo", "ipo"])
        heat.set_xticks([0, 1, 2, 3], ["0", "0.5", "0.9", "1"])
        heat.headline("Blocked, %", is_axis=False)

    text = words_of(draw_on)
    assert "|d| (horizontal: length, from 1 to 4): 2 points, from 0.250 to 0.500." in text
    assert "2 rows × 3 columns, largest 30.0 for ipo at 0.9–1." in text


def test_an_empty_panel_says_so() -> None:
    """A trace of a few tokens leaves panels empty."""

    def draw_on(sheet: Sheet) -> None:
        points, empty = sheet.panels(2)
        points.set(xlim=(0, 3), ylim=(0, 1))
        draw_points(points, np.array([1.0, 2.0]), np.array([0.1, 0.2]), sheet.theme.blue)
        points.headline("|d|")
        empty.headline("99th percentile")

    assert "99th percentile: nothing to draw." in words_of(draw_on)
    assert words_of(lambda sheet: sheet.panels(1)[0].headline("|d|")).startswith("Nothing to draw.")


def test_many_lines_become_a_range_and_many_panels_a_count() -> None:
    def draw_on(sheet: Sheet) -> None:
        for number, axes in enumerate(sheet.panels(12)):
            for line in range(9):
                axes.plot([0, 1], [0, line], label=f"an algorithm with a long name {line}")
            axes.headline(f"Quantity {number}")

    text = words_of(draw_on)
    assert len(text) <= MOST
    assert "9 lines, at the right from 0 (an algorithm with a long name 0) to 8.00 (an" in text
    assert re.search(r"And \d+ more panels\.$", text)


def test_a_plot_without_panels_has_its_title_only(many: Any) -> None:
    own = ModuleType("own")
    own.draw = lambda figure, data: figure.add_axes((0.1, 0.1, 0.8, 0.8)).plot([1, 2])  # type: ignore[attr-defined]
    assert alternative_text(own, many, draw(own, many, WIDE)) == ""


def test_names_in_the_text_are_escaped_on_the_page(view: Any) -> None:
    figure = replace(view.figures[0], alt='"><script>alert(1)</script>')
    page = render_html(replace(view, figures=[figure]))
    assert "&lt;script&gt;alert(1)" in page and "<script>alert(1)" not in page


def test_a_tick_at_1_is_not_called_its_distance_from_1() -> None:
    """0.010000000000000002 as a share is a tick at 1 %."""
    assert plain_label(100 * 0.010000000000000002) == plain_label(1) == "1"
    assert [plain_label(value) for value in (1.0001, 0.9996, 1.0006)] == [
        "+0.0001",
        "−0.0004",
        "1.0006",
    ]


def test_rewards_beyond_shares_are_drawn() -> None:
    """Means of a user's own function from −2 to 1; all problems are counted, none at an edge that
    is not its own.
    """
    chosen, held_out = {0: 0.5, 1: -2.0, 2: 0.25, 3: 1.0}, {0: -1.5, 2: 0.75}
    config = {"model": "m", "prompts": {"location": "p"}}
    data = CurationAnalysis(Curation((0.2, 0.8), 4, 4, chosen, held_out), config=config)
    count_B, edge_B = data.histogram
    assert count_B.sum() == 4 and (edge_B[0], edge_B[-1]) == (-2, 1)
    left, right = draw(plots_of("curation")["accuracy"], data, WIDE).axes
    assert left.get_xlim() == (-2, 1.02)
    (dots,) = right.collections[:1]
    assert right.get_ylim() == (-1.5, 1.0)
    low, high = sorted(dots.get_offsets()[:, 1])
    assert -1.5 <= low <= -1.5 + 0.35 / 4 and abs(high - 0.75) <= 0.35 / 4
    shares = CurationAnalysis(Curation((0.2, 0.8), 4, 4, {0: 0.5, 1: 0.0}, {0: 0.5}), config=config)
    assert shares.histogram[1].tolist() == [-0.125, 0.125, 0.375, 0.625, 0.875, 1.125]
    assert draw(plots_of("curation")["accuracy"], shares, WIDE).axes[1].get_ylim() == (0, 1)
