"""The figure that a plot draws on, and its panels: placed in CSS pixels, with readable titles and
axes.
"""

from __future__ import annotations

import io
import textwrap
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from mismatch_cli.base.text import for_mathtext
from mismatch_cli.report.drawing.style import CSS_PX, PT, Style

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 30, 44  # pixels around a panel with ordinary labels
LEGEND = 20  # pixels of a line of a legend
NAMES = 4  # names per line of the legend above a panel
_SUBJECT, _SUBJECT_LINE = 22, 15  # pixels below all panels: of the first line, of another
_LABEL = 34  # pixels of a rotated label of two lines
_NARROWEST = 300  # pixels of each of several columns, in small text
_LETTER, _BOLD = 0.6, 0.7  # the mean width of a letter, as a share of its size
HIGHEST = 0.9995  # of an axis of probabilities: higher ones are at the edge
_LOWEST, _RARE = (1e-5, 1e-3), 2e-3  # its lower end, and the share of tokens below it
_PROBABILITIES = {
    1e-5: "10⁻⁵", 1e-4: "10⁻⁴", 1e-3: "0.001", 0.01: "0.01", 0.1: "0.1", 0.5: "0.5",
    0.9: "0.9", 0.99: "0.99", 0.999: "0.999",
}  # fmt: skip
_CROWDED = (1e-4, 0.01, 0.999)  # a narrow axis has no room for their labels
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FEW_POWERS = 2  # of ten, on a stretched axis
_MOST_IN_FULL = 1e5  # larger tick labels have an exponent
_ROUNDING = 1e-12  # of a tick at 1


