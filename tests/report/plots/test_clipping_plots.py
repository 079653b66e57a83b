"""Every plot of `clipstats`: the contract, all variants, and poor data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.contour import ContourSet

from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.metrics.clipping.sweeps import SweepTables
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.drawing.marks import percent, reach_of
from mismatch_cli.report.drawing.panels import short_names
from mismatch_cli.report.drawing.style import NARROW, WIDE, Style
from mismatch_cli.report.figures import draw, plots_for, plots_of
from mismatch_cli.report.picture_files import page_svg
from mismatch_cli.report.plots.overlap import side_by_side
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Mask
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.policies import ENGINE_GAP, Policies
from mismatch_cli.studies.clipping import ClippingPlotData
from mismatch_cli.studies.clipping_result import SIGNS, ClippingResult
from tests.looped import looped
from tests.report.plots.drawing import PAPER, check_texts, drawn, tick_labels
from tests.rules.trust_regions.cases import keep_T
from tests.tiers import at_night

PLOTS = list(plots_of(ClippingPlotData.STUDY))
STYLES = [WIDE, NARROW]
CLIP, TV = TABLE["grpo-clip-higher"], TABLE["dppo-binary-tv"]
LONG = "my_very_long_mask_name:max_tv=0.{:02},anchor=recomputed"


@pytest.fixture(params=PLOTS)
def plot(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


@pytest.fixture(params=[*STYLES, PAPER], ids=lambda style: style.name)
def style(request: pytest.FixtureRequest) -> Style:
    return request.param


def load(name: str) -> ModuleType:
    return plots_of(ClippingPlotData.STUDY)[name]


def test_contract(plot: ModuleType) -> None:
    assert plot.TITLE.strip()
    assert plot.CAPTION.strip().endswith(".")


@pytest.mark.slow
def test_text_is_legible_inside_the_figure_and_apart(
    plot: ModuleType, style: Style, many: ClippingPlotData
) -> None:
    assert plot.needs(many)
    check_texts(drawn(plot, many, style), style)


def test_a_heat_map_names_its_rows_once_and_its_darkest_colour(many: ClippingPlotData) -> None:
    left, right = drawn(load("blocked-by-probability"), many, WIDE).axes
    assert list(tick_labels(left.yaxis)) and not list(tick_labels(right.yaxis))
    assert right.get_title(loc="right") == "darkest: 100 %"
    assert left.get_title(loc="right") == "15 block nothing"
    shares = [left.images[0].get_array(), right.images[0].get_array()]
    assert left.images[0].norm.vmax == right.images[0].norm.vmax >= np.nanmax(shares)


def test_the_name_of_a_threshold_is_not_crossed_by_the_line_of_another(
    many: ClippingPlotData,
) -> None:
    for axes in drawn(load("sweeps"), many, PAPER).axes:
        lines = max(line.get_zorder() for line in axes.lines)
        assert axes.texts and all(
            text.get_zorder() > lines and text.get_bbox_patch() for text in axes.texts
        )


def cases() -> dict[str, tuple[list[Algorithm], bool]]:
    hostile = [
        replace(TABLE["ppo-icepop"], name="a$b<c>_$x^{2}$"),
        replace(TV, name="漢字\x1b[31m\\frac{1}{2}"),
    ]
    alike = [
        replace(
            TV,
            name=LONG.format(i),
            masks=(Mask("binary-tv", chosen=(("tv_low", i / 100), ("tv_high", i / 100))),),
        )
        for i in range(2, 14)
    ]
    return {
        "one": ([TV], True),
        "two": ([CLIP, TV], True),
        "no advantages": ([CLIP, TABLE["dppo-binary-kl-recompute"], TABLE["gspo"]], False),
        "nothing is blocked": ([TABLE["pg-is"], TABLE["pg-tis"]], True),
        "hostile names": (hostile, True),
        "thirty": ([*alike, *(row for row in TABLE.values() if not row.needs_top_k)], True),
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("style", [*at_night(STYLES[0]), STYLES[1]], ids=["wide", "narrow"])
def test_draws_any_number_of_algorithms(
    name: str, style: Style, tokens: Any, data_of: Callable[..., ClippingPlotData]
) -> None:
    algorithms, advantages = cases()[name]
    data = data_of(tokens, algorithms, advantages=advantages)
    names = [plot_name for plot_name, _ in plots_for(data)]
    assert ("overlap" in names) == (name not in ("one", "nothing is blocked"))
    assert (
        ("blocked-by-probability" in names)
        == ("blocked-over-steps" in names)
        == (name != "nothing is blocked")
    )
    assert {"mask-regions", "sweeps", "bad-updates"} <= set(names)
    for _, plot in plots_for(data):
        check_texts(drawn(plot, data, style), style)


def without(result: ClippingResult, keep: Callable[[], bool]) -> ClippingResult:
    """The result without some values, as from a trace that does not support them."""
    return from_json(ClippingResult, _without(to_json(result), keep))


def _without(content: Any, keep: Callable[[], bool]) -> Any:
    if isinstance(content, list):
        return [_without(item, keep) for item in content]
    if not isinstance(content, dict):
        return content
    if set(content) == {"value", "low", "high", "note"}:
        return content if keep() else dict.fromkeys(content)
    return {key: _without(value, keep) for key, value in content.items()}


def test_declines_where_nothing_was_measured(plot: ModuleType, many: ClippingPlotData) -> None:
    none = replace(many, result=without(many.result, lambda: False), compared=())
    assert plot.needs(none) is False


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_estimates_without_value_leave_gaps(
    plot: ModuleType, share: float, many: ClippingPlotData, rng: np.random.Generator
) -> None:
    data = replace(many, result=without(many.result, lambda: rng.random() < share))
    if plot.needs(data):
        drawn(plot, data, STYLES[1])


def test_a_single_step_has_no_curve(tokens: Any, data_of: Callable[..., ClippingPlotData]) -> None:
    data = data_of(replace(tokens, step_T=np.zeros_like(tokens.step_T)), [CLIP, TV])
    assert not load("blocked-over-steps").needs(data)
    assert len(drawn(load("bad-updates"), data, STYLES[0]).axes) == 1


def test_a_single_threshold_makes_no_line(many: ClippingPlotData) -> None:
    plot, tables = load("sweeps"), many.result.sweeps
    first, *others = tables.cap
    cap = [first, *(replace(row, share=Estimate(0.0)) for row in others)]

    def with_sweeps(changed: SweepTables) -> ClippingPlotData:
        return replace(many, result=replace(many.result, sweeps=changed))

    data = with_sweeps(replace(tables, cap=cap))
    assert [len(draw(plot, shown, STYLES[0]).axes) for shown in (many, data)] == [4, 3]
    assert not plot.needs(with_sweeps(SweepTables(cap=cap)))


def test_bad_updates_by_threshold_and_by_step_share_their_axis(many: ClippingPlotData) -> None:
    sweep, share, reward = drawn(load("bad-updates"), many, STYLES[0]).axes
    assert reward.get_title(loc="left") == "Mean reward"
    assert share.get_ylim() == sweep.get_ylim() != reward.get_ylim()
    assert reward.get_xlim() == share.get_xlim()


def test_a_step_without_a_blocked_token_is_at_0(many: ClippingPlotData) -> None:
    axes = drawn(load("blocked-over-steps"), many, STYLES[0]).axes[0]
    shares = np.stack([line.get_ydata() for line in axes.lines])
    assert (shares == 0).any() and axes.get_ylim()[0] == 0
    ticks = [tick for tick in axes.get_yticks() if tick <= axes.get_ylim()[1]]
    assert ticks[0] == 0 and ticks[-1] >= 100 * ticks[1]


GRIPS = (  # algorithm, sign of A, μ, π, blocked
    (CLIP, 1, 0.01, 0.02, True),
    (CLIP, 1, 0.01, 0.0115, False),
    (CLIP, 1, 0.001, 0.0005, False),
    (CLIP, 1, 0.9, 0.99, False),
    (CLIP, -1, 0.01, 0.005, True),
    (CLIP, -1, 0.99, 0.85, False),
    (CLIP, -1, 0.99, 0.7, True),
    (TV, 1, 0.01, 0.02, False),
    (TV, 1, 0.01, 0.2, True),
    (TV, -1, 0.1, 0.001, False),
    (TV, -1, 0.9, 0.7, True),
    (TV, -1, 0.9, 0.8, False),
)


def test_the_shaded_region_is_where_the_mask_blocks(many: ClippingPlotData) -> None:
    figure = drawn(load("mask-regions"), many, STYLES[0])
    panels = {" ".join(axes.get_title(loc="left").split()[:4]): axes for axes in figure.axes}
    for algorithm, sign, mu, pi, blocked in GRIPS:
        logp = np.log(np.array([mu, pi], dtype=np.float64))
        policies = Policies(logp[:1], logp[1:], logp[:1], np.array([0, 1]))
        assert keep_T(algorithm, policies, np.array([float(sign)])).item() is not blocked
        axes = panels[f"A {'>' if sign > 0 else '<'} 0: {algorithm.name}"]
        (shade,) = [each for each in axes.collections if isinstance(each, ContourSet)]
        (region,) = shade.get_paths()
        is_shaded = region.transformed(axes.transData).contains_point(
            axes.transData.transform((mu, pi))
        )
        assert is_shaded is blocked, (algorithm.name, mu, pi)


def on_grid(algorithm: Algorithm, sign: str = "positive") -> np.ndarray | None:
    mu, pi = (
        p.ravel() for p in np.meshgrid(np.linspace(0.01, 0.99, 40), np.linspace(0.01, 0.99, 40))
    )
    return ClippingPlotData.blocked_at(algorithm, np.log(mu), np.log(pi), sign)


@looped("name", TABLE)
def test_which_algorithms_have_a_region(name: str) -> None:
    """Not those that need more of the distribution or whole responses, nor those without a mask."""
    algorithm = TABLE[name]
    without_region = {
        row.name for row in TABLE.values() if not row.limiting.masks or row.batch_rules
    }
    without_region |= {"gspo", "gspo-rollout", "ppo-opsm", "cppo", "trm-max", "trm-avg"}
    for sign in SIGNS:
        region = on_grid(algorithm, sign)
        expected_none = name in without_region or algorithm.needs_top_k
        if name == "ppo-opsm" and sign == "positive":
            continue  # it looks at whole responses only where A < 0
        assert (region is None) == bool(expected_none)
    recomputed = algorithm.anchor in ("recomputed", "both")
    assert (algorithm.limiting.anchor == "recomputed") == recomputed


def test_a_mask_on_the_engine_gap_adds_no_region() -> None:
    assert np.array_equal(on_grid(TABLE["ppo-icepop"]), on_grid(TABLE["ppo"]))
    assert on_grid(replace(TABLE["ppo-icepop"], masks=(Mask("icepop", ENGINE_GAP),))) is None


def test_a_mask_of_the_users_own(tmp_path: Path) -> None:
    start = "from mismatch_cli import Decision\n"
    bodies = {
        "near": "def trust_region(compared, advantage_T):\n"
        "    return Decision(compared.logp_anchor_T < -1, compared.ratio_T)",
        "topk": (
            "READS_TOP_K = True\n"
            "def trust_region(compared, advantage_T, *, k=1):\n"
            "    return Decision(compared.topk(k)[0] < 0.1, compared.ratio_T)"
        ),
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(start + body)
    near = on_grid(parse_algorithm(str(tmp_path / "near.py")))
    assert near is not None and 0 < near.mean() < 1
    assert on_grid(parse_algorithm(str(tmp_path / "topk.py"))) is None


def test_without_advantages_both_signs_are_judged(
    tokens: Any, data_of: Callable[..., ClippingPlotData]
) -> None:
    data = data_of(tokens, [TABLE["dppo-binary-tv-recompute"], CLIP], advantages=False)
    titles = [
        axes.get_title(loc="left") for axes in drawn(load("mask-regions"), data, STYLES[0]).axes
    ]
    assert titles[0].startswith("if A > 0") and titles[-1].startswith("if A < 0")


def test_lines_that_would_coincide_are_left_out(many: ClippingPlotData) -> None:
    masks = many.result.distinct_masks(many.result.blocking, 6)
    names = [mask.row.name for mask in masks]
    assert names[:2] == [algorithm.name for algorithm in many.compared]
    assert len(names) == 6
    assert not {name for mask in masks for name in mask.others} & set(names)
    assert "minirl-tis" not in names  # the same mask as minirl


def test_similar_algorithms_are_neighbours() -> None:
    kind = np.array([0, 1, 0, 1, 0])
    order = kind[side_by_side(np.where(kind[:, None] == kind, 0.9, 0.1))]
    assert order.tolist() in ([0, 0, 0, 1, 1], [1, 1, 0, 0, 0])


def test_short_names_fit_and_stay_apart() -> None:
    names = [LONG.format(i) for i in range(2, 12)]
    short = short_names([*names, "ppo", "$x$"], 21)
    assert len(set(short)) == len(short)
    assert max(map(len, short[:-1])) <= 21
    assert [
        f"max_tv=0.{i:02}"[-6:] in text for i, text in zip(range(2, 12), short, strict=False)
    ] == [True] * 10
    assert short[-2:] == ["ppo", r"\$x\$"]


def test_percentages_have_four_characters() -> None:
    shares = (0, 1e-9, 0.0001, 0.00094, 0.00996, 0.0994, 0.0996, 0.5, 1.0)
    assert [percent(share) for share in shares] == [
        "0",
        "<.01",
        "0.01",
        "0.09",
        "1.0",
        "9.9",
        "10",
        "50",
        "100",
    ]
    assert [reach_of(np.array([share, np.nan])) for share in (0.0, 0.0101, 0.3, 1.0)] == [
        1e-4,
        0.02,
        0.5,
        1.0,
    ]


def test_pictures_stay_small(tokens: Any, data_of: Callable[..., ClippingPlotData]) -> None:
    data = data_of(tokens, [CLIP, TV])
    drawn_plots = dict(plots_for(data))
    assert sorted(drawn_plots) == sorted(PLOTS)
    pictures = [
        page_svg(draw(plot, data, style)) for plot in drawn_plots.values() for style in STYLES
    ]
    assert sum(map(len, pictures)) < 1.5e6
