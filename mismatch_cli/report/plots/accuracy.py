"""How often each problem is solved, and the held-out accuracy of the kept ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.drawing.marks import DASHED, draw_bars, draw_points
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.curation import CurationAnalysis

STUDY = "curation"
SECTION = "Accuracy, chosen and held out"
TITLE = "Accuracy of the problems, chosen and held out"
DATA = "problems that were kept and sampled again"
CAPTION = (
    "Left: histogram of problems by accuracy when chosen; the kept range is shaded. Right: each "
    "kept problem by accuracy when chosen and on held-out samples, with the mean of each sixth "
    "of the range and its 95 % interval. A line of means flatter than the diagonal is regression "
    "to the mean."
)

_JITTER = 0.35  # of the step between two accuracies: separates dots with equal numbers


def needs(data: CurationAnalysis) -> bool:
    return len(data.pairs_K2) > 0


def draw(figure: Sheet, data: CurationAnalysis) -> None:
    left, right = figure.panels(2, height=(300, 230), legend=LEGEND)
    _draw_histogram(left, data)
    _draw_held_out(right, data)


def _draw_histogram(axes: Panel, data: CurationAnalysis) -> None:
    count_B, edge_B = data.histogram
    look: dict[str, Any] = {"color": axes.theme.blue, "edgecolor": axes.theme.page}
    axes.bar(edge_B[:-1], count_B, np.diff(edge_B), align="edge", linewidth=0.6, **look)
    axes.axvspan(*data.curation.keep, color=axes.theme.orange, alpha=0.12, zorder=0, linewidth=0)
    axes.set_xlim(min(edge_B[0], -0.02), max(edge_B[-1], 1.02))
    if edge_B[0] > -1 and edge_B[-1] < 2:
        axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.set_xlabel(f"accuracy on {data.curation.samples} samples")
    axes.grid(visible=False, axis="x")
    axes.headline("Problems", note=f"{len(data.curation.kept):,} of {len(data.accuracy_P):,} kept")


def _draw_held_out(axes: Panel, data: CurationAnalysis) -> None:
    from mismatch_cli.studies.curation import mean_over_problems

    theme = axes.theme
    axes.plot([0, 1], [0, 1], color=theme.muted, linewidth=0.9, linestyle=DASHED, label="equal")
    axes.axhspan(*data.curation.keep, color=theme.orange, alpha=0.12, zorder=0, linewidth=0)
    dot_K2 = _jittered(data)
    draw_points(axes, dot_K2[:, 0], dot_K2[:, 1], theme.blue)
    x_B, means = [], []
    for _, _, pair_K2 in data.bins:
        x_B.append(pair_K2[:, 0].mean())
        means.append(mean_over_problems(pair_K2[:, 1]))
    draw_bars(axes, x_B, means, theme.orange, markersize=4, label="mean of each sixth")
    axes.set_xlim(0, 1)
    axes.set_ylim(*_reach(data.pairs_K2[:, 1]))
    axes.set_xlabel("accuracy when chosen")
    axes.headline("Held-out accuracy")


def _jittered(data: CurationAnalysis) -> np.ndarray:
    """Both accuracies of each kept problem, [K, 2], moved a little: many are equal."""
    sample_count_2 = np.array([data.curation.samples, data.curation.held_out_samples])
    # A fixed seed: the same data gives the same picture.
    random = np.random.default_rng(0)
    jitter_K2 = random.uniform(-_JITTER, _JITTER, data.pairs_K2.shape) / sample_count_2
    low, high = _reach(data.pairs_K2[:, 1])
    return np.clip(data.pairs_K2 + jitter_K2, (0, low), (1, high))


def _reach(accuracy_K: np.ndarray) -> tuple[float, float]:
    """From 0 to 1, and to the rewards of a user's own function beyond these."""
    return min(0.0, float(accuracy_K.min())), max(1.0, float(accuracy_K.max()))
