"""Distance between the residual streams of engine and trainer by layer, and what each block
adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
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
    "accumulated rounding. Axes are logarithmic; bit-equal and infinite values have no mark."
)
_Error = tuple[float, float | None]  # place on the axis, and error
_MARKED = 40  # layers up to which every point is marked
_MARGIN = 1.6  # times, around the values
_DECADES = 100.0  # the smallest range of an axis


def needs(data: BisectionAnalysis) -> bool:
    return any(map(len, _series(data).values()))


def draw(figure: Sheet, data: BisectionAnalysis) -> None:
    inherited, added = figure.panels(2, height=(250, 190), legend=LEGEND, between=66)
    layers, theme = len(_layers(data)), figure.theme
    mark: dict[str, Any] = {}
    # Marks of more layers would touch.
    if layers <= _MARKED:
        mark = {"marker": "o", "markersize": 3.5}
    looks = ((inherited, theme.purple), (added, theme.blue), (added, theme.orange))
    for (name, errors_N2), (axes, colour) in zip(_series(data).items(), looks, strict=True):
        if len(errors_N2):
            axes.plot(*errors_N2.T, color=colour, label=name, **mark)
    for axes in (inherited, added):
        _scale(axes, layers)
    inherited.headline("Inherited: error of the stream, relative", "Inherited error, relative")
    added.headline("Added by each block, relative to the stream", "Added by each block, relative")


def _layers(data: BisectionAnalysis) -> Sequence[StreamErrors]:
    return () if data.modules is None else data.modules.layers


def _series(data: BisectionAnalysis) -> dict[str, np.ndarray]:
    """Layer and error, `[N, 2]`, of the stream at each of its points, and added by each block."""
    stream, attention, mlp = list[_Error](), list[_Error](), list[_Error]()
    for row in _layers(data):
        for third, point in enumerate((row.before, row.attention, row.mlp)):
            if point is not None:
                stream.append((row.layer + third / 3, point.inherited))
        if row.attention is not None:
            attention.append((row.layer, row.attention.added))
        if row.mlp is not None:
            mlp.append((row.layer, row.mlp.added))
    return {
        "residual stream": _above_0(stream),
        "attention": _above_0(attention),
        "MLP": _above_0(mlp),
    }


def _above_0(errors: Sequence[_Error]) -> np.ndarray:
    """Those that a logarithmic axis can show."""
    above = [(place, error) for place, error in errors if error and isfinite(error)]
    return np.array(above, dtype=np.float64).reshape(-1, 2)


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
