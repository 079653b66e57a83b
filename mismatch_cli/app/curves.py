"""Metrics over the steps of a run, as lines that fit into a terminal: value, sparkline, lowest
and highest value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mismatch_cli.base.numbers import number, sparkline, stretches

if TYPE_CHECKING:
    from rich.text import Text

LABEL = 10  # columns
_BETWEEN = " · "
_NARROWEST_CURVE, _WIDEST_CURVE = 8, 40
# Heads of the columns: the last value, those beside the curve, and the curve
_NOW, _LOWEST, _HIGHEST, _STEPS = "now", "lowest", "highest", "steps"
_HEADS_RANK = 8  # heads go before the metrics do
_LEAST_PART = 0.1  # of its value: the least range of an axis


class CurveLine(NamedTuple):
    """A metric over the steps: a row of the view. `least`: the smallest range its axis shows."""

    label: str
    value: float
    values: Sequence[float]
    least: float
    note: str = ""
    digits: int = 2

    @property
    def cells(self) -> tuple[str, str, str]:
        """The last value, the lowest and the highest, as text; the axis may be wider."""
        low, high = min(self.values), max(self.values)
        return tuple(number(value, self.digits) for value in (self.value, low, high))  # type: ignore[return-value]

    @property
    def ends(self) -> tuple[float, float]:
        """From the lowest to the highest value, widened so that mere noise does not fill the
        axis.
        """
        low, high = min(self.values), max(self.values)
        short = max(0.0, self.least - (high - low))
        low = max(0.0, low - short / 2) if low >= 0 else low - short / 2
        return low, max(high, low + self.least)


class ViewLine(NamedTuple):
    """A line of the view; if there is not enough room, lines of the highest `rank` are dropped
    first.
    """

    rank: int
    text: Text


def duration(seconds: float) -> str:
    """A duration as people write it: `45 s`, `12 min`, `1 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def curve(
    rank: int, label: str, values: Sequence[float | None], note: str, digits: int
) -> list[tuple[int, CurveLine]]:
    """The curve in a list, which is empty if the last step did not measure it."""
    if values[-1] is None:
        return []
    found = [value for value in values if value is not None]
    return [(rank, CurveLine(label, found[-1], found, _LEAST_PART * max(found), note, digits))]


def curves(measures: Sequence[tuple[int, CurveLine]], width: int) -> list[ViewLine]:
    """Heads, and one line per curve: value, sparkline between its lowest and highest value, note;
    what does not fit is left out.
    """
    cells = [(_NOW, _LOWEST, _HIGHEST), *(curve.cells for _, curve in measures)]
    value, low, high = (max(map(len, column)) for column in zip(*cells, strict=True))
    note = max(len(curve.note) for _, curve in measures)
    beside = LABEL + value + 1
    rooms = {
        "note": width - beside - low - high - note - 5,
        "ends": width - beside - low - high - 3,
    }
    shown = next((what for what, room in rooms.items() if room >= _NARROWEST_CURVE), "")
    room = min(_WIDEST_CURVE, rooms.get(shown, width - beside - 1))
    heads = f"{_NOW:>{value}}"
    if room >= _NARROWEST_CURVE and any(len(curve.values) > 1 for _, curve in measures):
        heads += f"  {_LOWEST:>{low}} {_STEPS:<{room}} {_HIGHEST}" if shown else f"  {_STEPS}"
    lines = [ViewLine(_HEADS_RANK, labelled("", heads, "dim"))]
    for (rank, curve), (now, least, most) in zip(measures, cells[1:], strict=True):
        bars = (
            sparkline(stretches(curve.values, room), *curve.ends)
            if room >= _NARROWEST_CURVE
            else ""
        )
        drawn = f"{least:>{low}} {bars:<{room}} {most:<{high}}" if shown else bars
        if len(curve.values) == 1:
            drawn = " " * len(drawn)
        words = f"{now:>{value}}  {drawn}" + f"  {curve.note}" * (shown == "note")
        lines.append(ViewLine(rank, labelled(curve.label, words.rstrip())))
    return lines


def most_important(lines: Sequence[ViewLine], height: int) -> list[ViewLine]:
    """As many lines as fit, in their order; of equal rank the last ones are dropped first."""
    by_rank = sorted(range(len(lines)), key=lambda place: (lines[place].rank, place))
    return [lines[place] for place in sorted(by_rank[: max(height, 1)])]


def labelled(label: str, words: str, style: str = "") -> Text:
    from rich.text import Text

    return Text.assemble((f"{label:<{LABEL}}", "dim"), (words, style))


def plain(words: str, style: str) -> Text:
    from rich.text import Text

    return Text(words, style=style)


def blank() -> ViewLine:
    return ViewLine(11, plain("", ""))


def flow(pieces: Iterable[str], width: int, between: str = _BETWEEN) -> list[str]:
    """The pieces on as few lines as possible, broken only between pieces."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(between) + len(piece) <= width:
            lines[-1] += between + piece
        else:
            lines.append(piece)
    return lines
