"""Every plot of `report`: the contract, all variants, and poor data."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pair_summary import ProbabilityBin
from mismatch_cli.metrics.route_flips import MarginCounts
from mismatch_cli.report.drawing.style import DARK, LIGHT, NARROW, WIDE, Style
from mismatch_cli.report.figures import draw, plots_for, plots_of, text_of
from mismatch_cli.studies.mismatch import PlotData
from tests.metrics.summaries import NOTHING, pair_summary, place
from tests.report.plots.drawing import PAPER, check_texts, contrast, drawn, texts_of

PLOTS = list(plots_of("mismatch"))
STYLES = [WIDE, NARROW]


@pytest.fixture(params=PLOTS)
def plot(request: pytest.FixtureRequest) -> ModuleType:
    return plots_of("mismatch")[request.param]


@pytest.fixture(params=[*STYLES, PAPER], ids=lambda style: style.name)
def style(request: pytest.FixtureRequest) -> Style:
    return request.param


def test_the_plots_of_the_papers_exist() -> None:
    assert {
        "ratio-and-tv",
        "logp-agreement",
        "sequence-log-ratio",
        "volatility",
        "position-profile",
    } <= set(PLOTS)


def test_contract(plot: ModuleType) -> None:
    assert text_of(plot, "TITLE", "mismatch").strip()
    assert text_of(plot, "CAPTION", "mismatch").strip().endswith(".")
    assert plot.needs(PlotData(pair_summary())) is False


def test_text_is_legible_inside_the_figure_and_apart(
    plot: ModuleType, style: Style, measured: SimpleNamespace
) -> None:
    assert plot.needs(measured.plot_data)
    figure = drawn(plot, measured.plot_data, style)
    check_texts(figure, style)
    for axes in figure.axes:
        above = [axes.get_legend()] if axes.get_legend() else []
        titles = [axes.get_title(loc=loc) for loc in ("left", "right")]
        parts = above + [t for t in texts_of(figure) if t.get_text() and t.get_text() in titles]
        boxes = [part.get_window_extent() for part in parts]
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        assert all(box.y0 >= axes.get_window_extent().y1 for box in boxes)


POOR = {
    "one token": ([-0.5], [-0.6], [0.01]),
    "one token, certain": ([0.0], [0.0], None),
    "all equal": ([-1.0, -2.0, -0.1], [-1.0, -2.0, -0.1], None),
    "float32 noise": ([-1.0, -2.0, -0.1], [-1.000001, -2.0, -0.1000001], [1e-7, 0.0, 2e-7]),
    "not measured": ([-1.0, -2.0], [np.nan, np.nan], [np.nan, np.nan]),
    "out of support": ([-1.0, -2.0, -3.0], [-np.inf, -np.inf, -3.1], None),
    "far apart": ([-0.001, -15.0], [-90.0, -0.1], [0.999, 0.9]),
}


@pytest.mark.parametrize("name", POOR)
def test_draws_or_declines_poor_data(plot: ModuleType, name: str) -> None:
    logq, logp, topk = (
        None if column is None else np.array(column, dtype=np.float32) for column in POOR[name]
    )
    gap = Estimate(0.1, note="fewer than 10 prompts: no interval")
    keys = [f"{q}_{s}" for q in ("ratio", "tv_binary", "tv_topk") for s in ("sd", "p99")]
    spreads = dict.fromkeys(keys, NOTHING)
    equal = spreads | {"ratio_sd": replace(gap, value=0.0), "ratio_p99": replace(gap, value=1.1)}
    summary = pair_summary(
        metrics={"sequence_slope": NOTHING},
        volatility=[
            ProbabilityBin(0.9, 1.0, tokens, metrics)
            for tokens, metrics in ((1, spreads), (0, spreads), (1, equal))
        ],
        positions=[place(0, 0, gap), place(1, 1, NOTHING)],
        turns=[
            place(1, 1, gap, length_mean=gap),
            place(24, None, replace(gap, value=0.0), length_mean=NOTHING),
        ],
    )
    lengths, sums = np.array([len(logq)]), np.array([float(np.sum(logp - logq))])
    data = PlotData(
        summary, "$\\frac{1}{2}$ 漢字 \x1b", logq, logp, topk, lengths, sums, lattice_steps=(0.5,)
    )
    if plot.needs(data):
        for style in STYLES:
            drawn(plot, data, style)


def test_without_topk_the_binary_tv_is_labelled(measured: SimpleNamespace) -> None:
    fields = {**vars(measured.plot_data), "tv_topk_N": None}
    plot = plots_of("mismatch")["ratio-and-tv"]
    titles = [axes.get_title(loc="left") for axes in draw(plot, PlotData(**fields), STYLES[0]).axes]
    assert sum("small at low μ" in title for title in titles) == 1


def test_lattice_lines_are_drawn_only_where_the_data_shows_them(measured: SimpleNamespace) -> None:
    plot = plots_of("mismatch")["logp-agreement"]

    def labels(steps: tuple[float, ...]) -> list[str]:
        figure = draw(
            plot, PlotData(**{**vars(measured.plot_data), "lattice_steps": steps}), STYLES[0]
        )
        return [text.get_text() for text in figure.axes[0].texts]

    assert labels((0.125, 0.25)) == ["rounded logits: s = 1/8 nat", "rounded logits: s = 1/4 nat"]
    assert labels(()) == []


def test_routers_without_margins_have_the_other_panels(measured: SimpleNamespace) -> None:
    plot, data = plots_of("mismatch")["routing"], measured.plot_data
    none = MarginCounts(0, None, None, None, [0] * len(data.routing.margins.agreeing.counts))
    margins = replace(data.routing.margins, agreeing=none, flipped=none)
    without = replace(data, routing=replace(data.routing, margins=margins))
    for style in STYLES:
        figure = drawn(plot, without, style)
        check_texts(figure, style)
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        assert titles == ["Tokens flipped, %", "Mean |Δlog p|, nats"]
    for of_one_kind in ({"agreeing": none}, {"flipped": none}):
        some = replace(data.routing.margins, **of_one_kind)
        figure = drawn(plot, replace(data, routing=replace(data.routing, margins=some)), WIDE)
        assert len(figure.axes) == 3
    assert not plot.needs(replace(data, routing=replace(data.routing, tokens=0)))


def test_spreads_of_0_are_not_drawn_as_an_empty_figure() -> None:
    """Bins of one token, or of tokens that agree; a percentile counts from 100 tokens on."""
    plot, zero = plots_of("mismatch")["volatility"], Estimate(0.0)

    def is_drawn(tokens: int, **metrics: Estimate) -> bool:
        nothing = dict.fromkeys(("ratio_sd", "tv_binary_sd", "tv_topk_sd"), zero)
        row = ProbabilityBin(0.3, 0.5, tokens, nothing | metrics)
        return bool(plot.needs(PlotData(pair_summary(volatility=[row]))))

    assert not is_drawn(1) and not is_drawn(500, tv_binary_p99=zero)
    assert is_drawn(2, ratio_sd=Estimate(0.1)) and is_drawn(2, tv_topk_sd=Estimate(0.1))
    assert is_drawn(2, tv_binary_sd=Estimate(0.1))
    assert is_drawn(100, tv_binary_p99=Estimate(0.1))
    assert not is_drawn(99, tv_binary_p99=Estimate(0.1))


def test_plots_without_data_are_left_out() -> None:
    assert list(plots_for(PlotData(pair_summary()))) == []


def test_a_percentile_is_drawn_over_bins_with_enough_tokens() -> None:
    keys = ("ratio_p01", "ratio_p99", "tv_binary_p99", "tv_topk_p99")
    percentiles = dict.fromkeys(keys, Estimate(0.25, 0.2, 0.3))
    bins = [
        ProbabilityBin(low, high, tokens, percentiles)
        for low, high, tokens in ((0, 0.5, 199), (0.5, 0.9, 200))
    ]
    logq = np.log(np.linspace(0.1, 0.9, 50, dtype=np.float32))
    data = PlotData(pair_summary(volatility=bins), "", logq, logq - 0.01)
    ratio, tv = draw(plots_of("mismatch")["ratio-and-tv"], data, STYLES[0]).axes
    steps = [
        line.get_xydata().tolist()
        for axes in (ratio, tv)
        for line in axes.lines
        if len(line.get_xdata()) == 2
    ]
    assert [step for step in steps if step[0][1] == 0.25] == [[[0.5, 0.25], [0.9, 0.25]]] * 3


def test_a_slope_that_may_be_0_is_a_thin_line(measured: SimpleNamespace) -> None:
    plot = plots_of("mismatch")["sequence-log-ratio"]
    looks = []
    for high in (-0.1, 0.1):
        slope = pair_summary(metrics={"sequence_slope": Estimate(-1.0, -2.0, high)})
        data = replace(measured.plot_data, summary=slope)
        line = draw(plot, data, STYLES[0]).axes[0].lines[-1]
        looks.append((line.get_linestyle(), "may be 0" in line.get_label()))
    assert looks == [("-", False), ("--", True)]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_contrast(theme: Any) -> None:
    assert min(contrast(theme.page, colour) for colour in (theme.ink, theme.muted)) >= 4.5
    assert (
        min(contrast(theme.page, colour) for colour in (theme.blue, theme.orange, theme.green)) >= 3
    )
