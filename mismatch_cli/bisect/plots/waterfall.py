"""The recorded gap, the share of each cause, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.ticker import MultipleLocator

from mismatch_cli.base import numbers
from mismatch_cli.bisect.plots._rows import end_bar
from mismatch_cli.bisect.studies.bisection import in_percent
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.drawing.marks import DASHED, names_beside
from mismatch_cli.report.drawing.panels import Panel, Sheet, plain_label
from mismatch_cli.report.drawing.style import LIGHT, Theme

if TYPE_CHECKING:
    from mismatch_cli.bisect.studies.bisection import BisectionAnalysis

STUDY = "bisection"
SECTION = "Causes"
PLACE = 1
TITLE = "Share of the gap by cause"
DATA = "a gap, and causes that bisect tried"
CAPTION = (
    "The recorded gap is 100 %. Each cause removes its share, measured alone, from what those "
    "above leave; lines are 95 % intervals over prompts. Orange is a setting of the rollout, "
    "blue of the trainer, purple of both. If shares overlap, the causes remove less together "
    "than their sum, and a hatched bar adds the difference back; if they remove more together, "
    "it removes the rest. The dashed bar is the precision of both sides, measured from the full "
    "gap because it includes shares of the causes. The noise is part of what is left."
)
_ROW = 30  # pixels
_BAR = 0.62  # of a row
_MOST = 8  # causes
_LEAST = 0.005  # of the gap: smaller differences are not drawn
_OTHERS = "other causes"


class _Bar(NamedTuple):
    """A row: its two ends, as fractions of the gap."""

    label: str
    first: float
    last: float
    share: str  # the label beside it
    colour: str
    low: float | None = None  # the interval of its last end
    high: float | None = None
    look: str = "full"  # or hatched, hollow
    leads: bool = True  # to the row below

    @property
    def lowest(self) -> float:
        """The left end of the bar and of its interval."""
        return min(self.first, self.last, self.last if self.low is None else self.low)

    @property
    def highest(self) -> float:
        """The right end of the bar and of its interval."""
        return max(self.first, self.last, self.last if self.high is None else self.high)


def needs(data: BisectionAnalysis) -> bool:
    return bool(data.causes) and not data.is_equal


def draw(figure: Sheet, data: BisectionAnalysis) -> None:
    style = figure.style
    bars = list(_bars(data, figure.theme, sides=style.pick(True, False)))
    names, left = names_beside([bar.label for bar in bars], style)
    high = _ROW * len(bars)
    (axes,) = figure.panels(1, height=(high, high), left=left)
    axes.name_rows(names)
    lowest = min(bar.lowest for bar in bars)
    highest = max(bar.highest for bar in bars)
    room = style.pick(0.13, 0.34) * (highest - lowest)  # for labels at the right
    axes.set_xlim(lowest - 0.02, highest + room)
    for row, bar in enumerate(bars):
        _draw(axes, row, bar)
        end_bar(axes, row, max(bar.first, bar.last), (bar.low, bar.high), bar.share)
    _label_shares(axes)
    whole = numbers.number(data.search.gap)
    axes.headline(f"Shares of the gap of {whole} nats", f"Shares of {whole} nats", is_axis=False)


def _label_shares(axes: Panel) -> None:
    axes.axvline(0, color=axes.theme.muted, linewidth=0.9, zorder=1)
    axes.xaxis.set_major_locator(MultipleLocator(axes.style.pick(0.2, 0.5)))
    axes.xaxis.set_major_formatter(lambda value, _position: f"{plain_label(100 * value)} %")
    axes.set_xlabel("share of the recorded gap")


def alternative(data: BisectionAnalysis) -> str:
    """Each bar with its share."""
    bars = [f"{bar.label} {bar.share}" for bar in _bars(data, LIGHT, sides=True)]
    gap = numbers.number(data.search.gap)
    return (
        f"Bars. Horizontal: share of the recorded gap of {gap} nats, one bar below the other: "
        f"{'; '.join(bars)}."
    )


def _draw(axes: Panel, row: int, bar: _Bar) -> None:
    left, width = min(bar.first, bar.last), abs(bar.last - bar.first)
    outline: dict[str, Any] = {"facecolor": "none", "edgecolor": bar.colour, "linewidth": 1.1}
    looks: dict[str, dict[str, Any]] = {
        "full": {"color": bar.colour, "alpha": 0.85, "linewidth": 0},
        "hatched": outline | {"hatch": "///"},
        "hollow": outline | {"linestyle": DASHED},
    }
    axes.barh(row, width, _BAR, left, zorder=2, **looks[bar.look])
    if bar.leads:
        ends = row - _BAR / 2, row + 1 + _BAR / 2
        axes.vlines(bar.last, *ends, color=axes.theme.muted, linewidth=0.7, zorder=1)


def _bars(data: BisectionAnalysis, theme: Theme, *, sides: bool) -> Iterator[_Bar]:
    """From the full gap down to what is left; then the precision, and the noise."""
    yield _Bar("as recorded", 0.0, 1.0, "100 %", theme.muted, leads=bool(data.named))
    yield from _steps(data, theme, sides)
    if data.named:
        yield _from_0("left", data.remaining, theme.muted)
    if data.floor is not None:
        bar = _removed(data.name(data.floor), 1.0, data.floor.share, theme.green)
        yield bar._replace(look="hollow", leads=False)
    if data.noise is not None:
        yield _from_0("noise", data.noise, theme.gold)


def _steps(data: BisectionAnalysis, theme: Theme, sides: bool) -> Iterator[_Bar]:
    """Each bar begins where the one above ends; without `sides` in names, only colours show the
    side.
    """
    colours = {"rollout": theme.orange, "trainer": theme.blue, "both": theme.purple}
    at = 1.0
    for row in data.named[:_MOST]:
        name = data.name(row) if sides else row.experiment.setting
        yield _removed(name, at, row.share, colours[row.experiment.side])
        at -= row.removes
    others = data.named[_MOST:]
    if others:
        share = sum(row.removes for row in others)
        yield _removed(_OTHERS, at, Estimate(share), theme.gold)
        at -= share
    left = data.remaining.value or 0.0
    if len(data.named) > 1 and abs(left - at) >= _LEAST:
        label = "shares overlap" if left > at else "only together"
        share_label = in_percent(Estimate(abs(left - at)))
        yield _Bar(label, at, left, share_label, theme.muted, look="hatched")


def _removed(label: str, at: float, share: Estimate, colour: str) -> _Bar:
    """A bar down from `at` by a share."""
    bar = _Bar(label, at, at - (share.value or 0.0), in_percent(share), colour)
    if share.low is None or share.high is None:
        return bar
    # The bar runs down, so that the lowest share is the right end of its interval.
    return bar._replace(low=at - share.high, high=at - share.low)


def _from_0(label: str, share: Estimate, colour: str) -> _Bar:
    ends = 0.0, share.value or 0.0
    return _Bar(label, *ends, in_percent(share), colour, share.low, share.high, leads=False)