class Sheet(Figure):
    """A figure in a style, without panels yet."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style
        self.theme = style.theme
        self._subject_lines = style.pick(1, 2)
        self._subject = _SUBJECT + _SUBJECT_LINE * (self._subject_lines - 1)

    def _repr_html_(self) -> str:
        """The figure for a notebook, always on white."""
        uri = as_uri(self.svg(facecolor=self.theme.page))
        return f'<img src="{uri}" style="max-width: 100%" alt="Plot">'

    def save(self, target: Any, format_: str, **settings: Any) -> None:
        """Write the figure with the settings of its style, which also say how text is kept."""
        with rc_context(self.style.rc()):
            self.savefig(target, format=format_, **settings)

    def svg(self, **settings: Any) -> str:
        """The figure as SVG, with its text as text; the same data gives the same bytes."""
        content = io.StringIO()
        self.save(content, "svg", metadata={"Date": None, "Creator": "mismatch-cli"}, **settings)
        return content.getvalue()

    def panels(
        self,
        count: int,
        *,
        height: tuple[int, int] = (300, 300),
        columns: int = 2,
        legend: int = 0,
        names: float = 0,
        left: float = LEFT,
        right: float = RIGHT,
        between: int = BOTTOM,
        below: int = 0,
        cells: Sequence[int] = (),
    ) -> list[Panel]:
        """Equal panels in `columns` if wide, in one column if narrow; sets the figure's height.

        `height` of a panel in pixels, wide and narrow. Free pixels: `legend` between title and
        panel, `names` at the left of each row of panels, `left` and `right` of each panel,
        `between` below a panel above another, `below` more under the lowest. `cells` are the
        occupied places, row by row, if all columns fit; the others stay empty.
        """
        fitting = self.style.pick(columns, int(self.style.width // _NARROWEST))
        # Empty places would be holes in a figure with fewer columns: there, panels follow closely.
        occupied = cells if cells and fitting >= columns else range(count)
        columns = max(1, min(columns, fitting, max(occupied) + 1))
        high = self.style.pick(*height)
        if self.style.labelled:
            left += _LABEL
        row_height = TOP + legend + high + between
        cell_width = (self.style.width - names) / columns
        rows = max(occupied) // columns + 1
        figure_height = row_height * rows - between + BOTTOM + below + self._subject
        self.set_size_inches(self.style.width * CSS_PX, figure_height * CSS_PX)
        panels = []
        for cell in occupied:
            row, column = divmod(cell, columns)
            x = names + column * cell_width + left
            y = figure_height - row * row_height - TOP - legend - high
            panel = self._add_panel(x, y, cell_width - left - right, high)
            panel.set_room(names + left, legend)
            panels.append(panel)
        return panels

    def _add_panel(self, x: float, y: float, wide: float, high: float) -> Panel:
        """A panel at pixels from the lower left corner."""
        panel = Panel(self, (*self._share_of(x, y), *self._share_of(wide, high)))
        panel.room, panel.high = wide, high
        self.add_axes(panel)
        return panel

    def second_axis(self, panel: Panel) -> Panel:
        """An empty panel on top of another: with its vertical axis at the right, and no grid."""
        second = Panel(self, panel.get_position(), sharex=panel)
        self.add_axes(second)
        second.yaxis.tick_right()
        second.yaxis.set_label_position("right")
        second.xaxis.set_visible(False)
        second.grid(visible=False)
        second.spines[["left", "bottom"]].set_visible(False)
        second.spines.right.set_visible(True)
        second.room, second.high = panel.room, panel.high
        return second

    def add_subject(self, subject: str) -> None:
        """Print the subject below all panels, so that a copied picture says what it shows."""
        letters = letters_in(self.style.width - 2 * RIGHT, self.style.small)
        lines = textwrap.wrap(
            for_mathtext(subject), letters, max_lines=self._subject_lines, placeholder=" …"
        )
        look: dict[str, Any] = {"color": self.theme.muted, "fontsize": self.style.small}
        self.text(*self._share_of(self._margin, 7), "\n".join(lines), **look)

    def legend_below(self, look_of: Mapping[str, Mapping[str, Any]], columns: int) -> None:
        """A legend below all panels, for names too long to fit above one."""
        room = self.style.width / columns - 62
        names = short_names(list(look_of), letters_in(room, rcParams["legend.fontsize"]))
        handles = []
        for name, look in zip(names, look_of.values(), strict=True):
            handles.append(Line2D([], [], label=name, **look))
        corner = self._share_of(self._margin, self._subject)
        self.legend(handles=handles, loc="lower left", ncols=columns, bbox_to_anchor=corner)

    @property
    def _margin(self) -> int:
        """Where texts begin: at the panels if wide, at the edge if narrow."""
        return self.style.pick(LEFT, 8)

    def _share_of(self, x: float, y: float) -> tuple[float, float]:
        """Pixels from the lower left corner, as figure coordinates."""
        width, height = self.get_size_inches() / CSS_PX
        return x / width, y / height


def as_uri(svg: str) -> str:
    """An SVG as the source of an image."""
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def legend_below_height(entries: int, columns: int) -> int:
    """Pixels for a legend below all panels."""
    return LEGEND * ceil(entries / columns)


def legend_height(names: Sequence[str], columns: int = NAMES) -> int:
    """Pixels for a legend above a panel; a single line needs none."""
    if len(names) <= 1:
        return 0
    return legend_below_height(len(names), columns)


class Panel(Axes):
    """Axes in a sheet, with plain tick labels."""

    def __init__(self, figure: Sheet, *position: Any, **settings: Any) -> None:
        super().__init__(figure, *position, **settings)
        self.style = figure.style
        self.theme = figure.theme
        self.room, self.high = 0.0, 0.0  # pixels
        self.factor = 1.0  # from values to the labels of the vertical axis
        self.whole = False  # the horizontal axis has whole steps only
        self.xaxis.set_major_formatter(plain_label)
        self.yaxis.set_major_formatter(plain_label)
        self.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))

    def set_room(self, left: float, legend: int) -> None:
        """The pixels that are free at its left and for its legend."""
        self._left, self._legend = left, legend
        # Titles begin above the panel if wide; above its labels if narrow, which gives more room
        self.flush = self.style.pick(0.0, (8 - left) / self.room)

    def indent(self, pixels: float) -> None:
        """Narrow the panel by pixels at its left, for the names of its rows."""
        box = self.get_position()
        share = pixels / self.style.width
        self.set_position((box.x0 + share, box.y0, box.width - share, box.height))
        self.room -= pixels
        self.set_room(self._left + pixels, self._legend)

    def headline(
        self, text: str, short: str = "", note: str = "", *, is_axis: bool = True, **legend: Any
    ) -> None:
        """The title (`short` if narrow), which replaces the label of the vertical axis if it names
        that axis.

        The note is at its right, and the legend of the lines drawn so far below it.
        """
        pad = (7 + self._legend) * PT
        if is_axis and self.style.labelled:
            letters = letters_in(self.high, rcParams["axes.labelsize"])
            label = text if len(text) <= 2 * letters else short or text
            self.set_ylabel(textwrap.fill(label, letters))
        else:
            self.set_title(self.style.pick(text, short or text), pad=pad, x=self.flush)
        look: dict[str, Any] = {"fontsize": self.style.small, "fontweight": "normal"}
        self.set_title(note, loc="right", pad=pad, color=self.theme.muted, **look)
        # matplotlib warns of a legend without a named line.
        has_names = bool(self.get_legend_handles_labels()[0])
        if self._legend and has_names:
            corner = self.flush, 1.0
            self.legend(loc="lower left", bbox_to_anchor=corner, **{"ncols": NAMES} | legend)

    @property
    def title_letters(self) -> int:
        """How many letters of a title fit above the panel."""
        room = self.room * (1 - self.flush)
        return letters_in(room * _LETTER / _BOLD, rcParams["axes.titlesize"])

    def headline_name(self, name: str, note: str = "") -> None:
        """A name as title, shortened to the room there is beside the note."""
        (short,) = short_names([name], max(8, self.title_letters - len(note)))
        self.headline(short, is_axis=False, note=note)

    def set_xlabel(self, xlabel: str, *args: Any, **text: Any) -> Any:
        """A label centred below the panel, or aligned with its right end if it is wider."""
        fits = width_of(xlabel, rcParams["axes.labelsize"]) <= self.room
        return super().set_xlabel(xlabel, *args, loc="center" if fits else "right", **text)

    def in_percent(self) -> None:
        """Label vertical ticks in percent."""
        self.factor = 100
        self.yaxis.set_major_formatter(lambda value, _position: plain_label(100 * value))

    def logarithmic(self, which: str) -> None:
        """A logarithmic axis with at most six labelled ticks, at powers of ten if they suffice."""
        getattr(self, f"set_{which}scale")("log")
        axis = getattr(self, f"{which}axis")
        low, high = axis.get_view_interval()
        digits = (1, 2, 5) if high / low < 100 else (1,)
        axis.set_major_locator(LogLocator(subs=digits, numticks=7))
        axis.set_major_formatter(power_label)
        axis.set_minor_locator(NullLocator())

    def stretch(self, linear: float, limits: tuple[float, float]) -> None:
        """A vertical axis that is linear within `linear` of 0 and logarithmic beyond, so that it
        can show 0; in percent if it already is.
        """
        self.set_yscale("asinh", linear_width=linear)
        self.set_ylim(*limits)
        self.yaxis.set_major_locator(FixedLocator(_stretched_ticks(linear, *limits)))
        self.yaxis.set_minor_locator(NullLocator())
        self.yaxis.set_major_formatter(lambda value, _position: power_label(self.factor * value))

    def spread_probability(self, lowest: float, which: str = "x") -> None:
        """Stretch axes of probabilities (`x` or `xy`) from `lowest` on towards 0 and 1."""
        crowded = self.style.pick((), _CROWDED)
        for axis in which:
            omitted = crowded if axis == "x" else ()
            label_of = {}
            for tick, label in _PROBABILITIES.items():
                # The lower end keeps its label, or a reader could not tell where the axis begins.
                if tick == lowest or (tick > lowest and tick not in omitted):
                    label_of[tick] = label
            self.set(**{f"{axis}scale": "logit", f"{axis}lim": (lowest, HIGHEST)})
            ticks, names = list(label_of), list(label_of.values())
            self.set(**{f"{axis}ticks": ticks, f"{axis}ticklabels": names})
            getattr(self, f"{axis}axis").set_minor_locator(NullLocator())

    def whole_steps(self, ticks: int = 8) -> None:
        """An axis of training steps: whole numbers only."""
        self.whole = True
        locator = MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        self.xaxis.set_major_locator(locator)
        self.set_xlabel("step")

    def label_bins(self, edges: Sequence[float], every: int = 2) -> None:
        """An axis of bins of μ, one unit each, labelled at their edges; if narrow, at one in
        `every`.
        """
        every = self.style.pick(1, every)
        first = len(edges) % every
        labels = [f"{edge:g}".removeprefix("0") or "0" for edge in edges]
        self.set_xlim(0, len(edges) - 1)
        self.set_xticks(range(first, len(edges), every), labels[first::every])

    def name_rows(self, names: Sequence[str]) -> None:
        """A named row for each unit of the vertical axis, the first on top."""
        self.set_yticks(range(len(names)), names, fontsize=self.style.small)
        self.set_ylim(len(names) - 0.5, -0.5)
        self.grid(visible=False, axis="y")
        self.tick_params(axis="y", length=0)

    def drawn_values(self) -> np.ndarray:
        """The values of every line."""
        return np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in self.lines])

    def name_threshold(self, name: str, place: float, row: int = 0, side: str = "right") -> None:
        """Write the name of a threshold at its `side`, `row` lines below the top of the panel.

        Its coordinates, data and axes fraction, are how `words.py` recognises a threshold.
        """
        align, beside = ("left", 3) if side == "right" else ("right", -3)
        self.annotate_beside(
            name,
            (place, 1),
            (beside, -2 - 11 * row),
            xycoords=("data", "axes fraction"),
            color=self.theme.muted,
            ha=align,
            va="top",
            zorder=6,
            bbox={"facecolor": self.theme.page, "linewidth": 0, "pad": 0.5},
        )

    def annotate_beside(
        self, text: str, place: tuple[float, float], offset: tuple[float, float], **look: Any
    ) -> None:
        """A small text, `offset` points from a place in the data."""
        settings: dict[str, Any] = {"fontsize": self.style.small, "textcoords": "offset points"}
        self.annotate(text, place, xytext=offset, **settings | look)


def _stretched_ticks(linear: float, low: float, high: float) -> list[float]:
    """0, and sizes beyond the linear part: powers of ten, if they are few also three times
    those.
    """
    first = floor(log10(linear))
    last = floor(log10(max(-low, high)))
    digits = (1, 3) if last - first <= _FEW_POWERS else (1,)
    size_N = np.outer(10.0 ** np.arange(first, last + 1), digits).ravel()
    beyond_N = size_N[size_N >= linear]
    tick_N = np.concatenate([-beyond_N, [0.0], beyond_N])
    return list(tick_N[(tick_N >= low) & (tick_N <= high)])


def lowest_of(log_mu_N: np.ndarray) -> float:
    """The lower end of an axis of probabilities: a power of ten below nearly all of them."""
    finite_N = log_mu_N[np.isfinite(log_mu_N)]
    exponent = np.floor(np.quantile(finite_N, _RARE) / np.log(10)) if len(finite_N) else -3
    return float(np.clip(10.0**exponent, *_LOWEST))


def plain_label(value: float, _position: float = 0) -> str:
    """A tick on a linear axis, without the offset above the axis that matplotlib would use."""
    # A ratio very close to 1: only its distance from 1 fits beside the panel.
    if _ROUNDING < abs(value - 1) < 5e-4:
        text = f"{value - 1:+.2g}"
    elif abs(value) >= _MOST_IN_FULL:
        text = f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    else:
        text = f"{value:.5g}"
    return text.replace("e-0", "e-").replace("-", "−")


def power_label(value: float, _position: float = 0) -> str:
    """A tick on a logarithmic axis: 0.01 and 10 in full, smaller and larger ones as 10⁻⁵."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}".replace("-", "−")
    sign = "−" if value < 0 else ""
    exponent = str(round(log10(abs(value))))
    return f"{sign}10" + exponent.translate(_RAISED)


