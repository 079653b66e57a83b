"""What panels show: lines with their intervals, steps, points and heat maps, and the look of
each.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pair_summary import ProfileRow
from mismatch_cli.report.drawing.panels import Panel, Sheet, letters_in, short_names, width_of
from mismatch_cli.report.drawing.style import Style

MaybeEstimate = Estimate | None
Rows = Sequence[ProfileRow]

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)))
DASHED = DASHES[1]

RUNS = 2  # names of runs per line of a legend
_LEVEL = 0.25  # a profile shows at least this range around 1, or noise would look like a pattern
_FAR_APART = 20  # times between the largest values of two traces: then the axis is logarithmic
_BEYOND = 2  # times the largest value: bands are cut here, or they would flatten the lines
_DOTS = 20_000  # of a scatter at most
_SPARSE = 3000  # dots up to which they are large
_HEAT_ROW = 21, 17  # pixels per row of a heat map, wide and narrow
_FULL = 0.6  # opacity of the largest share: ink stays readable on it, light and dark


class Steps(Protocol):
    """A row about some steps."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


class LineStyle(NamedTuple):
    """How a line is drawn."""

    colour: str
    dash: Any = "-"
    opacity: float = 1.0

    @property
    def of_line(self) -> dict[str, Any]:
        """Keyword arguments for matplotlib."""
        return {"color": self.colour, "linestyle": self.dash, "alpha": self.opacity}


