"""Every plot of `train`: the contract, all variants, and runs with few records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from mismatch_cli.report.drawing.marks import looks
from mismatch_cli.report.drawing.style import DARK, LIGHT, NARROW, WIDE, Style
from mismatch_cli.report.figures import figure_views, plots_for, plots_of
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.report.plots.drawing import PAPER, check_texts, contrast, drawn, tick_labels
from tests.train.training_runs import (
    EIGHT,
    NEVER_BLOCK,
    evaluated,
    limit,
    make_run,
    of_paper,
    watched,
    with_bounds,
)

PLOTS = list(plots_of(TrainingAnalysis.STUDY))
STYLES = [WIDE, NARROW]
HOSTILE = (
    "a$b<c>_$x^{2}$",
    "漢字\x1b[31m\\frac{1}{2}",
    "my_very_long_mask_name:" + "max_tv=0.123456," * 9,
    "_raw",
    "",
)


@pytest.fixture(params=PLOTS)
def plot(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


def load(name: str) -> ModuleType:
    return plots_of(TrainingAnalysis.STUDY)[name]


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()] if figure.legends else []


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_contract(plot: ModuleType) -> None:
    assert plot.TITLE.strip()
    assert plot.CAPTION.strip().endswith(".")
    assert plot.needs(TrainingAnalysis([])) is False
    assert plot.needs(TrainingAnalysis.of([TrainingRun("x", "x", None, [{"step": 1}])])) is False


@pytest.mark.slow
@pytest.mark.parametrize("style", [*STYLES, PAPER], ids=lambda style: style.name)
def test_text_is_legible_inside_the_figure_and_apart(
    plot: ModuleType, style: Style, eight: list[TrainingRun]
) -> None:
    cases = (eight, in_settings(), by_threshold(), relaxed(), bounded(eight), stale())
    limited = watched(limit("tv_binary_mean", "max", 0.01), alarms=((3, 5),))
    studies = chain(map(TrainingAnalysis.of, cases), [limited])
    check_texts(drawn(plot, next(study for study in studies if plot.needs(study)), style), style)


SETS = ("AIME24", "AIME25")
MODELS = (
    "Qwen/Qwen3-30B-A3B-Base",
    "/models/Qwen3-8B-Base",
    "Llama-3.2-3B",
    "a_very_long$name^" * 6,
    "e",
    "f",
    "g",
)


def in_settings(count: int = 2, steps: int = 30, sets: Sequence[str] = SETS) -> list[TrainingRun]:
    """Two algorithms with each of `count` models, evaluated on `sets`."""
    return [
        evaluated(make_run(name, steps=steps, model=model), sets)
        for model in MODELS[:count]
        for name in ("dppo-binary-tv", "pg-tis")
    ]


def by_threshold(seeds: int = 2, steps: int = 20) -> list[TrainingRun]:
    """One algorithm with three thresholds, another with two, and a third."""
    names = (
        "dppo-binary-tv:max_tv=0.2",
        "dppo-binary-tv:delta=0.1",
        "dppo-binary-tv",
        "pg-tis:C=100",
        "pg-tis",
    )
    return [
        make_run(name, seed, steps)
        for name in (*names, "grpo-clip-higher")
        for seed in range(seeds)
    ]


def relaxed() -> list[TrainingRun]:
    """The clip, and its relaxation with two α."""
    names = ("relax-both:alpha=0.3", "grpo-clip-higher", "relax-both")
    return [make_run(name, steps=20) for name in names]


def stale() -> list[TrainingRun]:
    """Two algorithms with weights of three ages that sample."""
    return [
        make_run(name, seed, staleness=staleness)
        for name in ("dppo-binary-tv", "pg-is")
        for seed in (0, 1)
        for staleness in (0, 4, 16)
    ]


def bounded(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    return [with_bounds(run) for run in runs]


def scaled(run: TrainingRun, factor: float) -> TrainingRun:
    def times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: times(part) for key, part in value.items()}
        return factor * value if isinstance(value, float) else value

    return replace(run, records=[times(record) for record in run.records])


CASES: dict[str, Callable[[], list[TrainingRun]]] = {
    "one step": lambda: [make_run(steps=1)],
    "two seeds": lambda: [make_run(seed=0), make_run(seed=1, steps=3)],
    "long": lambda: [
        make_run(name, steps=steps) for name, steps in (("relax-high", 450), ("relax-low", 20))
    ],
    "hostile names": lambda: [make_run(name, steps=5) for name in HOSTILE],
    "tiny": lambda: [scaled(make_run(steps=30), 1e-7)],
    "huge": lambda: [scaled(make_run(steps=30), 3e6)],
    "constant": lambda: [
        replace(make_run(), records=[{**make_run(steps=1).records[0], "step": i} for i in range(9)])
    ],
    "nothing": lambda: [scaled(make_run(steps=30), 0.0)],
    "settings of one step": lambda: in_settings(2, steps=1),
    "many settings": lambda: in_settings(7, steps=4, sets=()),
    "relaxed": relaxed,
    "bounds": lambda: bounded([make_run(steps=1), make_run("pg-is", steps=300)]),
    "of the paper": lambda: [of_paper(name) for name in ("pg-is", "dppo-binary-tv")],
    "thresholds, one seed": lambda: by_threshold(1, steps=1),
    "twelve algorithms": lambda: [
        make_run(f"mask-0.5:max_drop={n / 20}", steps=5) for n in range(1, 13)
    ],
    "hardly changes": lambda: [
        TrainingRun("x", "x", 0, [{"reward": 0.9123456 + 1e-8 * i} for i in range(9)])
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("style", STYLES, ids=["wide", "narrow"])
def test_draws_any_runs(name: str, style: Style) -> None:
    data = TrainingAnalysis.of(CASES[name]())
    names = [plot_name for plot_name, _ in plots_for(data)]
    assert {"training-curves", "by-setting"} & set(names)
    for _, plot in plots_for(data):
        check_texts(drawn(plot, data, style), style)


@pytest.mark.parametrize("share", [0.03, 0.5])
def test_missing_measurements_leave_gaps(
    plot: ModuleType, share: float, eight: list[TrainingRun]
) -> None:
    rng = np.random.default_rng(3)

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: without(part)
                for key, part in value.items()
                if rng.random() < share or key == "seconds"
            }
        return value if rng.random() < share else rng.choice([None, float("nan")])

    runs = [replace(run, records=[without(record) for record in run.records]) for run in eight]
    if plot.needs(data := TrainingAnalysis.of(runs)):
        drawn(plot, data, STYLES[1])


def test_evaluations_are_marks_in_the_panel_of_the_reward() -> None:
    run = make_run(steps=45)
    blind = replace(run, records=[{**record, "eval_accuracy": None} for record in run.records])
    figures = [
        drawn(load("training-curves"), TrainingAnalysis.of([one]), STYLES[0])
        for one in (run, blind)
    ]
    marks = [len(figure.axes[0].containers) for figure in figures]
    notes = [figure.axes[0].get_title(loc="right") for figure in figures]
    assert marks == [1, 0] and notes == ["◆ evaluation", ""]
    assert figures[0].axes[0].containers[0][0].get_xdata().tolist() == [20, 40, 45]


def test_the_line_is_the_mean_of_the_seeds_and_the_band_their_range() -> None:
    runs = [make_run(seed=seed, steps=19) for seed in range(3)]
    figure = drawn(load("training-curves"), TrainingAnalysis.of(runs), STYLES[0])
    rewards = np.array([run.series("reward") for run in runs])
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), rewards.mean(axis=0))
    (band,) = [each for each in figure.axes[0].collections if not isinstance(each, LineCollection)]
    y_N = band.get_paths()[0].vertices[:, 1]
    assert (y_N.min(), y_N.max()) == (rewards.min(), rewards.max())


def test_blocked_tokens_have_a_panel_unless_there_are_none(eight: list[TrainingRun]) -> None:
    title = "Blocked, % of A ≠ 0"
    unblocked = [run for run in eight if run.algorithm in NEVER_BLOCK]
    some = drawn(load("training-curves"), TrainingAnalysis.of(eight), STYLES[0])
    none = drawn(load("training-curves"), TrainingAnalysis.of(unblocked), STYLES[0])
    assert len(titles(some)) == 6 and title in titles(some)
    assert [each for each in titles(some) if each not in titles(none)] == [title]


def test_0_is_marked_between_the_largest_and_the_smallest_difference() -> None:
    figure = drawn(load("training-curves"), TrainingAnalysis.of([make_run(steps=20)]), STYLES[0])
    highest, lowest, zero = (line.get_ydata() for line in figure.axes[3].lines)
    assert min(highest) > 0 > max(lowest) and list(zero) == [0, 0]


def test_long_curves_are_smoothed_with_the_raw_one_behind() -> None:
    figure = drawn(load("training-curves"), TrainingAnalysis.of([make_run(steps=450)]), STYLES[0])
    raw, smooth, _marks = figure.axes[0].lines
    assert raw.get_alpha() < 0.3
    spread = [np.abs(np.diff(line.get_ydata())).mean() for line in (raw, smooth)]
    assert spread[1] < 0.3 * spread[0]


def test_twins_share_a_colour_and_entropy_that_collapses_has_a_logarithmic_axis() -> None:
    names = (
        "dppo-binary-tv",
        "dppo-binary-tv-recompute",
        "mask-0.5:max_drop=0",
        "mask-0.5-recompute:max_drop=0",
    )
    runs = [make_run(name, steps=8) for name in (*names, "pg-is")]
    plot = load("training-curves")
    figure = drawn(plot, TrainingAnalysis.of(runs), STYLES[0])
    # shortened
    assert texts(figure)[:3] == list(names[:3]) and texts(figure)[3].startswith("mask-0.5-rec")
    lines = figure.axes[1].lines
    assert (
        lines[0].get_color() == lines[1].get_color() != lines[2].get_color() == lines[3].get_color()
    )
    assert len({lines[1].get_linestyle(), lines[3].get_linestyle()}) == 1
    # The last one is at 0
    assert [line.is_dashed() for line in lines] == [False, True, False, True, False, True]
    collapsed = replace(runs[4], records=[{"step": i, "entropy": 10.0**-i} for i in range(5)])
    scales = [
        drawn(plot, TrainingAnalysis.of([run]), STYLES[0]).axes[-1].get_yscale()
        for run in (runs[4], collapsed)
    ]
    assert scales == ["linear", "log"]


def test_reward_and_bad_updates_share_a_panel_with_two_axes() -> None:
    runs = [make_run(name, steps=12) for name in ("pg-is", "mask-0.5")]
    figure = drawn(load("reward-and-bad-updates"), TrainingAnalysis.of(runs), STYLES[0])
    left, right = figure.axes[:2], figure.axes[2:]
    assert titles(figure)[:2] == ["pg-is", "mask-0.5"]
    for run, axes, second in zip(runs, left, right, strict=True):
        lines = [axes.lines[0], *second.lines]
        drawn_values = [line.get_ydata().tolist() for line in lines]
        keys = ("reward", "bad_over_negative", "bad_over_tokens")
        assert drawn_values == [run.series(key).tolist() for key in keys]
        assert [line.is_dashed() for line in lines] == [False, True, True]
        assert len({str(line._dash_pattern) for line in lines}) == 3
        assert len({line.get_color() for line in lines}) == 1
    assert len({axes.get_ylim() for axes in left}) == len({axes.get_ylim() for axes in right}) == 1
    assert right[0].get_ylim()[0] == 0
    assert texts(figure) == [
        "mean reward (left)",
        "bad updates, % of A < 0 (right)",
        "bad updates, % of all tokens (right)",
    ]


def test_training_curves_stay_first_on_the_page() -> None:
    study = TrainingAnalysis.of([with_bounds(make_run(steps=4))])
    assert [name for name, _ in plots_for(study)] == [
        "training-curves",
        "reward-and-bad-updates",
        "blocked-tokens",
        "bound-quality",
        "time",
    ]


def test_labels_of_the_second_axis_are_right_of_the_panel() -> None:
    figure = drawn(load("reward-and-bad-updates"), TrainingAnalysis.of([make_run()]), PAPER)
    panel, second = figure.axes
    boxes = [label.get_window_extent() for label in tick_labels(second.yaxis)]
    assert boxes and all(panel.bbox.x1 < box.x0 < box.x1 < figure.bbox.width for box in boxes)
    assert second.yaxis.label.get_window_extent().x0 > max(box.x1 for box in boxes)


def test_without_a_bad_update_there_is_no_figure_of_them() -> None:
    run = make_run()
    good = replace(run, records=[record | {"bad_over_negative": 0.0} for record in run.records])
    some, none = (TrainingAnalysis.of([each]) for each in (run, good))
    assert load("reward-and-bad-updates").needs(some)
    assert not load("reward-and-bad-updates").needs(none)
    unseen = replace(good, records=[{"step": 1, "blocked": 0.0, "blocked_positive": 0.0}])
    assert not load("blocked-tokens").needs(TrainingAnalysis.of([unseen]))


def test_relaxations_are_lines_by_alpha() -> None:
    figure = drawn(load("relaxations"), TrainingAnalysis.of(relaxed()), STYLES[0])
    assert texts(figure) == ["α = 0 (grpo-clip-higher)", "α = 0.1", "α = 0.3"]
    assert titles(figure)[1:] == ["Mean μ of clipped tokens", "Entropy of clipped tokens, nats"]
    runs = {run.algorithm: run for run in relaxed()}
    rewards = [line.get_ydata().tolist() for line in figure.axes[0].lines]
    names = ("grpo-clip-higher", "relax-both", "relax-both:alpha=0.3")
    assert rewards == [runs[name].series("reward").tolist() for name in names]
    assert not load("relaxations").needs(TrainingAnalysis.of([make_run("relax-both")]))


def test_bounds_are_shares_of_the_full_tv() -> None:
    runs = [with_bounds(make_run(steps=5), 0.5, 0.75), make_run("pg-is", steps=5)]
    figure = drawn(load("bound-quality"), TrainingAnalysis.of(runs), STYLES[0])
    assert titles(figure) == ["dppo-binary-tv"] and texts(figure) == ["binary TV", "top-K TV"]
    exact, *bounds = figure.axes[0].lines
    assert list(exact.get_ydata()) == [1, 1]
    np.testing.assert_allclose([line.get_ydata() for line in bounds], [[0.5] * 5, [0.75] * 5])
    assert figure.axes[0].get_title(loc="right") == "400 tokens a step"


def greys(axes: Any) -> list[str]:
    """The words on values of the paper, one for each grey band."""
    words = [text.get_text() for text in axes.texts if text.get_text().startswith("paper")]
    assert len(axes.patches) >= len(words)
    return words


def test_values_of_the_paper_are_grey_where_a_run_repeats_it() -> None:
    repeated = TrainingAnalysis.of([of_paper("dppo-binary-tv")])
    figure = drawn(load("training-curves"), repeated, STYLES[0])
    reward, mismatch = figure.axes[0], figure.axes[titles(figure).index("Mean |π − μ|")]
    start = "paper, start: 0.565"
    assert greys(reward) == [start, "paper, end: 0.985", "paper, AIME24 start: 0.195"]
    assert greys(mismatch) == ["paper, start: 0.00420", "paper, end: 0.00300"]
    assert reward.get_ylim()[0] < 0.195 and mismatch.get_ylim()[1] > 0.0042
    panels = drawn(load("reward-and-bad-updates"), repeated, STYLES[0]).axes
    assert greys(panels[0]) == [start, "paper, end: 0.985"]
    for other in (make_run(), of_paper("dppo-binary-tv", dataset="other/problems")):
        axes = drawn(load("training-curves"), TrainingAnalysis.of([other]), STYLES[0]).axes[0]
        assert greys(axes) == [] and not axes.patches


def test_algorithms_that_never_block_have_no_line(eight: list[TrainingRun]) -> None:
    figure = drawn(load("blocked-tokens"), TrainingAnalysis.of(eight), STYLES[0])
    count = dict(zip(titles(figure), (len(axes.lines) for axes in figure.axes), strict=True))
    assert count["Mean μ of blocked tokens"] == count["Entropy of blocked tokens, nats"] == 6


def test_bars_add_up_to_the_step() -> None:
    runs = [make_run(steps=4), make_run("mask-0.5-recompute", steps=4)]
    runs[0].records[0]["seconds"]["brewing"] = 1.0
    figure = drawn(load("time"), TrainingAnalysis.of(runs), STYLES[0])
    widths = [
        sum(bar.get_width() for bar in bars)
        for bars in zip(*figure.axes[0].containers, strict=True)
    ]
    totals = [sum(sum(record["seconds"].values()) for record in run.records) / 4 for run in runs]
    np.testing.assert_allclose(widths, totals)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["sample", "grade", "recompute", "update", "sync", "other"]


def test_eighteen_algorithms_look_different() -> None:
    assert len(set(map(str, looks(map(str, range(18)), WIDE).values()))) == 18


def test_colours_stand_out_from_the_page() -> None:
    assert [look.colour for look in looks(map(str, range(6)), WIDE).values()] == list(LIGHT.accents)
    for theme in (LIGHT, DARK):
        assert min(contrast(colour, theme.page) for colour in theme.accents) >= 3


def test_a_long_comparison_stays_small_and_quick() -> None:
    runs = [make_run(name, steps=1500) for name in ("pg-is", "pg-tis", "relax-low", "relax-both")]
    began = time.process_time()
    views = figure_views(TrainingAnalysis.of(runs))
    assert time.process_time() - began < 20  # 3 s when measured
    assert sum(len(view.wide.uri) + len(view.narrow.uri) for view in views) < 4e6


def test_each_evaluation_set_has_a_panel_and_a_single_one_its_name() -> None:
    run = make_run(steps=40)
    six = [
        "Mean reward",
        "Accuracy, AIME24",
        "Accuracy, AIME25",
        "Response length, tokens",
        "Mean entropy, nats",
    ]
    figure = drawn(load("training-curves"), TrainingAnalysis.of([evaluated(run, SETS)]), STYLES[0])
    assert titles(figure)[:6] == [*six, "Mean |π − μ|"]
    assert figure.axes[1].lines[0].get_xdata().tolist() == [1, 10, 20, 30, 40]
    np.testing.assert_allclose(
        figure.axes[1].lines[0].get_ydata(), evaluated(run, SETS).measured("eval", "AIME24")
    )
    assert not figure.axes[0].containers
    named = [
        evaluated(run, SETS[:1]),
        replace(run, config={**run.config, "eval_dataset": "/data/aime24.jsonl"}),
        run,
    ]
    figures = [
        drawn(load("training-curves"), TrainingAnalysis.of([one]), STYLES[0]) for one in named
    ]
    notes = [figure.axes[0].get_title(loc="right") for figure in figures]
    assert notes == ["◆ AIME24", "◆ aime24.jsonl", "◆ evaluation"]


def test_no_mismatch_is_a_line_at_0_inside_the_panel() -> None:
    figure = drawn(load("training-curves"), TrainingAnalysis.of([make_run(steps=20)]), STYLES[0])
    axes = figure.axes[titles(figure).index("Mean |π − μ|")]
    assert (
        list(axes.lines[-1].get_ydata()) == [0, 0]
        and axes.lines[-1].is_dashed()
        and axes.get_ylim()[0] < 0
    )
    single = drawn(
        load("training-curves"), TrainingAnalysis.of([make_run(steps=1)]), STYLES[0]
    ).axes
    for axes in single:  # a mark on the edge would be cut in half
        low, high = axes.get_ylim()
        assert max(axes.drawn_values()) < high - 0.03 * (high - low)


def test_the_mass_of_the_top_k_has_a_panel_if_recorded() -> None:
    run = make_run(steps=4)
    records = [
        {**record, "current": {"topk_mass_rollout": 0.99 + 0.002 * record["step"]}}
        for record in run.records
    ]
    figure = drawn(
        load("training-curves"), TrainingAnalysis.of([replace(run, records=records)]), STYLES[0]
    )
    assert titles(figure)[-1] == "Mass of the top K by μ, %"
    np.testing.assert_allclose(figure.axes[-1].lines[0].get_ydata(), [0.992, 0.994, 0.996, 0.998])


def test_relaxations_are_dashed_and_what_they_relax_is_not() -> None:
    names = (
        "relax-both:alpha=0.1",
        "grpo-clip-higher",
        "relax-low:alpha=0.1",
        "relax-high:alpha=0.1",
        "pg-is",
    )
    figure = drawn(
        load("training-curves"),
        TrainingAnalysis.of([make_run(n, steps=4) for n in names]),
        STYLES[0],
    )
    lines = figure.axes[0].lines[:5]
    assert [line.is_dashed() for line in lines] == [True, False, True, True, False]
    assert len({line.get_color() for line in lines}) == 5


def test_settings_are_side_by_side_with_one_colour_per_algorithm() -> None:
    assert not load("by-setting").needs(TrainingAnalysis.of(in_settings(1)))
    figure = drawn(load("by-setting"), TrainingAnalysis.of(in_settings()), STYLES[0])
    assert titles(figure)[:6] == [
        title for title in ("Mean reward", "Accuracy, AIME24", "Accuracy, AIME25") for _ in "ab"
    ]
    words = [axes.texts[0].get_text() for axes in figure.axes]
    assert words == ["Qwen3-30B-A3B-Base", "Qwen3-8B-Base"] * 6
    assert texts(figure) == ["dppo-binary-tv", "pg-tis"]
    left, right = figure.axes[:2]
    assert [line.get_color() for line in left.lines] == [line.get_color() for line in right.lines]
    assert left.get_ylim() == right.get_ylim() and left.get_position().y0 == right.get_position().y0


def test_a_setting_that_would_be_flat_has_an_axis_of_its_own() -> None:
    runs = in_settings(2, sets=())
    low = [scaled(run, 0.01) if run.config["model"] == MODELS[1] else run for run in runs]
    left, right, *_ = drawn(load("by-setting"), TrainingAnalysis.of(low), STYLES[0]).axes
    assert left.get_ylim()[1] > 10 * right.get_ylim()[1]


def test_a_missing_measurement_leaves_its_place_empty() -> None:
    runs = [
        evaluated(make_run(model=m, steps=5), s)
        for m, s in zip(MODELS[:2], (SETS, SETS[:1]), strict=True)
    ]
    figure = drawn(load("by-setting"), TrainingAnalysis.of(runs), STYLES[0])
    rows = {title: titles(figure).count(title) for title in titles(figure)}
    assert rows["Accuracy, AIME24"] == 2 and rows["Accuracy, AIME25"] == 1
    place = {axes.get_title(loc="left"): axes.get_position() for axes in figure.axes}
    assert (
        place["Accuracy, AIME25"].x0 < 0.5
        and place["Mean |π − μ|"].y1 < place["Accuracy, AIME25"].y0
    )


def test_in_one_panel_colours_are_algorithms_and_dashes_are_settings() -> None:
    figure = drawn(load("training-curves"), TrainingAnalysis.of(in_settings(3)), STYLES[0])
    lines = figure.axes[0].lines
    assert (
        len({line.get_color() for line in lines}) == 2
        and len({str(line._dash_pattern) for line in lines}) == 3
    )
    assert not load("training-curves").needs(TrainingAnalysis.of(in_settings(4)))


def test_final_numbers_by_threshold_and_of_other_algorithms() -> None:
    study = TrainingAnalysis.of(by_threshold())
    figure = drawn(load("sensitivity"), study, STYLES[0])
    assert titles(figure) == [
        *("Final reward by δ", "Final accuracy by δ", "Mean reward by δ"),
        *("Final reward by C", "Final accuracy by C", "Mean reward by C"),
    ]
    axes = figure.axes[0]
    thresholds, other = axes.lines[0], axes.lines[-1]
    names = ("dppo-binary-tv:delta=0.1", "dppo-binary-tv", "dppo-binary-tv:max_tv=0.2")
    assert thresholds.get_xdata().tolist() == [0.1, 0.15, 0.2]
    assert thresholds.get_ydata().tolist() == [study.final_rewards[name].value for name in names]
    assert (
        other.get_ydata()[0] == study.final_rewards["grpo-clip-higher"].value and other.is_dashed()
    )
    opacity = [line.get_alpha() for line in figure.axes[2].lines]
    assert opacity == sorted(opacity) and opacity[-1] == 1
    assert figure.axes[3].get_xscale() == "log"  # from 3 to 100
    assert not load("sensitivity").needs(TrainingAnalysis.of([make_run(name) for name in EIGHT]))


def test_blocked_shares_by_staleness_where_runs_differ_in_it() -> None:
    runs = stale()
    study, plot = TrainingAnalysis.of(runs), load("blocked-by-staleness")
    figure = drawn(plot, study, STYLES[0])
    assert titles(figure) == ["Blocked, % of A ≠ 0", "Blocked, % of A > 0", "Blocked, % of A < 0"]
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [0, 4, 16]
    means = [dose.blocked.value for dose in study.by_staleness[0].doses]
    assert line.get_ydata().tolist() == means
    assert texts(figure) == ["dppo-binary-tv", "pg-is"]
    assert not plot.needs(TrainingAnalysis.of(runs[::3]))
