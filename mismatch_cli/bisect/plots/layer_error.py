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
_POINTS = {"before": 0.0, "attention": 1 / 3, "mlp": 2 / 3}  # place within a layer
_MARKED = 40  # layers up to which every point is marked
_MARGIN = 1.6  # times, around the values
_DECADES = 100.0  # the smallest range of an axis


def needs(data: BisectionAnalysis) -> bool:
    return bool(
        len(_inherited(_rows(data)))
        or any(len(_added(_rows(data), block)) for block in ("attention", "mlp"))
    )


def draw(figure: Sheet, data: BisectionAnalysis) -> None:
    rows = _rows(data)
    panels = figure.panels(2, height=(250, 190), legend=LEGEND, between=66)
    mark: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(rows) <= _MARKED else {}
    inherited = _inherited(rows)
    if len(inherited):
        panels[0].plot(
            inherited[:, 0],
            inherited[:, 1],
            color=figure.theme.purple,
            label="residual stream",
            **mark,
        )
    for block, colour, label in (
        ("attention", figure.theme.blue, "attention"),
        ("mlp", figure.theme.orange, "MLP"),
    ):
        added = _added(rows, block)
        if len(added):
            panels[1].plot(added[:, 0], added[:, 1], color=colour, label=label, **mark)
    for axes in panels:
        _scale(axes, len(rows))
    panels[0].headline("Inherited: error of the stream, relative", "Inherited error, relative")
    panels[1].headline(
        "Added by each block, relative to the stream", "Added by each block, relative"
    )


def _rows(data: BisectionAnalysis) -> Sequence[Any]:
    return (data.search.modules or {}).get("layers") or ()


def _inherited(rows: Sequence[Any]) -> np.ndarray:
    """Layer and error at each point of the stream with an error, [N, 2]."""
    found = [
        (row["layer"] + place, _at(row, point, "inherited"))
        for row in rows
        for point, place in _POINTS.items()
    ]
    return _above_0(found)


def _added(rows: Sequence[Any], block: str) -> np.ndarray:
    return _above_0([(row["layer"], _at(row, block, "added")) for row in rows])


def _at(row: Any, point: str, what: str) -> float:
    return float((row.get(point) or {}).get(what) or 0.0)


def _above_0(found: Sequence[tuple[float, float]]) -> np.ndarray:
    return np.array([pair for pair in found if pair[1] > 0], dtype=np.float64).reshape(-1, 2)


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
