"""Bad updates, which push down tokens that already lost much probability: by threshold, and by
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.drawing.lines import any_above_0, draw_line, middle_of_steps, values_of
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet
from mismatch_cli.report.drawing.scales import stretch

if TYPE_CHECKING:
    from mismatch_cli.studies.clipping import ClippingPlotData

STUDY = "clipping"
SECTION = "Bad updates"
TITLE = "Bad updates"
DATA = "tokens with A < 0 that lost probability since the rollout"
CAPTION = (
    "A bad update pushes down a token that already lost much probability: A < 0 and μ − π ≥ δ. "
    "Panels: the share of bad updates by δ; the share at δ = 0.5 by step, on the same axis; the "
    "mean reward by step. The axis is logarithmic except near 0. Bands are 95 % intervals over "
    "prompts, where there are enough."
)

_FEWEST_STEPS = 3


def needs(data: ClippingPlotData) -> bool:
    return any_above_0(
        [
            row[key]
            for row in _bad(data).get("sweep", ())
            for key in ("over_tokens", "over_negative")
        ]
    )


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    steps = _bad(data).get("by_step") or ()
    has_course = len(steps) >= _FEWEST_STEPS
    has_reward = has_course and bool(np.isfinite(values_of(row["reward"] for row in steps)).any())
    panels = figure.panels(1 + has_course + has_reward, height=(250, 180), columns=3, legend=LEGEND)
    _draw_sweep(panels[0], data)
    if has_course:
        _draw_steps(panels[1], steps, "over_negative", figure.theme.orange)
        panels[1].headline(f"Bad updates at δ = {_bad(data)['delta']:g} by step, %")
    if has_reward:
        _draw_steps(panels[2], steps, "reward", figure.theme.green)
        panels[2].headline("Mean reward")
    rows = [*_bad(data)["sweep"], *(steps if has_course else ())]
    share_N = values_of(row[key] for row in rows for key in ("over_negative", "over_tokens"))
    for axes in panels[: 1 + has_course]:  # equal shares at equal heights
        stretch(
            axes,
            max(share_N[share_N > 0].min() / 2, 1e-4),
            (0, 3 * np.nanmax(share_N)),
            percent=True,
        )


def _bad(data: ClippingPlotData) -> Mapping[str, Any]:
    return data.result.get("bad_updates") or {}


def _draw_sweep(axes: Panel, data: ClippingPlotData) -> None:
    rows, theme, delta = _bad(data)["sweep"], axes.theme, _bad(data)["delta"]
    delta_B = np.array([row["delta"] for row in rows])
    negative = "with A < 0" if data.has_advantages else "if A < 0"
    series = (
        ("over_negative", f"of tokens {negative}", theme.orange),
        ("over_tokens", "of all with A ≠ 0", theme.blue),
    )
    for key, label, colour in series:
        draw_line(
            axes, delta_B, [row[key] for row in rows], colour, marker="o", markersize=4, label=label
        )
    axes.axvline(delta, color=theme.muted, linewidth=0.9, linestyle=":", zorder=1)
    axes.annotate(
        f"δ = {delta:g}",
        (delta, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -2),
        textcoords="offset points",
        va="top",
        color=theme.muted,
        fontsize=axes.style.small,
    )
    axes.set_xlabel("δ: bad where A < 0 and μ − π ≥ δ")
    axes.headline("Bad updates by threshold δ, %")


def _draw_steps(axes: Panel, steps: Sequence[Mapping[str, Any]], key: str, colour: str) -> None:
    draw_line(
        axes,
        middle_of_steps(steps),
        [row[key] for row in steps],
        colour,
        marker="o",
        markersize=4.5,
    )
    axes.whole_steps(5)
