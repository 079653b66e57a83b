"""Axes that show both ends: probabilities near 0 and near 1, and sizes from 0 over several
powers of ten.
"""

from collections.abc import Sequence
from math import floor, log10

import numpy as np
from matplotlib.ticker import NullLocator

from mismatch_cli.report.drawing.panels import Panel, plain_label, power_label

HIGHEST = 0.9995  # of a probability: higher ones are at the edge
_LABELS = {
    1e-5: "10⁻⁵", 1e-4: "10⁻⁴", 1e-3: "0.001", 0.01: "0.01", 0.1: "0.1", 0.5: "0.5",
    0.9: "0.9", 0.99: "0.99", 0.999: "0.999",
}  # fmt: skip
_CROWDED = (1e-4, 0.01, 0.999)  # a narrow axis has no room for their labels
_SHORT = -3  # the smallest power of ten whose multiples by 2, 3 and 5 have short labels
_APART = 26  # pixels between two ticks of a stretched axis


def margin_of(low: float, high: float, share: float, least: float) -> float:
    """Room above and below values: a share of their range, or what widens it to `least`."""
    return max(share * (high - low), (least - (high - low)) / 2)


def lowest_of(log_mu_N: np.ndarray) -> float:
    """The lower end of an axis of probabilities: a power of ten below nearly all of them, at
    least 10⁻⁵.
    """
    finite_N = log_mu_N[np.isfinite(log_mu_N)]
    exponent = np.floor(np.quantile(finite_N, 2e-3) / np.log(10)) if len(finite_N) else -3
    return float(10.0 ** np.clip(exponent, -5, -3))


def spread_probability(axes: Panel, lowest: float, which: str = "x") -> None:
    """Stretch axes of probabilities (`x` or `xy`) towards 0 and 1."""
    ticks = {tick: label for tick, label in _LABELS.items() if tick >= lowest}
    crowded = axes.style.pick((), _CROWDED)
    for name in which:
        shown = [tick for tick in ticks if name == "y" or tick == lowest or tick not in crowded]
        axes.set(**{f"{name}scale": "logit", f"{name}lim": (lowest, HIGHEST)})
        axes.set(**{f"{name}ticks": shown, f"{name}ticklabels": [ticks[tick] for tick in shown]})
        getattr(axes, f"{name}axis").set_minor_locator(NullLocator())


def stretch(
    axes: Panel, linear: float, limits: tuple[float, float], *, percent: bool = False
) -> None:
    """A vertical axis that is linear within `linear` of 0 and logarithmic beyond, so that it can
    show 0.
    """
    axes.set_yscale("asinh", linear_width=linear)
    axes.factor = 100 if percent else 1
    axes.set_ylim(*limits)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(_ticks(linear, limits, axes.box.height, _SHORT - 2 * percent))
    axes.yaxis.set_major_formatter(
        lambda value, _position: _label(100 * value if percent else value)
    )


def _ticks(
    linear: float, limits: tuple[float, float], height: float, short: int
) -> Sequence[float]:
    """0 and round values far enough apart, powers of ten before their multiples."""
    place_of = np.arcsinh(np.array(limits) / linear)
    pixels = height / (place_of[1] - place_of[0])
    lowest, highest = floor(log10(linear)) - 1, floor(log10(max(map(abs, limits))))
    powers = range(highest, lowest - 1, -1)
    sizes = [
        digit * 10.0**power
        for digit in (1, 3, 5, 2)
        for power in powers
        if digit == 1 or power >= short
    ]
    kept = [0.0] if limits[0] <= 0 <= limits[1] else []
    for value in (
        signed for size in sizes for signed in (size, -size) if limits[0] <= signed <= limits[1]
    ):
        if all(
            abs(np.arcsinh(value / linear) - np.arcsinh(other / linear)) * pixels >= _APART
            for other in kept
        ):
            kept.append(value)
    return sorted(kept)


def _label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e4:
        return ("−" if value < 0 else "") + power_label(abs(value))
    return plain_label(float(f"{value:.3g}"))
