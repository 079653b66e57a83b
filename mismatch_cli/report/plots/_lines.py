"""A look for each line, and lines with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.plots._panels import panels, title
from mismatch_cli.report.plots._style import LIGHT, Style

Part = Mapping[str, Any] | None  # an estimate of a JSON: value, low, high

_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
DASHED = _DASHES[1]


class Look(NamedTuple):
    """How a line is drawn."""

    colour: str
    dash: Any = "-"


def palette(style: Style) -> tuple[str, ...]:
    """Six hues after Okabe and Ito (2008) with a contrast of at least 3 against the page."""
    theme = style.theme
    accents = ("#a1378b", "#8a6a00", "#2f8fb8") if theme.name == LIGHT.name else ("#e48fce", "#e3c64a", "#9ad8f5")
    return (theme.blue, theme.orange, theme.green, *accents)


def looks(names: Iterable[str], style: Style) -> dict[str, Look]:
    """A colour for each name; every three of them the dashes change, so that eighteen stay apart."""
    colours = palette(style)
    return {
        name: Look(colours[place % len(colours)], _DASHES[place // 3 % len(_DASHES)])
        for place, name in enumerate(names)
    }


def parts_of(estimates: Iterable[Part]) -> np.ndarray:
    """Value, low and high of each estimate in a row; NaN where there is none."""
    rows = [[(estimate or {}).get(part) for part in ("value", "low", "high")] for estimate in estimates]
    return np.array([[np.nan if x is None else float(x) for x in row] for row in rows]).reshape(-1, 3)


def values_of(estimates: Iterable[Part]) -> np.ndarray:
    return parts_of(estimates)[:, 0]


def any_above_0(estimates: Iterable[Part]) -> bool:
    return bool((values_of(estimates) > 0).any())


def drawn_values(axes: Axes) -> np.ndarray:
    """The values of every line in the panel."""
    return np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])


def draw_line(
    axes: Axes, x_B: np.ndarray, estimates: Sequence[Part], colour: str, *, band: float = 0.17, **line: Any
) -> None:
    """A line through the values, in a band of that opacity for the interval; what has no value leaves a gap."""
    value_B, low_B, high_B = parts_of(estimates).T
    if not np.isfinite(value_B).any():
        return
    if band and np.isfinite(high_B).any():
        axes.fill_between(x_B, low_B, high_B, color=colour, alpha=band, linewidth=0)
    axes.plot(x_B, value_B, color=colour, **line)


def draw_bars(axes: Axes, x_B: Sequence[float], means: Sequence[Estimate], colour: str, **line: Any) -> np.ndarray:
    """A line through means, each with a bar for its interval, if it has one; the ends of the bars, [B, 3]."""
    part_B3 = parts_of(map(vars, means))
    part_B3 = np.where(np.isnan(part_B3), part_B3[:, :1], part_B3)
    reach_2B = np.abs(part_B3[:, 1:] - part_B3[:, :1]).T
    axes.errorbar(x_B, part_B3[:, 0], yerr=reach_2B, color=colour, marker="o", **line)
    return part_B3


def draw_profile(figure: Figure, points: Sequence[tuple[float, Estimate]], style: Style, along: str) -> None:
    """Means with their bars along an axis, in typical gaps."""
    (axes,) = panels(figure, style, 1, height=240 if style.wide else 190)
    x_B, means = zip(*points, strict=True)
    part_B3 = draw_bars(axes, x_B, means, style.theme.blue, markersize=4.5, elinewidth=1)
    axes.set_ylim(0, 1.15 * max(float(part_B3[:, 2].max()), 1e-6))
    axes.set_xlabel(along)
    title(
        axes, "Mean gap, in typical gaps of the token’s probability" if style.wide else "Mean gap, typical = 1", style
    )


def positive(estimates: Sequence[Part]) -> list[Part]:
    """For a logarithmic axis, which has no zero: the line ends there, and a band goes on to the lower edge."""
    rows: list[Part] = []
    for value, low, high in parts_of(estimates):
        shown = value > 0
        has_band = shown and np.isfinite(low) and np.isfinite(high)
        band = (max(low, 1e-4 * value), high) if has_band else (None, None)
        rows.append({"value": value if shown else None, "low": band[0], "high": band[1]})
    return rows


def middle_of_steps(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Where each row of `by_step` stands on the axis of steps."""
    return np.array([(row["first"] + row["last"]) / 2 for row in rows])
