"""Bad updates, which push down what has already fallen far: by step beside the reward, and by their threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import any_above_0, draw_line, drawn_values, middle_of_steps, positive, values_of
from mismatch_cli.report.plots._panels import (
    BOTTOM,
    LEFT,
    LEGEND,
    RIGHT,
    TOP,
    Box,
    in_percent,
    legend_above,
    place_boxes,
    power_label,
    title,
    whole_steps,
)
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "Bad updates"
TITLE = "Bad updates"
CAPTION = (
    "A bad update pushes down a token of a negative sample that has already lost much probability: A < 0 and "
    "μ − π ≥ δ. By step, their share of the tokens with A < 0 at δ = 0.5, and the mean reward of the step; and the "
    "share for every other δ. Bands are 95 % intervals over prompts."
)

_FEWEST_STEPS = 3


def needs(data: ClippingPlotData) -> bool:
    return any_above_0([row[key] for row in _bad(data).get("sweep", ()) for key in ("over_tokens", "over_negative")])


def draw(figure: Figure, data: ClippingPlotData, style: Style) -> None:
    steps = _bad(data).get("by_step") or ()
    by_step = [("over_negative", f"Bad updates at δ = {_bad(data)['delta']:g}, % of {_negative(data)}")]
    if np.isfinite(values_of(row["reward"] for row in steps)).any():
        by_step.append(("reward", "Mean reward"))
    if len(steps) < _FEWEST_STEPS:
        by_step = []
    axes = place_boxes(figure, style, _boxes(len(by_step), style))
    for panel, (key, name) in zip(axes, by_step, strict=False):
        _draw_steps(panel, steps, key, style)
        title(panel, name if style.wide else name.replace("tokens with ", ""), style)
    for panel in axes[: len(by_step) - 1]:
        panel.set_xlim(axes[1].get_xlim())
        panel.set_xlabel("")
    _draw_sweep(axes[-1], data, style)


def _bad(data: ClippingPlotData) -> Mapping[str, Any]:
    return data.result.get("bad_updates") or {}


def _negative(data: ClippingPlotData) -> str:
    return "tokens with A < 0" if data.has_advantages else "tokens, if A < 0"


def _boxes(by_step: int, style: Style) -> list[Box]:
    """The panels by step one below the other; the sweep at their right when wide, below them when narrow."""
    width = style.layout.width / (2 if style.wide and by_step else 1) - LEFT - RIGHT
    height, between = (165, 30) if style.wide else (150, 26)
    steps = [Box(LEFT, TOP + index * (height + between + TOP), width, height) for index in range(by_step)]
    if by_step == 1:
        steps = [steps[0]._replace(height=270 if style.wide else 190)]
    bottom = steps[-1].top + steps[-1].height if steps else 0
    if not style.wide:
        top = (bottom + BOTTOM if steps else 0) + TOP + LEGEND
        return [*steps, Box(LEFT, top, width, 200)]
    left, top = (style.layout.width / 2 if steps else 0) + LEFT, TOP + LEGEND
    return [*steps, Box(left, top, width, bottom - top if steps else 280)]


def _draw_steps(axes: Axes, steps: Sequence[Mapping[str, Any]], key: str, style: Style) -> None:
    colour = style.theme.orange if key == "over_negative" else style.theme.green
    draw_line(axes, middle_of_steps(steps), [row[key] for row in steps], colour, marker="o", markersize=4.5)
    if key == "over_negative":
        axes.set_ylim(0, None)
        in_percent(axes.yaxis, lambda value: f"{value:.4g}")
    whole_steps(axes)


def _draw_sweep(axes: Axes, data: ClippingPlotData, style: Style) -> None:
    rows = _bad(data)["sweep"]
    delta_B = np.array([row["delta"] for row in rows])
    series = (
        ("over_negative", f"of {_negative(data)}", style.theme.orange),
        ("over_tokens", "of tokens with A ≠ 0", style.theme.blue),
    )
    for key, label, colour in series:
        draw_line(axes, delta_B, positive([row[key] for row in rows]), colour, marker="o", markersize=4, label=label)
    values = drawn_values(axes)
    axes.set_yscale("log")
    axes.set_ylim(np.nanmin(values) / 2, 2 * np.nanmax(values))
    axes.minorticks_off()
    in_percent(axes.yaxis, power_label)
    axes.axvline(_bad(data)["delta"], color=style.theme.muted, linewidth=0.9, zorder=1)
    axes.set_xlabel("δ: bad where A < 0 and μ − π ≥ δ")
    title(axes, "Bad updates by their threshold δ, %", style, LEGEND)
    legend_above(axes, style)
