"""Drawing a plot in a test and checking it: no warnings, and texts legible, inside the figure
and apart.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from mismatch_cli.report.drawing.style import Style, paper
from mismatch_cli.report.figures import draw
from mismatch_cli.report.picture_files import page_svg

PAPER = paper(3.25 * 96)  # the column width of most conferences


def drawn(plot: ModuleType, data: Any, style: Style) -> Any:
    """The fully drawn figure; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw(plot, data, style)
        check_colours(page_svg(figure))
        FigureCanvasAgg(figure).draw()
    return figure


def check_colours(svg: str) -> None:
    """Only named colours of the theme: others would look the same in light and dark."""
    assert re.findall(r"(?:fill|stroke): (?!none|var\(--|url\()[^;\"]*", svg) == []


def contrast(one: str, other: str) -> float:
    """WCAG 2.1 contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        channels = np.array(to_rgb(colour))
        linear = np.where(
            channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def texts_of(figure: Any) -> Iterator[Text]:
    """All drawn texts."""
    yield from figure.texts
    for legend in figure.legends:
        yield from legend.get_texts()
    for axes in figure.axes:
        yield from (artist for artist in axes.get_children() if isinstance(artist, Text))
        yield from axes.get_legend().get_texts() if axes.get_legend() else ()
        for axis in (axes.xaxis, axes.yaxis):
            if axes.axison and axis.get_visible():
                yield axis.label
                yield from tick_labels(axis)


def tick_labels(axis: Any) -> Iterator[Text]:
    """The labels of the ticks within the view; none if they are switched off."""
    low, high = sorted(axis.get_view_interval())
    margin = 1e-9 * (high - low)
    for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False):
        if low - margin <= place <= high + margin:
            yield label


def check_texts(figure: Any, style: Style) -> None:
    """Texts are legible, inside the figure, and do not overlap."""
    width, height = figure.get_size_inches()
    assert round(width * 96, 3) == style.width
    # Of everything that is drawn, in inches
    box = figure.get_tightbbox()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -0.01
    texts = [text for text in texts_of(figure) if text.get_text().strip() and text.get_visible()]
    for text in texts:
        assert text.get_fontsize() >= (7 if style.labelled else 7.8), text.get_text()
    x0, y0, x1, y1 = np.array([text.get_window_extent().extents for text in texts]).T
    across = np.minimum(x1[:, None], x1) - np.maximum(x0[:, None], x0)
    up = np.minimum(y1[:, None], y1) - np.maximum(y0[:, None], y0)
    pairs = np.argwhere(np.triu((across > 1) & (up > 1.5), k=1))
    assert [(texts[one].get_text(), texts[other].get_text()) for one, other in pairs] == []
