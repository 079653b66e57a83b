"""Distance between the residual streams of engine and trainer by layer, and what each block
adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
    from mismatch_cli.bisect.studies.bisection_result import StreamErrors

STUDY = "bisection"
SECTION = "Modules"
PLACE = 3
TITLE = "Error by layer"
DATA = "the modules that bisect read, layer by layer"
CAPTION = (
    "‖engine − trainer‖ / ‖trainer‖ of the residual stream in float64, over the responses whose "
    "modules were compared. Left (top on a phone): the error accumulated before the attention "
    "and the MLP of each layer, and after its MLP. Right (bottom): the error that attention and "
    "MLP of each layer add. A block that stands out computes differently; a straight climb is "
    "accumulated rounding. Axes are logarithmic; bit-equal values have no mark."
)
_MARKED = 40  # layers up to which every point is marked
_MARGIN = 1.6  # times, around the values
_DECADES = 100.0  # the smallest range of an axis


def needs(data: BisectionAnalysis) -> bool:
    return any(map(len, (_inherited(data), *_added(data).values())))


def draw(figure: Sheet, data: BisectionAnalysis) -> None:
    panels = figure.panels(2, height=(250, 190), legend=LEGEND, between=66)
    layers = len(_layers(data))
    mark: dict[str, Any] = {"marker": "o", "markersize": 3.5} if layers <= _MARKED else {}
    if len(stream := _inherited(data)):
        panels[0].plot(*stream.T, color=figure.theme.purple, label="residual stream", **mark)
    colours = figure.theme.blue, figure.theme.orange
    for (block, added), colour in zip(_added(data).items(), colours, strict=True):
        if len(added):
            panels[1].plot(*added.T, color=colour, label=block, **mark)
    for axes in panels:
        _scale(axes, layers)
    panels[0].headline("Inherited: error of the stream, relative", "Inherited error, relative")
    panels[1].headline(
        "Added by each block, relative to the stream", "Added by each block, relative"
    )


def _layers(data: BisectionAnalysis) -> Sequence[StreamErrors]:
    return () if data.modules is None else data.modules.layers


def _inherited(data: BisectionAnalysis) -> np.ndarray:
    """Layer and error at each point of the stream with an error, [N, 2]."""
    errors = []
    for row in _layers(data):
        points = (row.before, row.attention, row.mlp)
        errors += [
            (row.layer + place / 3, point.inherited)
            for place, point in enumerate(points)
            if point is not None
        ]
    return _above_0(errors)


def _added(data: BisectionAnalysis) -> dict[str, np.ndarray]:
    """Layer and error that each block adds, [N, 2], by the name of the block."""
    rows = _layers(data)
    return {
        "attention": _above_0([(row.layer, row.attention.added) for row in rows if row.attention]),
        "MLP": _above_0([(row.layer, row.mlp.added) for row in rows if row.mlp]),
    }


def _above_0(errors: Sequence[tuple[float, float | None]]) -> np.ndarray:
    known = [(place, error) for place, error in errors if error]
    return np.array(known, dtype=np.float64).reshape(-1, 2)


def _scale(axes: Panel, layers: int) -> None:
    values = axes.drawn_values() if axes.lines else np.ones(1)
    low, high = float(values.min()) / _MARGIN, float(values.max()) * _MARGIN
    if high / low < _DECADES:
        middle = np.sqrt(low * high)
        low, high = middle / np.sqrt(_DECADES), middle * np.sqrt(_DECADES)
    axes.set_ylim(low, high)
    axes.logarithmic("y")
    axes.set_xlim(-0.5, layers - 0.2)
    axes.whole_steps()
    axes.set_xlabel("layer")
