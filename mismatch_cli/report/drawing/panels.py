"""The figure that a plot draws on, and its panels: placed in CSS pixels, with readable titles and
axes.

There is no layout engine because it would draw everything twice.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from math import log10
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from mismatch_cli.base.text import for_mathtext
from mismatch_cli.report.drawing.axis import PanelRightAxis, PanelXAxis, PanelYAxis
from mismatch_cli.report.drawing.style import CSS_PX, Style
from mismatch_cli.report.drawing.svg import measured, to_svg

LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44  # pixels around a panel with ordinary labels
LEGEND = 20  # pixels for a legend line between title and panel
# Pixels for the first line below all panels, and for each further one
_SUBJECT, _SUBJECT_LINE = 22, 15
_NAMES = 4  # names per line of the legend above a panel
_LINE = 18  # pixels per line of the legend below all panels
_CELL = 300  # pixels that each of several columns needs in small text
_LABEL = 20  # pixels of a rotated label of two lines


class Box(NamedTuple):
    """The place of a panel, in CSS pixels from the upper left corner of the figure."""

    left: float
    top: float
    width: float
    height: float
    legend: int = 0  # pixels above the panel for its legend


class HeatCells(NamedTuple):
    """A heat map: its shares, NaN where a cell is empty, and the names of its rows."""

    share_RC: np.ndarray
    names: Sequence[str]


class Sheet(Figure):
    """A figure in a style, without panels yet."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style, self.theme = style, style.theme
        # Titles begin above the panel if wide; above its labels if narrow, which gives more room.
        self.flush = style.pick(LEFT, 8)
        self.subject_lines = style.pick(1, 2)
        self.subject_height = _SUBJECT + (self.subject_lines - 1) * _SUBJECT_LINE

    def _repr_html_(self) -> str:
        """The figure for a notebook, always on white."""
        svg = b64encode(to_svg(self, themed=False).encode()).decode()
        return f'<img src="data:image/svg+xml;base64,{svg}" style="max-width: 100%" alt="Plot">'

    def panels(
        self,
        count: int,
        *,
        height: tuple[int, int] = (300, 300),
        legend: int = 0,
        columns: int = 2,
        between: int = BOTTOM,
        below: int = 0,
        label: int = 0,
        right: int = 0,
        cells: Sequence[int] = (),
    ) -> list[Panel]:
        """Panels in `columns` if wide, in one column if narrow; `height` in pixels is for wide and
        narrow.

        Free pixels: `legend` between the title and the panel, `between` below a panel above another, `below` more under
        the lowest, `label` at the left for a rotated axis label, `right` for a second axis.
        `cells` are the occupied places, row by row, if all columns fit; the other places stay empty.
        """
        fitting = self.style.pick(columns, int(self.style.width // _CELL))
        taken = cells if cells and fitting >= columns else range(count)
        columns, high = max(1, min(columns, max(taken) + 1, fitting)), self.style.pick(*height)
        left = LEFT + (0 if self.style.labelled else label)
        cell, row = self.style.width / columns, TOP + legend + high + between
        boxes = [
            Box(
                left + i % columns * cell,
                i // columns * row + TOP + legend,
                cell - left - RIGHT - right,
                high,
                legend,
            )
            for i in taken
        ]
        return self.place(boxes, BOTTOM + below)

    def place(self, boxes: Sequence[Box], below: float = BOTTOM) -> list[Panel]:
        """Set the figure's size and add a panel for each box, with `below` pixels and the
        subject under the lowest.
        """
        if self.style.labelled:
            boxes = [
                box._replace(left=box.left + _LABEL, width=box.width - _LABEL) for box in boxes
            ]
        height = max(box.top + box.height for box in boxes) + below + self.subject_height
        self.set_size_inches(self.style.width * CSS_PX, height * CSS_PX)
        panels = [Panel(self, box, height) for box in boxes]
        for axes in panels:
            self.add_axes(axes)
        return panels

    def second_axis(self, panel: Panel) -> Panel:
        """An empty panel on top of another with its vertical axis at the right; it has no ticks
        below and no grid.
        """
        second = _RightPanel(self, panel.box, self.get_size_inches()[1] / CSS_PX)
        self.add_axes(second)
        second.set_xticks([])
        second.grid(visible=False)
        for side, spine in second.spines.items():
            spine.set_visible(side == "right")
        second.spines.right.set_position(("outward", 0))
        second.yaxis.set_label_position("right")
        return second

    def add_subject(self, subject: str) -> None:
        """Print the subject below all panels, so that a copied picture says what it shows."""
        small, room, text = (
            self.style.small,
            self.style.width - self.flush - RIGHT,
            for_mathtext(subject),
        )
        if (width := width_of(text, small)) > room:
            letters = int(0.95 * len(text) * room / width)  # some lines have wider letters
            text = "\n".join(wrap(text, letters, max_lines=self.subject_lines, placeholder="…"))
        self.text(*self._fraction(self.flush, 7), text, color=self.theme.muted, fontsize=small)

    def legend_below(
        self,
        look_of: Mapping[str, Mapping[str, Any]],
        columns: int,
        *,
        beside: int = 62,
        **spacing: float,
    ) -> None:
        """A legend below all panels, for names too long to fit above one; `beside` pixels per
        name are for its mark.
        """
        names = short_names(
            list(look_of), (self.style.width - LEFT) / columns - beside, rcParams["legend.fontsize"]
        )
        handles = [
            Line2D([], [], label=name, **look)
            for name, look in zip(names, look_of.values(), strict=True)
        ]
        self.legend(
            handles=handles,
            loc="lower left",
            ncols=columns,
            bbox_to_anchor=self._fraction(self.flush, self.subject_height),
            **{
                "borderaxespad": 0,
                "borderpad": 0.2,
                "handlelength": 2.4,
                "columnspacing": 1.8,
                "labelspacing": 0.35,
            }
            | spacing,
        )

    def _fraction(self, x: float, y: float) -> tuple[float, float]:
        """Pixels from the lower left corner, as figure coordinates."""
        width, height = self.get_size_inches() / CSS_PX
        return x / width, y / height


def legend_below_height(entries: int, columns: int) -> int:
    """Pixels for a legend below all panels."""
    return _LINE * -(-entries // columns)


def legend_height(names: Collection[str], columns: int = _NAMES) -> int:
    """Pixels for a legend above a panel; a single line needs none."""
    return LEGEND * -(-len(names) // columns) if len(names) > 1 else 0


class Panel(Axes):
    """Axes in a sheet, with plain tick labels.

    What the artists of a panel do not say is kept for its description: the `factor` from values to
    labels of the vertical axis, whether the horizontal one has `whole` steps only, `dots` as x and
    y of each image of points, and `cells`.
    """

    vertical: type[PanelYAxis | PanelRightAxis] = PanelYAxis

    def __init__(self, sheet: Sheet, box: Box, height: float) -> None:
        width = sheet.style.width
        bottom = height - box.top - box.height
        super().__init__(
            sheet, (box.left / width, bottom / height, box.width / width, box.height / height)
        )
        self.style, self.theme, self.box = sheet.style, sheet.theme, box
        self.factor, self.whole = 1.0, False
        self.dots: list[tuple[np.ndarray, np.ndarray]] = []
        self.cells: HeatCells | None = None
        self.flush = (sheet.flush - LEFT) / box.width  # where its title begins, in axes coordinates
        for side in ("left", "bottom"):  # as matplotlib's first tick would do
            self.spines[side].set_position(("outward", 0))
        self.xaxis.set_major_formatter(plain_label)
        self.yaxis.set_major_formatter(plain_label)

    def _init_axis(self) -> None:
        self.xaxis, self.yaxis = PanelXAxis(self, clear=False), self.vertical(self, clear=False)
        for side, spine in self.spines.items():
            spine.register_axis(self.xaxis if side in ("bottom", "top") else self.yaxis)

    @property
    def headline_room(self) -> float:
        """Pixels from the beginning of the title to the right end of the panel."""
        return float(self.box.width * (1 - self.flush))

    def headline(
        self, text: str, short: str = "", note: str = "", *, is_axis: bool = True, **legend: Any
    ) -> None:
        """The title (`short` if narrow), which replaces the label of the vertical axis if it names
        that axis.

        The note is at its right, and the legend of the lines drawn so far below it, if the panel
        has room for one.
        """
        pad = (7 + self.box.legend) * 0.75
        if is_axis and self.style.labelled:
            self.set_ylabel(self._in_lines(text, short), linespacing=1.1)
        else:
            self.set_title(self.style.pick(text, short or text), pad=pad, x=self.flush)
        self.set_title(
            note,
            loc="right",
            pad=pad,
            fontsize=self.style.small,
            fontweight="normal",
            color=self.theme.muted,
        )
        if self.box.legend and self.get_legend_handles_labels()[0]:
            spacing = {
                "borderaxespad": 0.25,
                "handlelength": 1.5,
                "handletextpad": 0.5,
                "columnspacing": 1.3,
            }
            self.legend(
                loc="lower left",
                bbox_to_anchor=(self.flush, 1.0),
                borderpad=0.1,
                **{"ncols": _NAMES} | spacing | legend,
            )

    def set_xscale(self, value: Any, **how: Any) -> None:
        super().set_xscale(value, **how)
        if value == "log":
            self.xaxis.set_major_formatter(power_label)  # matplotlib's formatter writes markup

    def set_yscale(self, value: Any, **how: Any) -> None:
        super().set_yscale(value, **how)
        if value == "log":
            self.yaxis.set_major_formatter(power_label)

    def set_xlabel(self, xlabel: str, *args: Any, **text: Any) -> Any:
        """A label centred below the panel, or aligned with its right end if it is wider."""
        loc = (
            "center" if width_of(xlabel, rcParams["axes.labelsize"]) <= self.box.width else "right"
        )
        return super().set_xlabel(xlabel, *args, **{"loc": loc} | text)

    def _in_lines(self, text: str, short: str) -> str:
        """The label beside the panel, in one or two lines; the short text if it does not fit
        two.
        """
        points, label = rcParams["axes.labelsize"], text
        for label in (text, short or text):
            lines = wrapped(label, self.box.height, points)
            if len(lines) <= 2:
                return "\n".join(lines)
        return label

    def drawn_values(self) -> np.ndarray:
        """The values of every line."""
        return np.concatenate(
            [np.asarray(line.get_ydata(), dtype=np.float64) for line in self.lines]
        )

    def in_percent(self, label: Callable[[float], str] | None = None) -> None:
        """Label vertical ticks in percent."""
        self.factor = 100
        self.yaxis.set_major_formatter(lambda value, _position: (label or plain_label)(100 * value))

    def logarithmic(self, which: str) -> None:
        """A logarithmic axis with at most six labelled ticks, at powers of ten if they suffice."""
        getattr(self, f"set_{which}scale")("log")
        axis = getattr(self, f"{which}axis")
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,), numticks=7))
        axis.set_major_formatter(power_label)
        axis.set_minor_locator(NullLocator())

    def whole_steps(self, ticks: int = 8) -> None:
        """An axis of training steps: whole numbers only."""
        self.whole = True
        self.xaxis.set_major_locator(
            MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        )
        self.set_xlabel("step")

    def label_bins(self, edges: Sequence[float], every: int = 2) -> None:
        """An axis of bins of μ, one unit each, labelled at their edges; if narrow, at one in
        `every`.
        """
        every = self.style.pick(1, every)
        labels = [f"{edge:g}".removeprefix("0") or "0" for edge in edges]
        labels = [
            label if index % every == len(labels) % every else ""
            for index, label in enumerate(labels)
        ]
        self.set_xlim(0, len(edges) - 1)
        self.set_xticks(range(len(edges)), labels)


class _RightPanel(Panel):
    """A panel whose vertical axis is at its right."""

    vertical = PanelRightAxis


def plain_label(value: float, _position: float = 0) -> str:
    """A tick on a linear axis, without the offset above the axis that matplotlib would use."""
    # A ratio very close to 1: only its distance from 1 fits beside the panel
    if 0 < abs(value - 1) < 5e-4:
        return f"{value - 1:+.2g}".replace("e-0", "e-").replace("-", "−")
    return f"{value:.7g}".replace("e-0", "e-").replace("-", "−")


def power_label(value: float, _position: float = 0) -> str:
    """A tick on a logarithmic axis: 0.01 and 10 in full, smaller and larger ones as 10⁻⁵."""
    if 1e-3 <= value < 1e4:
        return f"{value:.10f}".rstrip("0").rstrip(".") if value < 1 else f"{value:g}"
    exponent = round(log10(value))
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def width_of(text: str, points: float, *, bold: bool = False) -> float:
    """The largest width of a text, in CSS pixels: fitting letters to output dots adds some
    percent.
    """
    return 1.07 * measured(text, points, bold)[0]


def wrapped(text: str, room: float, points: float) -> list[str]:
    """Lines of whole words, each at most `room` CSS pixels wide unless a single word is wider."""
    lines: list[str] = []
    for word in text.split():
        if lines and width_of(f"{lines[-1]} {word}", points) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def short_names(
    names: Sequence[str], room: float, points: float, *, bold: bool = False
) -> list[str]:
    """Names for a figure, at most `room` CSS pixels wide: long ones lose their middle.

    Names that would then look alike also lose the end that they share, so that their parameters
    tell them apart.
    """
    drawable = [for_mathtext(name).replace(r"\$", "$") for name in names]
    short = [_cut(name, room, points, bold) for name in drawable]
    for text in {text for text in short if short.count(text) > 1}:
        same = [index for index, other in enumerate(short) if other == text]
        endings = zip(*(reversed(drawable[index]) for index in same), strict=False)
        shared = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, endings))
        for index in same:
            short[index] = _cut(
                drawable[index][: len(drawable[index]) - shared] + "…", room, points, bold
            )
    return [text.replace("$", r"\$") for text in short]


def _cut(name: str, room: float, points: float, bold: bool) -> str:
    text = name
    for kept in range(len(name) - 1, 1, -1):
        if width_of(text, points, bold=bold) <= room:
            break
        text = f"{name[: kept // 2]}…{name[len(name) - (kept - kept // 2) :]}"
    return text