def looks(names: Iterable[str], style: Style) -> dict[str, LineStyle]:
    """A colour for each name; dashes change after every three, so that eighteen lines differ."""
    colours = style.theme.accents
    look_of = {}
    for number, name in enumerate(names):
        # Half of the colours per dash: each of the 18 pairs of colour and dash occurs once.
        dash = DASHES[number // 3 % len(DASHES)]
        look_of[name] = LineStyle(colours[number % len(colours)], dash)
    return look_of


def run_labels(names: Sequence[str], style: Style) -> dict[str, str]:
    """The names of runs in a legend, shortened to fit `RUNS` per line."""
    letters = letters_in(style.pick(185, 95), style.small)
    return dict(zip(names, short_names(names, letters), strict=True))


def estimate_array(estimates: Iterable[MaybeEstimate]) -> np.ndarray:
    """Value, low and high of each estimate, [N, 3]; NaN where missing."""
    numbers: list[tuple[float | None, ...]] = []
    for estimate in estimates:
        if estimate is None:
            numbers.append((None, None, None))
        else:
            numbers.append((estimate.value, estimate.low, estimate.high))
    # numpy gives an empty list the shape [0]; callers index columns.
    return np.array(numbers, dtype=np.float64).reshape(-1, 3)


def values_of(estimates: Iterable[MaybeEstimate]) -> np.ndarray:
    """The value of each estimate, [N]; NaN where missing."""
    return estimate_array(estimates)[:, 0]


def any_above_0(estimates: Iterable[MaybeEstimate]) -> bool:
    """Whether there is something to draw on a logarithmic axis."""
    return bool((values_of(estimates) > 0).any())


def middle_of_steps(rows: Iterable[Steps]) -> np.ndarray:
    """The middle of the steps of each row, where an axis of steps shows it."""
    return np.array([(row.first + row.last) / 2 for row in rows])


def margin_of(low: float, high: float, share: float, least: float) -> float:
    """Room above and below values: a share of their range, or what widens it to `least`."""
    return max(share * (high - low), (least - (high - low)) / 2)


def draw_line(
    axes: Panel,
    x_B: np.ndarray,
    estimates: Sequence[MaybeEstimate],
    color: str,
    *,
    band: float = 0.17,
    **line: Any,
) -> None:
    """A line through the values, in a band of opacity `band` for the interval; missing values
    leave a gap.
    """
    value_B, low_B, high_B = estimate_array(estimates).T
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
    estimate_B3 = estimate_array(means)
    # Without an interval both ends are at the value, and the bar has no length.
    estimate_B3 = np.where(np.isnan(estimate_B3), estimate_B3[:, :1], estimate_B3)
    reach_2B = np.abs(estimate_B3[:, 1:] - estimate_B3[:, :1]).T
    axes.errorbar(x_B, estimate_B3[:, 0], yerr=reach_2B, color=colour, marker="o", **line)
    return estimate_B3


def draw_profile(figure: Sheet, points: Sequence[tuple[float, Estimate]], along: str) -> None:
    """Means with their bars along an axis, in units of the typical gap: around 1, to show a
    slope or a step.
    """
    (axes,) = figure.panels(1, height=(240, 190))
    x_B, means = zip(*points, strict=True)
    estimate_B3 = draw_bars(axes, x_B, means, axes.theme.blue, markersize=4.5, elinewidth=1)
    low = min(1 - _LEVEL, float(estimate_B3[:, 1].min()))
    high = max(1 + _LEVEL, float(estimate_B3[:, 2].max()))
    axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    axes.axhline(1, color=axes.theme.muted, linewidth=0.9, linestyle=":", zorder=1)
    axes.set_xlabel(along)
    title = "|Δlog p| relative to the typical gap at the same probability (1 = typical)"
    axes.headline(title, "|Δlog p|, 1 = typical")


def trim_unmeasured(rows_of: Mapping[str, Rows], key: str) -> dict[str, Rows]:
    """The rows of each trace, up to the last one with a value.

    A bin without tokens, as of masked ones, has a row without a value: the rows of all traces
    with the same number are about the same bin, and each begins where the one before ends.
    """
    trimmed_of = {}
    for trace, rows in rows_of.items():
        value_B = _estimates_of_rows(rows, key)[:, 0]
        last = max(np.flatnonzero(np.isfinite(value_B)), default=-1)
        trimmed_of[trace] = rows[: last + 1]
    empty_of = _empty_rows(trimmed_of.values())
    complete_of: dict[str, Rows] = {}
    for trace, rows in trimmed_of.items():
        own = {row.first: row for row in rows}
        end = max(own, default=-1)
        complete_of[trace] = [
            own.get(first, empty) for first, empty in empty_of.items() if first <= end
        ]
    return complete_of


def _empty_rows(rows_of_traces: Iterable[Rows]) -> dict[int, ProfileRow]:
    """A row without tokens for each bin that a trace has, and for each range between two of them,
    by where it begins.
    """
    last_of: dict[int, int | None] = {}
    for rows in rows_of_traces:
        for row in rows:
            # The last bin of a trace may end earlier, with its longest response.
            other = last_of.get(row.first) or 0
            last_of[row.first] = None if row.last is None else max(row.last, other)
    empty_of: dict[int, ProfileRow] = {}
    end: int | None = None
    for first, last in sorted(last_of.items()):
        if end is not None and end + 1 < first:
            empty_of[end + 1] = _empty_row(end + 1, first - 1)
        empty_of[first] = _empty_row(first, last)
        end = last
    return empty_of


def _empty_row(first: int, last: int | None) -> ProfileRow:
    nothing = Estimate(None)
    return ProfileRow(first, last, 0, nothing, nothing, nothing)


def _estimates_of_rows(rows: Rows, key: str) -> np.ndarray:
    return estimate_array(map(attrgetter(key), rows))


def draw_steps(axes: Panel, rows_of: Mapping[str, Rows], key: str) -> None:
    """A mean along the response: a step over each bin, in a band for its interval, a line per
    trace; all bins are equally wide.
    """
    labels = run_labels(list(rows_of), axes.style)
    for trace, look in looks(rows_of, axes.style).items():
        rows = rows_of[trace]
        if not rows:
            continue
        edges = np.arange(len(rows) + 1)
        value_B, low_B, high_B = _estimates_of_rows(rows, key).T
        line = look.of_line | {"linewidth": 1.8, "label": labels[trace]}
        axes.stairs(value_B, edges, baseline=None, **line)
        band: dict[str, Any] = {"color": look.colour, "alpha": 0.2, "linewidth": 0}
        axes.stairs(high_B, edges, baseline=low_B, fill=True, **band)
    axes.set_xlim(0, max(map(len, rows_of.values())) or 1)


def share_vertical(panels: Sequence[Panel], rows_of: Mapping[str, Rows], key: str) -> None:
    """Give all panels one scale: from 0, or logarithmic if one of the traces would be flat on
    it.
    """
    smallest, largest = [], []
    for rows in rows_of.values():
        value_B = _estimates_of_rows(rows, key)[:, 0]
        above_0 = value_B[value_B > 0]
        if len(above_0):
            smallest.append(above_0.min())
            largest.append(above_0.max())
    # The data limits include the bands; those of a panel without a step are infinite.
    top = max(float(axes.dataLim.y1) for axes in panels if axes.patches)
    if len(largest) > 1 and max(largest) >= _FAR_APART * min(largest):
        for axes in panels:
            axes.set_ylim(min(smallest) / 2, 1.5 * top)
            axes.logarithmic("y")
        return
    # One wide band would flatten every line, so it is cut; all values 0 still need an axis.
    highest = 1.1 * min(top, _BEYOND * max(largest, default=1.0)) or 1.0
    for axes in panels:
        axes.set_ylim(0, highest)


def thin(count: int) -> slice:
    """Every k-th token of a sample, as many as a figure draws."""
    return slice(None, None, max(1, ceil(count / _DOTS)))


def draw_points(axes: Panel, x_N: np.ndarray, y_N: np.ndarray, colour: str, **look: Any) -> None:
    """Dots, larger if they are few; as pixels also in vector files, which would grow without
    end.
    """
    size = 3.0 if len(x_N) > _SPARSE else 9.0
    settings: dict[str, Any] = {"s": size, "alpha": 0.45, "zorder": 2}
    axes.scatter(x_N, y_N, color=colour, linewidths=0, rasterized=True, **settings | look)


def reach_of(*shares: np.ndarray) -> float:
    """The share with the full colour: 1, 2 or 5 times a power of ten that none exceeds."""
    largest = max(np.nanmax(share, initial=0) for share in shares)
    largest = float(np.clip(largest, 1e-4, 1))
    round_N = 10.0 ** floor(log10(largest)) * np.array([1, 2, 5, 10])
    return float(round_N[round_N >= largest][0])


def percent(share: float) -> str:
    """A share in percent, in at most four characters."""
    value = 100 * share
    if value == 0:
        return "0"
    if value < 0.01:
        return "<.01"
    # One decimal less from where rounding reaches 1.00, and again from where it reaches 10.0.
    if value < 0.995:
        return f"{value:.2f}"
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}"