def width_of(text: str, points: float) -> float:
    """About how wide a text is, in CSS pixels."""
    return len(text) * _LETTER * points / PT


def letters_in(room: float, points: float) -> int:
    """About how many letters fit into so many CSS pixels, at least 4."""
    return max(4, int(room / width_of("m", points)))


def short_names(names: Sequence[str], letters: int) -> list[str]:
    """Names for a figure, of so many letters at most: long ones lose their middle.

    Names that would then look alike also lose the end that they share, so that their parameters
    tell them apart.
    """
    # An escaped $ is two characters for one letter: it is escaped again after the shortening.
    drawable = [for_mathtext(name).replace(r"\$", "$") for name in names]
    short = [_without_middle(name, letters) for name in drawable]
    for text, count in Counter(short).items():
        if count == 1:
            continue
        alike = [place for place, other in enumerate(short) if other == text]
        shared = _shared_ending([drawable[place] for place in alike])
        for place in alike:
            name = drawable[place]
            short[place] = _without_middle(name[: len(name) - shared] + "…", letters)
    return [text.replace("$", r"\$") for text in short]


def _shared_ending(names: Sequence[str]) -> int:
    """How many letters at the end all names share."""
    shared = 0
    for letters in zip(*map(reversed, names), strict=False):
        if len(set(letters)) > 1:
            break
        shared += 1
    return shared


def _without_middle(name: str, letters: int) -> str:
    if len(name) <= letters:
        return name
    begin = (letters - 1) // 2
    return f"{name[:begin]}…{name[len(name) - (letters - 1 - begin) :]}"
