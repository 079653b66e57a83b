"""Bad updates, which push down tokens that already lost much probability: by threshold, and by
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.drawing.marks import any_above_0, draw_line, middle_of_steps, values_of
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.metrics.clipping.bad_updates import BadUpdatesAtDelta, BadUpdatesOfStep
    from mismatch_cli.metrics.estimate import Estimate
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
    return any_above_0(_shares(data.result.bad_updates.sweep))


def draw(figure: Sheet, data: ClippingPlotData) -> None:
    bad = data.result.bad_updates
    theme = figure.theme
    steps = bad.by_step if len(bad.by_step) >= _FEWEST_STEPS else ()
    rewards = [row.reward for row in steps]
    has_reward = bool(np.isfinite(values_of(rewards)).any())
    number = 1 + bool(steps) + has_reward
    panels = figure.panels(number, height=(250, 180), columns=3, legend=LEGEND)
    _draw_sweep(panels[0], data)
    panels_of_shares = panels[:1]
    if steps:
        shares = [row.over_negative for row in steps]
        title = f"Bad updates at δ = {bad.delta:g} by step, %"
        _draw_steps(panels[1], steps, shares, theme.orange, title)
        panels_of_shares = panels[:2]
    if has_reward:
        _draw_steps(panels[2], steps, rewards, theme.green, "Mean reward")
    # Both panels have one axis: equal shares are at equal heights.
    share_N = values_of(_shares(bad.sweep) + _shares(steps))
    lowest = max(share_N[share_N > 0].min() / 2, 1e-4)
    for axes in panels_of_shares:
        axes.in_percent()
        axes.stretch(lowest, (0, 3 * np.nanmax(share_N)))


def _shares(rows: Sequence[BadUpdatesAtDelta] | Sequence[BadUpdatesOfStep]) -> list[Estimate]:
    """The shares of bad updates over both denominators."""
    shares = []
    for row in rows:
        shares += [row.over_negative, row.over_tokens]
    return shares


def _draw_sweep(axes: Panel, data: ClippingPlotData) -> None:
    bad = data.result.bad_updates
    theme = axes.theme
    delta_B = np.array([row.delta for row in bad.sweep])
    negative = "with A < 0" if data.result.has_advantages else "if A < 0"
    for estimates, label, colour in (
        ([row.over_negative for row in bad.sweep], f"of tokens {negative}", theme.orange),
        ([row.over_tokens for row in bad.sweep], "of all with A ≠ 0", theme.blue),
    ):
        draw_line(axes, delta_B, estimates, colour, marker="o", markersize=4, label=label)
    axes.axvline(bad.delta, color=theme.muted, linewidth=0.9, linestyle=":", zorder=1)
    axes.name_threshold(f"δ = {bad.delta:g}", bad.delta)
    axes.set_xlabel("δ: bad where A < 0 and μ − π ≥ δ")
    axes.headline("Bad updates by threshold δ, %")


def _draw_steps(
    axes: Panel,
    steps: Sequence[BadUpdatesOfStep],
    estimates: Sequence[Estimate],
    colour: str,
    title: str,
) -> None:
    draw_line(axes, middle_of_steps(steps), estimates, colour, marker="o", markersize=4.5)
    axes.whole_steps(5)
    axes.headline(title)
