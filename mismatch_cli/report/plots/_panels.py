"""The figure that a plot draws on and its panels, placed in CSS pixels, with titles and axes that read well.

No layout engine: it would draw everything twice.
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

from mismatch_cli.report.plots._axis import PanelXAxis, PanelYAxis
from mismatch_cli.report.plots._style import CSS_PX, Style
from mismatch_cli.report.plots._svg import measured, to_svg
from mismatch_cli.text import for_mathtext

LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44  # pixels around a panel with ordinary labels
LEGEND = 20  # pixels for a line of names between title and panel
_SUBJECT, _SUBJECT_LINE = 22, 15  # pixels for the line below all panels, and for each more of them
_NAMES = 4  # in a line of the legend above a panel
_LINE = 18  # pixels of a line of the legend below all panels
_CELL = 300  # pixels that a panel beside another one needs where text is small
_LABEL = 20  # pixels of a turned label of two lines


class Box(NamedTuple):
    """Where a panel lies, in CSS pixels from the upper left corner of the figure."""

    left: float
    top: float
    width: float
    height: float
    legend: int = 0  # above the panel, for the names of its lines


class Sheet(Figure):
    """A figure in a style, still without panels; of those it may show `only` one, by its number."""

    def __init__(self, style: Style, only: int | None = None) -> None:
        super().__init__()
        self.style, self.theme, self._only = style, style.theme, only
        # Titles begin above the panel when wide, above its labels when narrow, which gives more room.
        self.flush = style.pick(LEFT, 8)
        self.subject_lines = style.pick(1, 2)
        self.subject_height = _SUBJECT + (self.subject_lines - 1) * _SUBJECT_LINE

    def _repr_html_(self) -> str:
        """What a notebook shows: the picture on white, whatever the notebook's colours are."""
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
        cells: Sequence[int] = (),
    ) -> list[Panel]:
        """Panels in `columns` when wide, one below the other when narrow, `height` pixels high, wide and narrow.

        `legend` pixels are kept free above each panel, below its title; `between` those below a panel that has another
        one under it, `below` more under the lowest, `label` at its left for the turned name of its axis.
        `cells`: the places that are taken, row by row, where all columns have room; the others stay empty.
        """
        fitting = self.style.pick(columns, int(self.style.width // _CELL) if self._only is None else 1)
        taken = cells if cells and fitting >= columns else range(count)
        columns, high = max(1, min(columns, max(taken) + 1, fitting)), self.style.pick(*height)
        left = LEFT + (0 if self.style.labelled else label)
        cell, row = self.style.width / columns, TOP + legend + high + between
        boxes = [
            Box(left + i % columns * cell, i // columns * row + TOP + legend, cell - left - RIGHT, high, legend)
            for i in taken
        ]
        return self.place(boxes, BOTTOM + below)

    def place(self, boxes: Sequence[Box], below: float = BOTTOM) -> list[Panel]:
        """Set the figure's size and add a panel for each box, with `below` pixels under the lowest, and the subject."""
        if self._only is not None:
            chosen = boxes[self._only]
            boxes = [chosen._replace(top=TOP + chosen.legend)] * len(boxes)
        if self.style.labelled:
            boxes = [box._replace(left=box.left + _LABEL, width=box.width - _LABEL) for box in boxes]
        height = max(box.top + box.height for box in boxes) + below + self.subject_height
        self.set_size_inches(self.style.width * CSS_PX, height * CSS_PX)
        panels = [Panel(self, box, height) for box in boxes]
        for number, axes in enumerate(panels):
            self.add_axes(axes)
            axes.set_visible(self._only in (None, number))
        return panels

    def add_subject(self, subject: str) -> None:
        """Print who is compared below all panels, so that a copied picture says what it shows."""
        small, room, text = self.style.small, self.style.width - self.flush - RIGHT, for_mathtext(subject)
        if (width := width_of(text, small)) > room:
            letters = int(0.95 * len(text) * room / width)  # some lines are of wider ones
            text = "\n".join(wrap(text, letters, max_lines=self.subject_lines, placeholder="…"))
        self.text(*self._fraction(self.flush, 7), text, color=self.theme.muted, fontsize=small)

    def legend_below(
        self, look_of: Mapping[str, Mapping[str, Any]], columns: int, *, beside: int = 62, **spacing: float
    ) -> None:
        """The names of all lines, too long to stand above a panel, below all; `beside` pixels are not theirs."""
        names = short_names(list(look_of), (self.style.width - LEFT) / columns - beside, rcParams["legend.fontsize"])
        handles = [Line2D([], [], label=name, **look) for name, look in zip(names, look_of.values(), strict=True)]
        self.legend(
            handles=handles, loc="lower left", ncols=columns,
            bbox_to_anchor=self._fraction(self.flush, self.subject_height),
            **{"borderaxespad": 0, "borderpad": 0.2, "handlelength": 2.4, "columnspacing": 1.8, "labelspacing": 0.35}
            | spacing,
        )  # fmt: skip

    def _fraction(self, x: float, y: float) -> tuple[float, float]:
        """Pixels from the lower left corner in the figure's own coordinates."""
        width, height = self.get_size_inches() / CSS_PX
        return x / width, y / height


def legend_below_height(entries: int, columns: int) -> int:
    """Pixels below all panels for the names of the lines in them."""
    return _LINE * -(-entries // columns)


def legend_height(names: Collection[str], columns: int = _NAMES) -> int:
    """Pixels above a panel for the names of its lines; a single one needs none."""
    return LEGEND * -(-len(names) // columns) if len(names) > 1 else 0


class Panel(Axes):
    """Axes in a sheet, with plain labels at their ticks."""

    def __init__(self, sheet: Sheet, box: Box, height: float) -> None:
        width = sheet.style.width
        bottom = height - box.top - box.height
        super().__init__(sheet, (box.left / width, bottom / height, box.width / width, box.height / height))
        self.style, self.theme, self.box = sheet.style, sheet.theme, box
        self.flush = (sheet.flush - LEFT) / box.width  # where its title begins, in its own coordinates
        for side in ("left", "bottom"):  # as the first tick of matplotlib's would do
            self.spines[side].set_position(("outward", 0))
        self.xaxis.set_major_formatter(plain_label)
        self.yaxis.set_major_formatter(plain_label)

    def _init_axis(self) -> None:
        self.xaxis, self.yaxis = PanelXAxis(self, clear=False), PanelYAxis(self, clear=False)
        for side, spine in self.spines.items():
            spine.register_axis(self.xaxis if side in ("bottom", "top") else self.yaxis)

    @property
    def headline_room(self) -> float:
        """Pixels from where the title begins to the right end of the panel."""
        return float(self.box.width * (1 - self.flush))

    def headline(self, text: str, short: str = "", note: str = "", *, is_axis: bool = True, **legend: Any) -> None:
        """The title, the short one when narrow: where it is the name of the vertical axis, that has no label then.

        A note stands at its right; below it the names of the lines that have been drawn, if room was kept for them.
        """
        pad = (7 + self.box.legend) * 0.75
        if is_axis and self.style.labelled:
            self.set_ylabel(self._in_lines(text, short), linespacing=1.1)
        else:
            self.set_title(self.style.pick(text, short or text), pad=pad, x=self.flush)
        self.set_title(
            note, loc="right", pad=pad, fontsize=self.style.small, fontweight="normal", color=self.theme.muted
        )
        if self.box.legend and self.get_legend_handles_labels()[0]:
            spacing = {"borderaxespad": 0.25, "handlelength": 1.5, "handletextpad": 0.5, "columnspacing": 1.3}
            self.legend(
                loc="lower left", bbox_to_anchor=(self.flush, 1.0), borderpad=0.1,
                **{"ncols": _NAMES} | spacing | legend,
            )  # fmt: skip

    def set_xscale(self, value: Any, **how: Any) -> None:
        super().set_xscale(value, **how)
        if value == "log":
            self.xaxis.set_major_formatter(power_label)  # matplotlib's writes markup

    def set_yscale(self, value: Any, **how: Any) -> None:
        super().set_yscale(value, **how)
        if value == "log":
            self.yaxis.set_major_formatter(power_label)

    def set_xlabel(self, xlabel: str, *args: Any, **text: Any) -> Any:
        """Below the middle of the panel; what is wider than the panel ends with it."""
        loc = "center" if width_of(xlabel, rcParams["axes.labelsize"]) <= self.box.width else "right"
        return super().set_xlabel(xlabel, *args, **{"loc": loc} | text)

    def _in_lines(self, text: str, short: str) -> str:
        """As a label beside the panel: in one line or two, the short text where even they are too long."""
        points, label = rcParams["axes.labelsize"], text
        for label in (text, short or text):
            lines = wrapped(label, self.box.height, points)
            if len(lines) <= 2:
                return "\n".join(lines)
        return label

    def drawn_values(self) -> np.ndarray:
        """The values of every line."""
        return np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in self.lines])

    def in_percent(self, label: Callable[[float], str] | None = None) -> None:
        """Shares with vertical ticks in percent."""
        self.yaxis.set_major_formatter(lambda value, _position: (label or plain_label)(100 * value))

    def logarithmic(self, which: str) -> None:
        """A logarithmic axis with at most six labelled ticks, at whole powers of ten where they suffice."""
        getattr(self, f"set_{which}scale")("log")
        axis = getattr(self, f"{which}axis")
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,), numticks=7))
        axis.set_major_formatter(power_label)
        axis.set_minor_locator(NullLocator())

    def whole_steps(self, ticks: int = 8) -> None:
        """An axis of training steps: whole numbers only."""
        self.xaxis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        self.set_xlabel("step")

    def label_bins(self, rows: Sequence[Mapping[str, Any]], every: int = 2) -> None:
        """An axis of bins of μ, one unit each: their edges, on a narrow one one in `every`."""
        edges = [*(row["mu_low"] for row in rows), rows[-1]["mu_high"]]
        every = self.style.pick(1, every)
        labels = [f"{edge:g}".removeprefix("0") or "0" for edge in edges]
        labels = [label if index % every == len(labels) % every else "" for index, label in enumerate(labels)]
        self.set_xlim(0, len(rows))
        self.set_xticks(range(len(edges)), labels)


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


def width_of(text: str, points: float, *, bold: bool = False) -> float:
    """How wide a text may be, in CSS pixels: letters are fitted to the dots of the output, which takes some percent."""
    return 1.07 * measured(text, points, bold)[0]


def wrapped(text: str, room: float, points: float) -> list[str]:
    """Lines of whole words, each at most `room` CSS pixels wide if its words are."""
    lines: list[str] = []
    for word in text.split():
        if lines and width_of(f"{lines[-1]} {word}", points) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


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
