"""Estimates as arrays and as lines with their interval bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Estimate = Mapping[str, Any]


def parts_of(estimates: Sequence[Estimate | None]) -> np.ndarray:
    """Value, low and high of each estimate in a row; NaN where there is none."""
    rows = [[(estimate or {}).get(part) for part in ("value", "low", "high")] for estimate in estimates]
    return np.array([[np.nan if x is None else float(x) for x in row] for row in rows]).reshape(-1, 3)


def any_above_0(estimates: Sequence[Estimate | None]) -> bool:
    return bool((parts_of(estimates)[:, 0] > 0).any())


def draw_line(
    axes: Axes, x_B: np.ndarray, estimates: Sequence[Estimate | None], colour: str, *, band: bool = True, **line: Any
) -> None:
    """A line through the values and, where `band`, the interval around it; what has no value leaves a gap."""
    value_B, low_B, high_B = parts_of(estimates).T
    if not np.isfinite(value_B).any():
        return
    if band and np.isfinite(high_B).any():
        axes.fill_between(x_B, low_B, high_B, color=colour, alpha=0.17, linewidth=0)
    axes.plot(x_B, value_B, color=colour, **line)


def positive(estimates: Sequence[Estimate | None]) -> list[Estimate]:
    """For a logarithmic axis, which has no zero: the line ends there, and a band goes on to the lower edge."""
    rows: list[Estimate] = []
    for value, low, high in parts_of(estimates):
        shown = value > 0
        has_band = shown and np.isfinite(low) and np.isfinite(high)
        band = (max(low, 1e-4 * value), high) if has_band else (None, None)
        rows.append({"value": value if shown else None, "low": band[0], "high": band[1]})
    return rows


def middle_of_steps(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Where each row of `by_step` stands on the axis of steps."""
    return np.array([(row["first"] + row["last"]) / 2 for row in rows])


def whole_steps(axes: Axes) -> None:
    """An axis of training steps: whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
