"""Placing panels in CSS pixels, and axes that read well; without a layout engine, which would draw everything twice."""

from __future__ import annotations

from math import log10
from typing import TYPE_CHECKING

from mismatch_cli.report.plots._style import CSS_PX, Style
from mismatch_cli.text import for_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 44  # pixels around each panel, for its labels
_SUBJECT = 22  # pixels for the line below all panels


def panels(figure: Figure, style: Style, count: int, *, height: int = 300, legend: int = 0) -> list[Axes]:
    """Set the figure's size and add panels of `height` pixels: two columns when wide, one below the other when narrow.

    `legend` pixels are kept free above each panel, below its title.
    """
    columns = min(2, count) if style.wide else 1
    rows = -(-count // columns)
    row_height = height + _TOP + legend + _BOTTOM
    width, total = style.layout.width, rows * row_height + _SUBJECT
    figure.set_size_inches(width * CSS_PX, total * CSS_PX)
    cell = width / columns
    axes = []
    for index in range(count):
        row, column = divmod(index, columns)
        bottom = total - (row + 1) * row_height + _BOTTOM
        left = column * cell + _LEFT
        box = (left / width, bottom / total, (cell - _LEFT - _RIGHT) / width, height / total)
        axes.append(figure.add_axes(box))
        axes[-1].xaxis.set_major_formatter(plain_label)
        axes[-1].yaxis.set_major_formatter(plain_label)
    return axes


def add_subject(figure: Figure, style: Style, subject: str) -> None:
    """Print who is compared below all panels, so that a copied picture says what it shows."""
    width, height = figure.get_size_inches() / CSS_PX
    left = _flush_left(style)
    room = int((width - left - _RIGHT) * CSS_PX * 72 / (0.6 * style.small))  # an average letter is 0.6 of the size wide
    text = subject if len(subject) <= room else subject[: room - 1] + "…"
    figure.text(left / width, 7 / height, for_mathtext(text), color=style.theme.muted, fontsize=style.small)


def title(axes: Axes, text: str, style: Style, legend: int = 0, note: str = "") -> None:
    """The panel's title: it names the vertical axis, which needs no turned label then; a note stands at the right."""
    pad = (7 + legend) * 0.75
    axes.set_title(text, pad=pad, x=_flush_left_of(axes, style))
    axes.set_title(note, loc="right", pad=pad, fontsize=style.small, fontweight="normal", color=style.theme.muted)


def legend_above(axes: Axes, style: Style) -> None:
    """The legend in one line between title and panel."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(_flush_left_of(axes, style), 1.0), ncols=4, borderaxespad=0.25, borderpad=0.1,
        handlelength=1.5, handletextpad=0.5, columnspacing=1.3,
    )  # fmt: skip


def _flush_left(style: Style) -> int:
    """Where titles begin, in pixels: above the panel when wide, above its labels when narrow, which gives more room."""
    return _LEFT if style.wide else 8


def _flush_left_of(axes: Axes, style: Style) -> float:
    """The same in the panel's own coordinates."""
    return (_flush_left(style) - _LEFT) / (axes.get_position().width * style.layout.width)


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


def logarithmic(axes: Axes, which: str) -> None:
    """A logarithmic axis with at most six labelled ticks, at whole powers of ten where they suffice."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    few = high / low < 100
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=7))
    axis.set_major_formatter(power_label)
    axis.set_minor_locator(NullLocator())
