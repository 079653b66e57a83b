"""Placing panels in CSS pixels, what stands around them, and axes that read well.

No layout engine: it would draw everything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from math import log10
from typing import Any, NamedTuple

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from mismatch_cli.report.plots._style import CSS_PX, Style
from mismatch_cli.text import for_mathtext

LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44  # pixels around a panel with ordinary labels
LEGEND = 20  # pixels for a line of names between title and panel
SUBJECT = 22  # pixels for the line below all panels
_NAMES = 4  # in a line of the legend above a panel
_LINE = 18  # pixels of a line of the legend below all panels


class Box(NamedTuple):
    """Where a panel lies, in CSS pixels from the upper left corner of the figure."""

    left: float
    top: float
    width: float
    height: float


def panels(
    figure: Figure,
    style: Style,
    count: int,
    *,
    height: int = 300,
    legend: int = 0,
    columns: int = 2,
    between: int = BOTTOM,
    below: int = 0,
) -> list[Axes]:
    """Panels of `height` pixels, in `columns` when wide, one below the other when narrow.

    `legend` pixels are kept free above each panel, below its title; `between` those below a panel that has another
    one under it, `below` more under the lowest.
    """
    columns = min(columns, count) if style.wide else 1
    cell, row = style.layout.width / columns, TOP + legend + height + between
    boxes = [
        Box(LEFT + place % columns * cell, place // columns * row + TOP + legend, cell - LEFT - RIGHT, height)
        for place in range(count)
    ]
    return place_boxes(figure, style, boxes, BOTTOM + below)


def place_boxes(figure: Figure, style: Style, boxes: Sequence[Box], below: float = BOTTOM) -> list[Axes]:
    """Set the figure's size and add one panel for each box, with `below` pixels under the lowest, and the subject."""
    width = style.layout.width
    total = max(box.top + box.height for box in boxes) + below + SUBJECT
    figure.set_size_inches(width * CSS_PX, total * CSS_PX)
    axes = []
    for box in boxes:
        bottom = total - box.top - box.height
        axes.append(figure.add_axes((box.left / width, bottom / total, box.width / width, box.height / total)))
        axes[-1].xaxis.set_major_formatter(plain_label)
        axes[-1].yaxis.set_major_formatter(plain_label)
    return axes


def add_subject(figure: Figure, style: Style, subject: str) -> None:
    """Print who is compared below all panels, so that a copied picture says what it shows."""
    width, height = figure.get_size_inches() / CSS_PX
    left = _flush_left(style)
    room = int((width - left - RIGHT) * CSS_PX * 72 / (0.6 * style.small))  # an average letter is 0.6 of the size wide
    text = subject if len(subject) <= room else subject[: room - 1] + "…"
    figure.text(left / width, 7 / height, for_mathtext(text), color=style.theme.muted, fontsize=style.small)


def title(axes: Axes, text: str, style: Style, legend: int = 0, note: str = "") -> None:
    """The panel's title: it names the vertical axis, which needs no turned label then; a note stands at the right."""
    pad = (7 + legend) * 0.75
    axes.set_title(text, pad=pad, x=_flush_left_of(axes, style))
    axes.set_title(note, loc="right", pad=pad, fontsize=style.small, fontweight="normal", color=style.theme.muted)


