"""Panels at given places in CSS pixels, and names that fit beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from mismatch_cli.report.plots._panels import plain_label
from mismatch_cli.report.plots._style import CSS_PX, Style
from mismatch_cli.text import for_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44  # pixels around a panel with ordinary labels
SUBJECT = 22  # pixels for the line below all panels
TITLE_PAD = 20  # points from a panel to its title, with one line for a key between them


class Box(NamedTuple):
    """Where a panel lies, in CSS pixels from the upper left corner of the figure."""

    left: float
    top: float
    width: float
    height: float


def place(figure: Figure, style: Style, boxes: Sequence[Box], below: float) -> list[Axes]:
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


def note_silent(figure: Figure, style: Style, count: int) -> None:
    """Say at the upper right how many algorithms block nothing, and are not drawn."""
    if count:
        text = f"{count} block{'s' * (count == 1)} nothing" + (": left out" if style.wide else "")
        width, height = figure.get_size_inches() / CSS_PX
        figure.text(
            (width - RIGHT) / width, (height - 27) / height, text, ha="right", fontsize=style.small,
            color=style.theme.muted,
        )  # fmt: skip


def width_of(text: str, points: float, *, bold: bool = False) -> float:
    """How wide a text may be, in CSS pixels: letters are fitted to the dots of the output, which takes some percent."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

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
