"""Axes that draw their ticks, grid and labels at once; matplotlib would make five artists per
tick.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis, XAxis, YAxis
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Bbox, IdentityTransform

_LENGTH, _PAD = 3.5, 3.5  # points: the length of a tick, and its distance to the label
_CLOSE = 1e-9  # of an axis: how far rounding may put a tick beyond its end
_WIDTH = 0.7  # points of ticks and of the grid


class Words(Artist):
    """Short texts in one style, each with its x and y (in pixels by default), drawn as one
    moving text.
    """

    zorder = Text.zorder

    def __init__(self, words: Sequence[tuple[float, float, str]], **look: Any) -> None:
        super().__init__()
        self._words, self._text = words, Text(fontfamily="DejaVu Sans", **look)

    def placed(self) -> Iterator[Text]:
        """The text, moved to each place."""
        figure: Any = self.get_figure()
        self._text.set_figure(figure)
        self._text.set_transform(self.get_transform())
        for x, y, word in self._words:
            self._text.set_position((x, y))
            self._text.set_text(word)
            yield self._text

    def draw(self, renderer: Any) -> None:
        for text in self.placed():
            text.draw(renderer)


class _DrawnAtOnce(Axis):
    """Major ticks only; `tick_params` can change their `length` and `labelsize`, and the grid."""

    axes: Any
    major: Any
    majorTicks: Any = ()
    minorTicks: Any = ()
    _update_label_position: Any
    across: int  # the coordinate that all ticks share: 0 for x
    aligned: Mapping[str, str]  # alignment of labels to ticks
    names: Sequence[str] = ()  # of the ticks, if they are not numbers
    at_end = False  # ticks are at the right end of the panel, not at its beginning

    def get_major_ticks(self, numticks: int | None = None) -> list[Any]:  # noqa: ARG002
        return []

    get_minor_ticks = get_major_ticks

    def set_ticklabels(self, labels: Any, *, fontsize: float | None = None, **text: Any) -> Any:
        if fontsize is not None:
            self.set_tick_params(labelsize=fontsize)
        self.names = [str(label) for label in labels]
        return super().set_ticklabels(labels, **text)

    def labels(self) -> Words:
        """The tick labels."""
        style, looks = self.axes.style, self.get_tick_params()
        across = self._outside(looks.get("length", _LENGTH) + _PAD)
        words = Words(
            [(*self._point(place, across), text) for place, text in self._ticks()],
            color=style.theme.muted,
            fontsize=looks.get("labelsize", style.tick_label),
            **self.aligned,
        )
        words.set_figure(self.axes.figure)
        return words

    def draw(self, renderer: Any) -> None:
        looks, theme, start = self.get_tick_params(), self.axes.style.theme, self._start()
        length = looks.get("length", _LENGTH)
        places = [place for place, _ in self._ticks()]
        if looks["gridOn"]:
            self._draw_lines(
                renderer,
                places,
                (start, self.axes.bbox.max[self.across]),
                theme.grid,
                self.axes.bbox,
            )
        if length:
            self._draw_lines(renderer, places, (self._outside(length), start), theme.muted)
        self.labels().draw(renderer)
        if self.label.get_text():
            self._update_label_position(renderer)
            self.label.draw(renderer)

    def _draw_lines(
        self,
        renderer: Any,
        places: Sequence[float],
        ends: tuple[float, float],
        colour: str,
        clip: Bbox | None = None,
    ) -> None:
        if not places:
            return
        gc = renderer.new_gc()
        gc.set_foreground(colour)
        gc.set_linewidth(_WIDTH)
        gc.set_clip_rectangle(clip)
        points = [self._point(place, end) for place in places for end in ends]
        renderer.draw_path(
            gc, Path(points, [Path.MOVETO, Path.LINETO] * len(places)), IdentityTransform()
        )
        gc.restore()

    def _ticks(self) -> list[tuple[float, str]]:
        """The place of each tick along the axis, in pixels, and its label."""
        values = self.get_majorticklocs()
        labels = self.major.formatter.format_ticks(values)
        low, high = self.get_transform().transform(self.get_view_interval())
        share = (self.get_transform().transform(np.asarray(values, dtype=np.float64)) - low) / (
            high - low
        )
        first, last = self.axes.bbox.min[1 - self.across], self.axes.bbox.max[1 - self.across]
        inside = (share > -_CLOSE) & (share < 1 + _CLOSE)
        places = (first + share[inside] * (last - first)).tolist()
        return list(zip(places, compress(labels, inside), strict=True))

    def _start(self) -> float:
        """The place of the axis, in pixels."""
        box = self.axes.bbox
        return float((box.max if self.at_end else box.min)[self.across])

    def _outside(self, points: float) -> float:
        """A place outside the panel, so far from the axis."""
        pixels = points * self.axes.figure.dpi / 72
        return self._start() + (pixels if self.at_end else -pixels)

    def _point(self, along: float, across: float) -> tuple[float, float]:
        return (across, along) if self.across == 0 else (along, across)

    def _update_ticks(self) -> list[Any]:
        return []

    def _get_ticklabel_bboxes(self, _ticks: Any, renderer: Any) -> tuple[list[Bbox], list[Bbox]]:
        """The boxes by which matplotlib places the axis label: of labels at the left or below,
        and of those at the right.
        """
        boxes = [label.get_window_extent(renderer) for label in self.labels().placed()]
        return ([], boxes) if self.at_end else (boxes, [])


class PanelXAxis(_DrawnAtOnce, XAxis):
    across, aligned = 1, {"ha": "center", "va": "top"}


class PanelYAxis(_DrawnAtOnce, YAxis):
    across, aligned = 0, {"ha": "right", "va": "center_baseline"}


class PanelRightAxis(_DrawnAtOnce, YAxis):
    """A second vertical axis, at the right end of a panel."""

    across, aligned, at_end = 0, {"ha": "left", "va": "center_baseline"}, True
