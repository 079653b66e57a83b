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
        now, low, high = self.value, min(self.values), max(self.values)
        return number(now, self.digits), number(low, self.digits), number(high, self.digits)

    @property
    def ends(self) -> tuple[float, float]:
        """From the lowest to the highest value, widened so that mere noise does not fill the
        axis.
        """
        low, high = min(self.values), max(self.values)
        short = max(0.0, self.least - (high - low))
        widened = low - short / 2
        # The axis of a metric that cannot be negative does not begin below 0.
        if low >= 0:
            widened = max(0.0, widened)
        return widened, max(high, widened + self.least)


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
    """The curve with its rank, in a list, which is empty if the last step did not measure it."""
    if values[-1] is None:
        return []
    measured = [value for value in values if value is not None]
    least = _LEAST_PART * max(measured)
    return [(rank, CurveLine(label, measured[-1], measured, least, note, digits))]


def curves(measures: Sequence[tuple[int, CurveLine]], width: int) -> list[ViewLine]:
    """Heads, and one line per curve: value, sparkline between its lowest and highest value, note;
    what does not fit is left out.
    """
    columns = _Columns.of(measures, width)
    has_curves = any(len(curve.values) > 1 for _, curve in measures)
    lines = [ViewLine(_HEADS_RANK, labelled("", columns.heads(with_curves=has_curves), "dim"))]
    for rank, curve in measures:
        lines.append(ViewLine(rank, labelled(curve.label, columns.text_of(curve))))
    return lines


class _Columns(NamedTuple):
    """The columns of the view, by their widths. `has_ends`: the curve is between its lowest and its
    highest value; `has_notes`: and a note follows.
    """

    value: int
    low: int
    high: int
    curve: int
    has_ends: bool
    has_notes: bool

    @classmethod
    def of(cls, measures: Sequence[tuple[int, CurveLine]], width: int) -> _Columns:
        """The columns that leave room for a curve: with ends and notes, only ends, or neither."""
        cells = [(_NOW, _LOWEST, _HIGHEST), *(curve.cells for _, curve in measures)]
        value, low, high = (max(map(len, column)) for column in zip(*cells, strict=True))
        note = max(len(curve.note) for _, curve in measures)
        beside_value = width - (LABEL + value + 1)
        beside_ends = beside_value - low - high - 3
        beside_note = beside_ends - note - 2
        has_notes = beside_note >= _NARROWEST_CURVE
        has_ends = has_notes or beside_ends >= _NARROWEST_CURVE
        if has_notes:
            room = beside_note
        elif has_ends:
            room = beside_ends
        else:
            room = beside_value - 1
        return cls(value, low, high, min(_WIDEST_CURVE, room), has_ends, has_notes)

    @property
    def has_curve(self) -> bool:
        """Whether a curve has room beside the value."""
        return self.curve >= _NARROWEST_CURVE

    def heads(self, *, with_curves: bool) -> str:
        """The heads; `with_curves`: of the curves and their ends too."""
        heads = f"{_NOW:>{self.value}}"
        if not with_curves or not self.has_curve:
            return heads
        if not self.has_ends:
            return f"{heads}  {_STEPS}"
        return f"{heads}  {_LOWEST:>{self.low}} {_STEPS:<{self.curve}} {_HIGHEST}"

    def text_of(self, curve: CurveLine) -> str:
        """A line: the curve and its ends stay blank until there is a second value."""
        now, least, most = curve.cells
        drawn = ""
        if self.has_curve:
            drawn = sparkline(stretches(curve.values, self.curve), *curve.ends)
        if self.has_ends:
            drawn = f"{least:>{self.low}} {drawn:<{self.curve}} {most:<{self.high}}"
        if len(curve.values) == 1:
            drawn = " " * len(drawn)
        text = f"{now:>{self.value}}  {drawn}"
        if self.has_notes:
            text += f"  {curve.note}"
        return text.rstrip()


def most_important(lines: Sequence[ViewLine], height: int) -> list[ViewLine]:
    """As many lines as fit, in their order; of equal rank the last ones are dropped first."""
    by_rank = sorted(range(len(lines)), key=lambda i: (lines[i].rank, i))
    return [lines[i] for i in sorted(by_rank[: max(height, 1)])]


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
