"""The look of each line, and lines with their intervals."""

from collections.abc import Iterable, Sequence
from math import floor, log10
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.ticker import MaxNLocator

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.drawing.panels import Panel, Sheet, plain_label, power_label, short_names
from mismatch_cli.report.drawing.style import Style

Part = Estimate | None

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
DASHED = DASHES[1]

RUNS = 2  # names of runs per line of a legend
_LEVEL = 0.25  # a profile shows at least this range around 1, or noise would look like a pattern


class Steps(Protocol):
    """A row about some steps."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


class Look(NamedTuple):
    """How a line is drawn."""

    colour: str
    dash: Any = "-"
    opacity: float = 1.0

    @property
    def of_line(self) -> dict[str, Any]:
        """Keyword arguments for matplotlib."""
        return {
            "color": self.colour,
            "linestyle": self.dash,
            "alpha": self.opacity if self.opacity < 1 else None,
        }


def looks(names: Iterable[str], style: Style) -> dict[str, Look]:
    """A colour for each name; dashes change after every three, so that eighteen lines differ."""
    colours = style.theme.accents
    return {
        name: Look(colours[place % len(colours)], DASHES[place // 3 % len(DASHES)])
        for place, name in enumerate(names)
    }


def run_labels(names: Sequence[str], style: Style) -> dict[str, str]:
    """The names of runs in a legend, shortened to fit `RUNS` per line."""
    return dict(
        zip(names, short_names(names, style.pick(185, 95), 0.94 * style.text * 0.75), strict=True)
    )


def parts_of(estimates: Iterable[Part]) -> np.ndarray:
    """Value, low and high of each estimate, one row each; NaN where missing."""
    rows = [_parts(estimate) for estimate in estimates]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def _parts(estimate: Part) -> tuple[float | None, ...]:
    return (None,) * 3 if estimate is None else (estimate.value, estimate.low, estimate.high)


def values_of(estimates: Iterable[Part]) -> np.ndarray:
    return parts_of(estimates)[:, 0]


def any_above_0(estimates: Iterable[Part]) -> bool:
    return bool((values_of(estimates) > 0).any())


def draw_line(
    axes: Panel,
    x_B: np.ndarray,
    estimates: Sequence[Part],
    color: str,
    *,
    band: float = 0.17,
    **line: Any,
) -> None:
    """A line through the values, in a band of opacity `band` for the interval; missing values
    leave a gap.
    """
    value_B, low_B, high_B = parts_of(estimates).T
    if not np.isfinite(value_B).any():
        return
    if band and np.isfinite(high_B).any():
        axes.fill_between(x_B, low_B, high_B, color=color, alpha=band, linewidth=0)
    axes.plot(x_B, value_B, color=color, **line)


def draw_bars(
    axes: Panel, x_B: Sequence[float], means: Iterable[Estimate], colour: str, **line: Any
) -> np.ndarray:
    """Draw a line through means, with bars for intervals; returns value, low and high of each,
    [B, 3].
    """
    part_B3 = parts_of(means)
    part_B3 = np.where(np.isnan(part_B3), part_B3[:, :1], part_B3)
    reach_2B = np.abs(part_B3[:, 1:] - part_B3[:, :1]).T
    axes.errorbar(x_B, part_B3[:, 0], yerr=reach_2B, color=colour, marker="o", **line)
    return part_B3


def draw_profile(figure: Sheet, points: Sequence[tuple[float, Estimate]], along: str) -> None:
    """Means with their bars along an axis, in units of the typical gap: around 1, to show a
    slope or a step.
    """
    (axes,) = figure.panels(1, height=(240, 190))
    x_B, means = zip(*points, strict=True)
    part_B3 = draw_bars(axes, x_B, means, axes.theme.blue, markersize=4.5, elinewidth=1)
    low, high = (
        min(1 - _LEVEL, float(part_B3[:, 1].min())),
        max(1 + _LEVEL, float(part_B3[:, 2].max())),
    )
    axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    axes.axhline(1, color=axes.theme.muted, linewidth=0.9, linestyle=":", zorder=1)
    axes.set_xlabel(along)
    axes.headline(
        "|Δlog p| relative to the typical gap at the same probability (1 = typical)",
        "|Δlog p|, 1 = typical",
    )


def middle_of_steps(rows: Iterable[Steps]) -> np.ndarray:
    """The place of each row of `by_step` on an axis of steps."""
    return np.array([(row.first + row.last) / 2 for row in rows])


def label_in_units(axes: Panel, factor: float) -> str:
    """Few and short tick labels, in units of a power of ten that is returned as a note."""
    low, high = axes.get_ylim()
    largest = factor * max(abs(low), abs(high))
    exponent = 0 if 0.01 <= largest < 1e5 else floor(log10(largest))

    def label(value: float, _position: float = 0) -> str:
        return plain_label(
            0.0
            if abs(value) < 1e-9 * (high - low)
            else float(f"{factor * value / 10**exponent:.5g}")
        )

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(label)
    return f"× {power_label(10.0**exponent)}" if exponent else ""
