"""Ratio and total variation of each token against its rollout probability (DPPO paper, arXiv 2602.04879, figure 2)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mismatch_cli.report.plots._fills import draw_points, thin
from mismatch_cli.report.plots._panels import LEGEND, Panel, Sheet
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "Ratio against TV"
TITLE = "Ratio and total variation by rollout probability"
CAPTION = (
    "Each dot is a sampled token at its rollout probability μ: the ratio r = π/μ, and the total variation between "
    "both distributions; lines are percentiles of the dots. The ratio fans out towards small μ even where the "
    "distributions hardly differ, so a clip on it hits rare tokens; binary TV |π − μ| is small at low μ by "
    "construction. Dashed, where the data shows it: r ≈ 1 ± δ(1 − μ), left behind by logits that were rounded in "
    "steps of δ."
)

_FEWEST = 100  # tokens in a bin: one of them is beyond each of the outer percentiles


class _Tokens(NamedTuple):
    mu_N: np.ndarray
    ratio_N: np.ndarray
    tv_N: np.ndarray
    tv_binary_N: np.ndarray
    topk: bool


def needs(data: PlotData) -> bool:
    return len(data.logq_N) > 0


def draw(figure: Sheet, data: PlotData) -> None:
    tokens = _tokens(data, figure.style)
    panels = figure.panels(4, height=(290, 230), legend=LEGEND)
    both_edges = np.linspace(0, 1, 21), _decades(tokens.mu_N)
    ratio_reach = _reach(tokens.mu_N, np.abs(tokens.ratio_N - 1), both_edges, most=2.0)
    ratio_reach = max([ratio_reach, *(1.25 * np.expm1(step) for step in data.lattice_steps)])
    tv_reach = _reach(tokens.mu_N, tokens.tv_N, both_edges, most=1.0)
    for edges, (ratio, tv) in zip(both_edges, (panels[:2], panels[2:]), strict=True):
        ratio.set_ylim(max(0, 1 - ratio_reach), 1 + ratio_reach)
        ratio.axhline(1, color=figure.theme.muted, linewidth=0.9, zorder=3)
        _draw_cloud(ratio, tokens.mu_N, tokens.ratio_N, edges)
        ratio.headline("Ratio π/μ", note=_beyond(ratio, tokens.ratio_N))
        tv.set_ylim(0, tv_reach)
        _draw_cloud(tv, tokens.mu_N, tokens.tv_N, edges)
        if tokens.topk:
            _draw_binary(tv, tokens, edges)
            tv.headline("Total variation, top-K", note=_beyond(tv, tokens.tv_N))
        else:
            tv.headline("Binary TV, small at low μ by definition")
    _draw_lattice(panels[0], data.lattice_steps)


def _tokens(data: PlotData, style: Style) -> _Tokens:
    chosen = thin(len(data.logq_N), style)
    logq_N, logp_N = data.logq_N[chosen].astype(np.float64), data.logp_N[chosen].astype(np.float64)
    mu_N, ratio_N = np.exp(logq_N), np.exp(logp_N - logq_N)
    binary_N = np.abs(np.exp(logp_N) - mu_N)
    topk_N = None if data.tv_topk_N is None else data.tv_topk_N[chosen].astype(np.float64)
    if topk_N is None or np.isnan(topk_N).all():
        return _Tokens(mu_N, ratio_N, binary_N, binary_N, topk=False)
    return _Tokens(mu_N, ratio_N, topk_N, binary_N, topk=True)


def _decades(mu_N: np.ndarray) -> np.ndarray:
    """Edges from the smallest μ (1e-6 at the least): half decades up to 0.1, then finer, where most tokens are."""
    positive_N = mu_N[mu_N > 0]
    smallest = np.quantile(positive_N, 2e-4) if len(positive_N) else 1e-2
    lowest = int(np.clip(np.floor(np.log10(smallest)), -6, -2))
    return np.array([*np.logspace(lowest, -1, -2 * lowest - 1), 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 1])


def _reach(mu_N: np.ndarray, distance_N: np.ndarray, both_edges: tuple[np.ndarray, ...], most: float) -> float:
    """How far an axis goes: over every percentile line, and over all but one token in a thousand."""
    finite_N = distance_N[np.isfinite(distance_N)]
    if not len(finite_N):
        return most
    lines = [_percentiles(mu_N, distance_N, edges)[1][:, 2].max(initial=0) for edges in both_edges]
    return float(np.clip(1.08 * max(np.quantile(finite_N, 0.999), *lines), 1e-5, most))


def _draw_binary(axes: Panel, tokens: _Tokens, edges: np.ndarray) -> None:
    centre_B, quantile_B3 = _percentiles(tokens.mu_N, tokens.tv_binary_N, edges)
    label = axes.style.pick("binary TV |π − μ|, 99th percentile", "binary TV, 99 %")
    axes.plot(centre_B, quantile_B3[:, 2], color=axes.theme.green, linestyle=(0, (4, 1.5)), label=label, zorder=5)


def _beyond(axes: Panel, y_N: np.ndarray) -> str:
    low, high = axes.get_ylim()
    beyond = int(np.count_nonzero((y_N < low) | (y_N > high)))
    return f"{beyond:,} dot{'s' if beyond > 1 else ''} off the scale" if beyond else ""


def _draw_cloud(axes: Panel, mu_N: np.ndarray, y_N: np.ndarray, edges: np.ndarray) -> None:
    """The dots, and lines through their percentiles; the vertical limits must be final."""
    colour, logarithmic = axes.theme.orange, edges[0] > 0
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("rollout probability μ" + (", logarithmic" if logarithmic else ""))
    if logarithmic:
        axes.logarithmic("x")
    draw_points(axes, mu_N, y_N, axes.theme.blue)
    centre_B, quantile_B3 = _percentiles(mu_N, y_N, edges)
    axes.fill_between(centre_B, quantile_B3[:, 0], quantile_B3[:, 2], color=colour, alpha=0.10, zorder=1, linewidth=0)
    axes.plot(centre_B, quantile_B3[:, 1], color=colour, linewidth=2.2, label="median", zorder=4)
    for column, label in ((0, axes.style.pick("1st, 99th percentile", "1 %, 99 %")), (2, None)):
        axes.plot(centre_B, quantile_B3[:, column], color=colour, linewidth=1.2, label=label, zorder=4)


def _percentiles(mu_N: np.ndarray, y_N: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median μ of each bin, and the 1st, 50th and 99th percentile of y in it.

    Bins with too few tokens for a percentile join the next one; too few at the end join the one before.
    """
    order = np.argsort(mu_N[np.isfinite(y_N)])
    mu_N, y_N = mu_N[np.isfinite(y_N)][order], y_N[np.isfinite(y_N)][order]
    starts = [0]
    for edge in np.searchsorted(mu_N, edges[1:-1]):
        if min(edge - starts[-1], len(mu_N) - edge) >= _FEWEST:
            starts.append(int(edge))
    if len(mu_N) < _FEWEST:
        return np.zeros(0), np.zeros((0, 3))
    bins = [slice(first, last) for first, last in itertools.pairwise([*starts, len(mu_N)])]
    centre_B = np.array([np.median(mu_N[tokens]) for tokens in bins])
    return centre_B, np.array([np.quantile(y_N[tokens], [0.01, 0.5, 0.99]) for tokens in bins])


def _draw_lattice(axes: Panel, steps: tuple[float, ...]) -> None:
    """Where tokens lie whose own logit is off by ±δ: the odds change by e^±δ, so r = e^±δ / (1 + μ(e^±δ − 1))."""
    mu, theme = np.linspace(0, 1, 101), axes.theme
    for step in steps:
        for signed in (step, -step):
            ratio = np.exp(signed) / (1 + mu * np.expm1(signed))
            axes.plot(mu, ratio, color=theme.ink, linewidth=0.9, linestyle=(0, (3, 2)), zorder=5)
        axes.annotate(
            f"δ = 1/{round(1 / step)}", (0.02, np.exp(step)), xytext=(0, 1), textcoords="offset points",
            color=theme.ink, fontsize=axes.style.small, va="bottom", zorder=6,
            bbox={"facecolor": theme.page, "edgecolor": "none", "alpha": 0.75, "pad": 1},
        )  # fmt: skip
