"""Ratio and total variation of each token against its rollout probability (DPPO paper, arXiv
2602.04879, figure 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.metrics.pair_summary import ProbabilityBin
from mismatch_cli.report.drawing.fills import draw_points, thin
from mismatch_cli.report.drawing.lines import DASHED, label_in_units, parts_of
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet
from mismatch_cli.report.drawing.scales import HIGHEST, lowest_of, spread_probability

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "Ratio and TV by probability"
PLACE = 1
TITLE = "Ratio and total variation by rollout probability"
DATA = "tokens scored by both sides"
CAPTION = (
    "Each dot is a sampled token at its rollout probability μ, on an axis stretched towards 0 "
    "and 1: the ratio r = π/μ, and the total variation (TV) between both distributions. Lines "
    "are percentiles of the tokens in a bin of μ, for bins of at least 200 tokens; bands are "
    "their 95 % intervals over prompts, where a bin has enough tokens. The ratio fans out at "
    "small μ even where the distributions hardly differ, so a ratio clip hits rare tokens; "
    "binary TV |π − μ| is small at low μ by construction."
)

_BINARY = "Binary TV |π − μ|, small at low μ by definition", "Binary TV |π − μ|"
_NAMES = {
    "ratio_p01": "1st percentile",
    "ratio_p99": "99th percentile",
    "tv_topk_p99": "99th percentile",
    "tv_binary_p99": "99th percentile of binary TV",
}
_CLOSE = 1e-3  # to 1: a ratio within it is drawn as its distance from 1
_FEWEST = 200  # tokens of a bin, of which two are beyond the percentile

Rows = Sequence[ProbabilityBin]


def needs(data: PlotData) -> bool:
    return bool(np.isfinite(data.logp_N).any())


def draw(figure: Sheet, data: PlotData) -> None:
    chosen = thin(len(data.logq_N), figure.style)
    logq_N, logp_N = data.logq_N[chosen].astype(np.float64), data.logp_N[chosen].astype(np.float64)
    topk_N = None if data.tv_topk_N is None else data.tv_topk_N[chosen].astype(np.float64)
    has_topk = topk_N is not None and bool(np.isfinite(topk_N).any())
    tv_N = topk_N if topk_N is not None and has_topk else np.abs(np.exp(logp_N) - np.exp(logq_N))
    ratio_N, rows = (
        np.exp(logp_N - logq_N),
        [row for row in data.summary.volatility if row.tokens >= _FEWEST],
    )
    ratio, tv = figure.panels(2, height=(320, 250), legend=LEGEND)
    for axes in (ratio, tv):
        spread_probability(axes, lowest_of(logq_N))
        axes.set_xlabel("rollout probability μ")
    reach = _reach(
        np.abs(ratio_N - 1),
        parts_of(row.metrics[f"ratio_{end}"] for row in rows for end in ("p01", "p99")) - 1,
        2,
    )
    middle, title = (1.0, "Ratio π/μ") if reach >= _CLOSE else (0.0, "Ratio π/μ − 1")
    ratio.set_ylim(max(0.0, 1 - reach) - 1 + middle, reach + middle)
    ratio.axhline(middle, color=figure.theme.muted, linewidth=0.9, zorder=3)
    percentiles, shift = "1st and 99th percentile", middle - 1
    _draw_percentile(ratio, rows, "ratio_p01", ratio.theme.orange, label=percentiles, shift=shift)
    _draw_percentile(ratio, rows, "ratio_p99", ratio.theme.orange, shift=shift)
    _draw_tokens(ratio, logq_N, ratio_N + shift, title)
    tv.set_ylim(
        0,
        _reach(
            tv_N,
            parts_of(row.metrics[key] for row in rows for key in ("tv_binary_p99", "tv_topk_p99")),
            1,
        ),
    )
    if has_topk:
        _draw_percentile(
            tv,
            rows,
            "tv_topk_p99",
            tv.theme.orange,
            label=figure.style.pick("99th percentile", "99 %"),
        )
    binary = figure.style.pick("99th percentile of binary TV |π − μ|", "99 % of binary TV")
    _draw_percentile(
        tv,
        rows,
        "tv_binary_p99",
        tv.theme.green,
        label=binary,
        linestyle=DASHED if has_topk else "-",
    )
    _draw_tokens(tv, logq_N, tv_N, *(("Total variation, top-K",) if has_topk else _BINARY))


def _reach(distance_N: np.ndarray, lines_B3: np.ndarray, most: float) -> float:
    """The range of an axis: every percentile line, and all but one token in a thousand."""
    finite_N, lines_B = distance_N[np.isfinite(distance_N)], np.abs(lines_B3[np.isfinite(lines_B3)])
    return float(
        np.clip(1.08 * max(np.quantile(finite_N, 0.999), lines_B.max(initial=0)), 1e-7, most)
    )


def _draw_tokens(
    axes: Panel, logq_N: np.ndarray, y_N: np.ndarray, title: str, short: str = ""
) -> None:
    """Draw the dots, and note how many are off the scale; limits must be final."""
    low, high = axes.get_ylim()
    beyond = int(np.count_nonzero((y_N < low) | (y_N > high)))
    draw_points(axes, np.clip(np.exp(logq_N), axes.get_xlim()[0], HIGHEST), y_N, axes.theme.blue)
    off = f"{beyond:,} dot{'s' if beyond > 1 else ''} off the scale" if beyond else ""
    axes.headline(title, short, note=" · ".join(filter(None, (off, label_in_units(axes, 1)))))


def _draw_percentile(
    axes: Panel,
    rows: Rows,
    key: str,
    colour: str,
    *,
    label: str = "",
    shift: float = 0.0,
    linestyle: Any = "-",
) -> None:
    """Draw a step over each bin of μ, in a band for its interval."""
    low, high = axes.get_xlim()
    for row in rows:
        ends = np.clip([row.mu_low, row.mu_high], low, high)
        value, *interval = parts_of([row.metrics[key]])[0] + shift
        if np.isfinite(interval).all():
            axes.fill_between(ends, *interval, color=colour, alpha=0.2, linewidth=0, zorder=3)
        axes.plot(
            ends,
            [value, value],
            color=colour,
            linestyle=linestyle,
            linewidth=1.8,
            zorder=4,
            label=label or None,
            gid=_NAMES[key],
        )
        label = ""