def legend_height(names: Sequence[str]) -> int:
    """Pixels above a panel for the names of its lines; a single one needs none."""
    return LEGEND * -(-len(names) // _NAMES) if len(names) > 1 else 0


def legend_above(axes: Axes, style: Style) -> None:
    """The legend between title and panel."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(_flush_left_of(axes, style), 1.0), ncols=_NAMES, borderaxespad=0.25,
        borderpad=0.1, handlelength=1.5, handletextpad=0.5, columnspacing=1.3,
    )  # fmt: skip


def legend_below_height(entries: int, columns: int) -> int:
    """Pixels below all panels for the names of the lines in them."""
    return _LINE * -(-entries // columns)


def legend_below(
    figure: Figure,
    style: Style,
    look_of: Mapping[str, Mapping[str, Any]],
    columns: int,
    *,
    beside: int = 62,
    handlelength: float = 2.4,
    columnspacing: float = 1.8,
) -> None:
    """The names of all lines below the panels: they are too long to stand above one. `beside` pixels are not theirs."""
    width, height = figure.get_size_inches() / CSS_PX
    names = short_names(list(look_of), (width - LEFT) / columns - beside, rcParams["legend.fontsize"])
    handles = [Line2D([], [], label=name, **look) for name, look in zip(names, look_of.values(), strict=True)]
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(_flush_left(style) / width, 22 / height), ncols=columns,
        borderaxespad=0, borderpad=0.2, handlelength=handlelength, columnspacing=columnspacing, labelspacing=0.35,
    )  # fmt: skip


def _flush_left(style: Style) -> int:
    """Where titles begin, in pixels: above the panel when wide, above its labels when narrow, which gives more room."""
    return LEFT if style.wide else 8


def _flush_left_of(axes: Axes, style: Style) -> float:
    """The same in the panel's own coordinates."""
    return (_flush_left(style) - LEFT) / (axes.get_position().width * style.layout.width)


def plain_label(value: float, _position: float = 0) -> str:
    """A tick on a linear axis, without the offset above the axis that matplotlib would use."""
    if 0 < abs(value - 1) < 5e-4:  # a ratio that hardly leaves 1: only the distance from it fits beside the panel
        return f"{value - 1:+.2g}".replace("e-0", "e-").replace("-", "−")
    return f"{value:.7g}".replace("e-0", "e-").replace("-", "−")


def power_label(value: float, _position: float = 0) -> str:
    """A tick on a logarithmic axis: 0.01 and 10 as such, further away 10⁻⁵."""
    if 1e-3 <= value < 1e4:
        return f"{value:.10f}".rstrip("0").rstrip(".") if value < 1 else f"{value:g}"
    exponent = round(log10(value))
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def in_percent(axis: Axis, label: Callable[[float], str] = plain_label) -> None:
    """Shares with ticks in percent."""
    axis.set_major_formatter(lambda value, _position: label(100 * value))


def logarithmic(axes: Axes, which: str) -> None:
    """A logarithmic axis with at most six labelled ticks, at whole powers of ten where they suffice."""
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    few = high / low < 100
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=7))
    axis.set_major_formatter(power_label)
    axis.set_minor_locator(NullLocator())


def whole_steps(axes: Axes, ticks: int = 8) -> None:
    """An axis of training steps: whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("step")


def label_bins(axes: Axes, rows: Sequence[Mapping[str, Any]], style: Style, every: int = 2) -> None:
    """An axis of bins of μ, one unit each: their edges, on a narrow one one in `every`."""
    edges = [*(row["mu_low"] for row in rows), rows[-1]["mu_high"]]
    labels = ["0" if edge == 0 else power_label(edge).removeprefix("0") for edge in edges]
    if not style.wide:
        labels = [label if index % every == len(labels) % every else "" for index, label in enumerate(labels)]
    axes.set_xlim(0, len(rows))
    axes.set_xticks(range(len(edges)), labels)


def width_of(text: str, points: float, *, bold: bool = False) -> float:
    """How wide a text may be, in CSS pixels: letters are fitted to the dots of the output, which takes some percent."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))
    font.set_size(points, 96)
    font.set_text(text, 0)
    return float(1.07 * font.get_width_height()[0] / 64)


def short_names(names: Sequence[str], room: float, points: float, *, bold: bool = False) -> list[str]:
    """Names for a figure, at most `room` CSS pixels wide: what is too long loses its middle.

    Names that would look alike then lose the end that they share, too: their parameters tell them apart.
    """
    drawable = [for_mathtext(name).replace(r"\$", "$") for name in names]
    short = [_cut(name, room, points, bold) for name in drawable]
    for text in {text for text in short if short.count(text) > 1}:
        alike = [index for index, other in enumerate(short) if other == text]
        endings = zip(*(reversed(drawable[index]) for index in alike), strict=False)
        shared = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, endings))
        for index in alike:
            short[index] = _cut(drawable[index][: len(drawable[index]) - shared] + "…", room, points, bold)
    return [text.replace("$", r"\$") for text in short]


def _cut(name: str, room: float, points: float, bold: bool) -> str:
    text = name
    for kept in range(len(name) - 1, 1, -1):
        if width_of(text, points, bold=bold) <= room:
            break
        text = f"{name[: kept // 2]}…{name[len(name) - (kept - kept // 2) :]}"
    return text