def names_beside(names: Sequence[str], style: Style) -> tuple[list[str], float]:
    """Names of rows, shortened to a quarter of the figure, and the pixels at its left for them."""
    short = short_names(names, letters_in(style.pick(280, 150), style.small))
    longest = max(short, key=len)
    return short, 20 + width_of(longest, style.small)


class OpacityScale(NamedTuple):
    """From shares to colours: the opacity of `colour` is the square root of share / reach, so
    that 1 % differs from 0.
    """

    colour: str
    reach: float

    @property
    def note(self) -> str:
        """The share that has the darkest colour, for the reader of a heat map."""
        return f"darkest: {100 * self.reach:g} %"


def heat_height(rows: int) -> tuple[int, int]:
    """The height of a heat map with so many rows in pixels, wide and narrow."""
    wide, narrow = _HEAT_ROW
    return rows * wide, rows * narrow


def draw_heat(axes: Panel, share_RC: np.ndarray, scale: OpacityScale, names: Sequence[str]) -> None:
    """Fill the panel with cells, first row on top, and write the shares in percent where there is
    room; NaN stays empty.
    """
    clear, full = to_rgba(scale.colour, 0.0), to_rgba(scale.colour, _FULL)
    rows, columns = share_RC.shape
    axes.imshow(
        share_RC,
        cmap=LinearSegmentedColormap.from_list("share", [clear, full]),
        norm=PowerNorm(0.5, 0, scale.reach),
        extent=(0, columns, rows - 0.5, -0.5),
        aspect="auto",
        interpolation="none",
    )
    axes.name_rows(names)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    between: dict[str, Any] = {"color": axes.theme.page, "linewidth": 1}
    axes.hlines(np.arange(rows) + 0.5, 0, columns, **between)
    axes.vlines(np.arange(columns), -0.5, rows - 0.5, **between)
    if axes.room / columns >= width_of("0.00", axes.style.small):
        _write_shares(axes, share_RC)


def _write_shares(axes: Panel, share_RC: np.ndarray) -> None:
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": axes.style.small}
    for (row, column), share in np.ndenumerate(share_RC):
        if np.isfinite(share):
            ink = axes.theme.ink if share else axes.theme.muted
            axes.text(column + 0.5, row, percent(share), color=ink, **look)


def left_out_note(silent: int, duplicates: int = 0) -> str:
    """How many algorithms a figure does not draw, because they block nothing or the same as
    another.
    """
    if duplicates:
        return f"{silent + duplicates} left out"
    if silent == 1:
        return "1 blocks nothing"
    return f"{silent} block nothing" if silent else ""
