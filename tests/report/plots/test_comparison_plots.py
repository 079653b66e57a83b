"""Every plot of `compare`: the contract, all variants, and poor data."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pair_summary import ProfileRow
from mismatch_cli.report.drawing.style import NARROW, WIDE, Style
from mismatch_cli.report.figures import plots_for, plots_of, text_of
from mismatch_cli.report.plots.metric_factors import times
from mismatch_cli.studies.comparison import (
    ComparisonAnalysis,
    ComparisonPlotData,
    exceedance,
)
from mismatch_cli.studies.comparison_result import ComparedTrace, ComparisonResult
from tests.report.plots.drawing import PAPER, check_texts, drawn
from tests.studies.compared import two_of, with_summary, with_turns

PLOTS = list(plots_of(ComparisonPlotData.STUDY))
STYLES = [WIDE, NARROW]


@pytest.fixture(scope="module")
def plot_data(analysis: ComparisonAnalysis) -> ComparisonPlotData:
    """As measured, with ranges of positions as turns, which the bundled traces lack."""
    return replace(analysis.plot_data, result=with_turns(analysis.plot_data.result))


def with_factor(result: ComparisonResult, factor: Estimate) -> ComparisonResult:
    """The first two traces; the factor of each metric that has one is this."""
    row = result.comparisons[0]
    metrics = dict(row.metrics)
    for key, difference in row.metrics.items():
        if difference.factor.value is not None:
            metrics[key] = replace(difference, factor=factor)
    return replace(two_of(result), comparisons=[replace(row, metrics=metrics)])


@pytest.fixture(params=PLOTS)
def plot(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


def load(name: str) -> ModuleType:
    return plots_of(ComparisonPlotData.STUDY)[name]


def of_two(data: ComparisonPlotData) -> ComparisonPlotData:
    return ComparisonPlotData(two_of(data.result), data.subject, data.exceedance[:2])


def many(data: ComparisonPlotData) -> ComparisonPlotData:
    """Six traces, the last five of which are the same."""
    first, other, _ = data.result.traces
    row = data.result.comparisons[0]
    others = (replace(other, name=name, run=f"a-run-with-a-long-name-{name}") for name in "BCDEF")
    result = replace(
        data.result,
        traces=[first, *others],
        comparisons=[replace(row, trace=name) for name in "BCDEF"],
    )
    return ComparisonPlotData(result, data.subject, (data.exceedance[0], *[data.exceedance[1]] * 5))


def with_factors(data: ComparisonPlotData, value: float, width: float) -> ComparisonPlotData:
    """Two traces whose factors all have one value."""
    result = with_factor(data.result, Estimate(value, value / width, value * width))
    return ComparisonPlotData(result, data.subject, data.exceedance[:2])


def test_contract(plot: ModuleType) -> None:
    assert text_of(plot, "TITLE", "comparison").strip()
    assert text_of(plot, "CAPTION", "comparison").strip().endswith(".")
    nothing = ComparisonResult(arguments=(), pair="mismatch", traces=(), comparisons=())
    assert plot.needs(ComparisonPlotData(nothing)) is False


@pytest.mark.slow
@pytest.mark.parametrize("style", [*STYLES, PAPER], ids=lambda style: style.name)
def test_text_is_legible_inside_the_figure_and_apart(
    plot: ModuleType, style: Style, plot_data: ComparisonPlotData
) -> None:
    assert plot.needs(plot_data)
    check_texts(drawn(plot, plot_data, style), style)


@pytest.mark.parametrize("style", STYLES, ids=["wide", "narrow"])
@pytest.mark.parametrize("made", [of_two, many], ids=["two", "six"])
def test_draws_any_number_of_traces(
    plot: ModuleType, made: Any, style: Style, plot_data: ComparisonPlotData
) -> None:
    check_texts(drawn(plot, made(plot_data), style), style)


@pytest.mark.parametrize(
    ("value", "width"), [(1.0, 1.0), (1.1, 1.05), (3.0, 2.0), (0.02, 5e3), (90, 1e5)]
)
def test_factors_of_any_size(value: float, width: float, plot_data: ComparisonPlotData) -> None:
    for style in STYLES:
        figure = drawn(load("metric-factors"), with_factors(plot_data, value, width), style)
        low, high = figure.axes[0].get_xlim()
        assert low < min(value / width, 1) and high > max(value * width, 1)
        check_texts(figure, style)


@pytest.mark.parametrize(("value", "drawn_at_all"), [(1e-9, False), (5e6, False), (0.5, True)])
def test_a_control_needs_no_picture(
    value: float, drawn_at_all: bool, plot_data: ComparisonPlotData
) -> None:
    assert load("metric-factors").needs(with_factors(plot_data, value, 1.1)) is drawn_at_all


def test_factors_are_read_as_times() -> None:
    assert [times(10.0**power) for power in (-6, -3, 0, 2, 3, 7)] == [
        "÷10⁶",
        "÷1,000",
        "×1",
        "×100",
        "×1,000",
        "×10⁷",
    ]


def test_legends_name_the_runs(plot_data: ComparisonPlotData) -> None:
    for name in PLOTS:
        figure = drawn(load(name), of_two(plot_data), STYLES[0])
        said = [
            text.get_text()
            for axes in figure.axes
            if axes.get_legend()
            for text in axes.get_legend().get_texts()
        ]
        said += [
            text for axes in figure.axes for text in (axes.get_title(loc="left"), axes.get_xlabel())
        ]
        assert any("float32" in text for text in said) and not {"A", "B"} & set(said)


def test_traces_without_a_gap_are_drawn_or_declined(plot_data: ComparisonPlotData) -> None:
    """A trace whose policies agree to the bit, compared with one whose policies do not, and with
    itself.
    """
    result = with_factor(plot_data.result, Estimate(0.0, note="no gap: no interval"))
    first, other = result.traces
    agreeing = without_gap(other)
    result = replace(result, traces=[first, agreeing])
    nothing = np.zeros((2, 0))
    both = replace(result, traces=[replace(agreeing, run="same"), agreeing])
    for data in (
        ComparisonPlotData(result, "", (plot_data.exceedance[0], nothing)),
        ComparisonPlotData(both, "", (nothing, nothing)),
    ):
        for name in PLOTS:
            if load(name).needs(data):
                drawn(load(name), data, STYLES[0])
        assert "metric-factors" not in dict(plots_for(data))


def without_gap(trace: ComparedTrace) -> ComparedTrace:
    """The same places and bins, with gaps of 0."""
    zero, summary = Estimate(0.0), trace.summary
    of_bins = dict.fromkeys(("ratio_sd", "tv_topk_sd", "tv_binary_sd"), zero)
    volatility = [replace(row, metrics={**row.metrics, **of_bins}) for row in summary.volatility]
    places = {
        name: [replace(row, abs_d_mean=zero, length_mean=zero) for row in getattr(summary, name)]
        for name in ("positions", "from_end", "turns")
    }
    return with_summary(trace, volatility=volatility, **places)


def test_the_curve_of_gaps_is_the_share_above_each() -> None:
    """|d| of 0, 0.1, 0.1 and 2: all but one of four at 0.1, one of four at 2."""
    from mismatch_cli.metrics.volatility import D_BINS

    counts = np.zeros((11, D_BINS.count), dtype=np.int64)
    for value in np.array([0.0, 0.1, -0.1, 2.0], dtype=np.float32):
        counts[0, D_BINS.index(np.array([value]))] += 1
    edges, shares = exceedance(counts)
    assert shares[0] == 0.75 and shares[-1] == 0.25 and (np.diff(shares) <= 0).all()
    assert edges[-1] == pytest.approx(2, rel=0.04) and edges[shares == 0.75][-1] == pytest.approx(
        0.1, rel=0.04
    )


def test_a_trace_without_a_gap_leaves_the_others_their_scale(plot_data: ComparisonPlotData) -> None:
    result = two_of(plot_data.result)
    first, other = result.traces
    flat = [replace(row, abs_d_mean=Estimate(0.0)) for row in first.summary.positions]
    result = replace(result, traces=[with_summary(first, positions=flat), other])
    axes = drawn(
        load("position-profile"),
        ComparisonPlotData(result, "", plot_data.exceedance[:2]),
        STYLES[0],
    ).axes[0]
    assert axes.get_ylim()[1] < 2 * np.nanmax(axes.patches[2].get_data().values)


def test_a_bin_is_at_one_place_for_all_traces(plot_data: ComparisonPlotData) -> None:
    """One trace has masked its tokens 0 and 4 to 7, and both their turns 2 and 3."""
    nothing = Estimate(None)

    def rows(gap_of: dict[tuple[int, int], float]) -> list[ProfileRow]:
        return [
            ProfileRow(*bounds, 9, Estimate(gap), nothing, nothing, Estimate(gap))
            for bounds, gap in gap_of.items()
        ]

    first, other = two_of(plot_data.result).traces
    masked = {(1, 1): 0.2, (2, 3): 0.3, (8, 12): 0.5}
    whole = {(0, 0): 0.6, (1, 1): 0.7, (2, 3): 0.8}
    turns = {(1, 1): 0.1, (4, 4): 0.4}
    traces = [
        with_summary(first, positions=rows(whole), from_end=rows(masked), turns=rows(turns)),
        with_summary(other, positions=rows(masked), from_end=rows(masked), turns=rows(turns)),
    ]
    result = replace(two_of(plot_data.result), traces=traces)
    data = ComparisonPlotData(result, "", plot_data.exceedance[:2])

    def steps(axes: Any) -> list[list[float]]:
        return [
            np.nan_to_num(patch.get_data().values, nan=-1).tolist()
            for patch in axes.patches
            if not patch.get_fill()
        ]

    def ticks(axes: Any) -> list[str]:
        return [label.get_text() for label in axes.get_xticklabels()]

    left, right = drawn(load("position-profile"), data, STYLES[0]).axes
    assert steps(left) == [[0.6, 0.7, 0.8], [-1, 0.2, 0.3, -1, 0.5]]
    assert ticks(left) == ["0", "1", "2", "4", "8", "13"]
    # Nothing precedes the first bin that any trace has.
    assert steps(right) == [[0.2, 0.3, -1, 0.5]] * 2
    assert ticks(right) == ["1", "2", "4", "8", "13"]
    of_turns, _ = drawn(load("turn-profile"), data, STYLES[0]).axes
    assert steps(of_turns) == [[0.1, -1, 0.4]] * 2
    assert ticks(of_turns) == ["1", "2–3", "4"]
