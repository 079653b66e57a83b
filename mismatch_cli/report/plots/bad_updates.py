"""Bad updates, which push down what has already fallen far: by step beside the reward, and by their threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.plots._lines import any_above_0, draw_line, middle_of_steps, positive, values_of
from mismatch_cli.report.plots._panels import BOTTOM, LEFT, LEGEND, RIGHT, TOP, Box, Panel, Sheet, power_label
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


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    steps = _bad(data).get("by_step") or ()
    by_step = [("over_negative", f"Bad updates at δ = {_bad(data)['delta']:g}, % of {_negative(data)}")]
    if np.isfinite(values_of(row["reward"] for row in steps)).any():
        by_step.append(("reward", "Mean reward"))
    if len(steps) < _FEWEST_STEPS:
        by_step = []
    *panels, sweep = figure.place(_boxes(len(by_step), figure.style))
    for axes, (key, name) in zip(panels, by_step, strict=True):
        _draw_steps(axes, steps, key)
        axes.headline(name, name.replace("tokens with ", ""))
    for axes in panels[:-1]:
        axes.set_xlim(panels[1].get_xlim())
        axes.set_xlabel("")
    _draw_sweep(sweep, data)


def _bad(data: ClippingPlotData) -> Mapping[str, Any]:
    return data.result.get("bad_updates") or {}


def _negative(data: ClippingPlotData) -> str:
    return "tokens with A < 0" if data.has_advantages else "tokens, if A < 0"


def _boxes(by_step: int, style: Style) -> list[Box]:
    """The panels by step one below the other; the sweep at their right when wide, below them when narrow."""
    beside = style.pick(bool(by_step), False)
    width = style.width / (2 if beside else 1) - LEFT - RIGHT
    height, between, single, alone = style.pick((165, 30, 270, 280), (150, 26, 190, 200))
    high = single if by_step == 1 else height
    steps = [Box(LEFT, TOP + index * (high + between + TOP), width, high) for index in range(by_step)]
    bottom = steps[-1].top + high if steps else 0
    if beside:
        return [*steps, Box(style.width / 2 + LEFT, TOP + LEGEND, width, bottom - TOP - LEGEND, LEGEND)]
    return [*steps, Box(LEFT, (bottom + BOTTOM if steps else 0) + TOP + LEGEND, width, alone, LEGEND)]


def _draw_steps(axes: Panel, steps: Sequence[Mapping[str, Any]], key: str) -> None:
    colour = axes.theme.orange if key == "over_negative" else axes.theme.green
    draw_line(axes, middle_of_steps(steps), [row[key] for row in steps], colour, marker="o", markersize=4.5)
    if key == "over_negative":
        axes.set_ylim(0, None)
        axes.in_percent("{:.4g}".format)
    axes.whole_steps()


def _draw_sweep(axes: Panel, data: ClippingPlotData) -> None:
    rows, theme = _bad(data)["sweep"], axes.theme
    delta_B = np.array([row["delta"] for row in rows])
    series = (
        ("over_negative", f"of {_negative(data)}", theme.orange),
        ("over_tokens", "of tokens with A ≠ 0", theme.blue),
    )
    for key, label, colour in series:
        estimates = positive(row[key] for row in rows)
        draw_line(axes, delta_B, estimates, colour, marker="o", markersize=4, label=label)
    values = axes.drawn_values()
    axes.set_yscale("log")
    axes.set_ylim(np.nanmin(values) / 2, 2 * np.nanmax(values))
    axes.minorticks_off()
    axes.in_percent(power_label)
    axes.axvline(_bad(data)["delta"], color=theme.muted, linewidth=0.9, zorder=1)
    axes.set_xlabel("δ: bad where A < 0 and μ − π ≥ δ")
    axes.headline("Bad updates by their threshold δ, %")
